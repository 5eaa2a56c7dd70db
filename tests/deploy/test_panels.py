"""Every panel of the dashboards shows what happened: two real servers, a real Prometheus, a load that counts itself.

And a panel that is wrong is found, in the ways in which public dashboards of other servers are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.panels.__main__ import table
from loadtest.panels.dashboard import FOLDER, Dashboard, load, substitute
from loadtest.panels.proof import MAY_BE_EMPTY, MAY_STAY_ZERO, Shown, prove
from loadtest.panels.stage import Stage, staged
from loadtest.panels.traffic import QUICK
from tests.programs import program

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(600)]

DASHBOARDS = {dashboard.uid: dashboard for dashboard in map(load, sorted(FOLDER.glob("*.json")))}


class Proof:
    """The stage, and a loop to ask it in."""

    def __init__(self, runner: asyncio.Runner, stage: Stage) -> None:
        self._runner = runner
        self.stage = stage

    def by_instance(self, expression: str) -> dict[str, float]:
        """The one series of each instance, once the load is over."""
        found = self._runner.run(self.stage.prometheus.now(expression, self.stage.window.end))
        assert len(found) == len(self.stage.windows), found
        return {series.labels["instance"]: series.samples[-1][1] for series in found}

    def of(self, dashboard: Dashboard) -> list[Shown]:
        return self._runner.run(prove(self.stage, dashboard))


@pytest.fixture(scope="module")
def proof(embedded_path: Path) -> Iterator[Proof]:
    program("prometheus", "prometheus")
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            yield Proof(runner, runner.run(stack.enter_async_context(staged(QUICK, 2, print))))
        finally:
            runner.run(stack.aclose())


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_every_panel_is_right(proof: Proof, uid: str) -> None:
    shown = proof.of(DASHBOARDS[uid])
    wrong = [panel for panel in shown if panel.problems]
    assert not wrong, "\n" + table(wrong)
    assert sum(line.expected is not None for panel in shown for line in panel.lines) >= {"sluice": 70}.get(uid, 24)


def test_what_the_clients_know_is_shown_somewhere(proof: Proof) -> None:
    """A panel or a series that is renamed takes its check along."""
    titles = {uid: {panel.title for panel in dashboard.panels} for uid, dashboard in DASHBOARDS.items()}
    legends = {(panel.title, query.legend) for panel in DASHBOARDS["sluice"].panels for query in panel.queries}
    by_label = {title for title, legend in legends if "{{" in legend}
    assert {key for key in proof.stage.truth.summed() if key[0] not in by_label} <= legends
    assert {title for title, _ in proof.stage.truth.summed()} <= titles["sluice"]
    assert set(proof.stage.truth.of_replica()) <= titles["sluice-replicas"]
    exceptions = {*MAY_BE_EMPTY, *MAY_STAY_ZERO}
    assert all(title in titles[uid] for uid, title in exceptions)


@pytest.mark.parametrize(
    ("uid", "title", "right", "wrong", "why"),
    [
        ("sluice", "Finished requests by reason", "sluice_requests_total", "sluice_request_total", "no series"),
        ("sluice", "Finished requests by reason", "by (finish_reason)", "by (endpoint)", "'stop' shows nothing"),
        ("sluice", "Running and waiting", "sum(sluice_requests_running{", "avg(sluice_requests_running{", "(surge)"),
        ("sluice", "Running", "sum(sluice_requests_running{", "count(sluice_requests_running{", "'running' is 2"),
        ("sluice", "Tokens a second", "sum(rate(sluice_generation", "avg(rate(sluice_generation", "'generated' is"),
        ("sluice", "Tokens a second", "sluice_generation_tokens_total", "sluice_prompt_tokens_total", "'generated' is"),
        ("sluice", "Tokens a second", "[$__rate_interval]", "[5m]", "'generated' is"),
        ("sluice", "Time to first token", "_first_token_seconds_bucket", "_first_token_seconds_sum", "no series"),
        ("sluice", "KV pool in use", 'state="used"', 'state="usage"', "'used' shows nothing"),
        ("sluice", "Usage", 'state="used"', 'state="free"', "after it"),
        ("sluice", "Evicted blocks by cause", "sum by (cause)", "avg by (cause)", "'h2o' is"),
        (
            "sluice",
            "Tokens kept and dropped by budgets",
            "_tokens_total{",
            '_tokens_total{outcome="kept", ',
            "'window dropped'",
        ),
        (
            "sluice",
            "Tokens kept and dropped by budgets",
            "by (policy, outcome)",
            "by (policy)",
            "'h2o kept' shows nothing",
        ),
        (
            "sluice",
            "Bytes by tier and state",
            "sluice_kv_cache_bytes{",
            'sluice_kv_cache_bytes{tier="device", ',
            "'*' is",
        ),
        ("sluice", "Host blocks by state", "_host_blocks{", "_blocks{", "'*' is"),
        ("sluice", "Host copies and evictions", "by (direction)", "by (model_name)", "'load' shows nothing"),
        ("sluice", "Copy time", "sluice_kv_copy_seconds_bucket", "sluice_kv_copy_bucket", "no series"),
        ("sluice", "Goodput", 'met="true"', 'met!="true"', "'goodput' is"),
        (
            "sluice",
            "Use of the limits",
            "sum(sluice_requests_running{",
            "9 * sum(sluice_requests_running{",
            "ends at 1",
        ),
        ("sluice", "Error ratio", "stop|length", "stop", "'error ratio' is"),
        ("sluice-replicas", "Generated tokens", "sum by (instance)", "sum by (model_name)", "not the replicas"),
        ("sluice-replicas", "Waiting", "sluice_requests_waiting{", "sluice_requests_waiting_limit{", "4 after it"),
        ("sluice-replicas", "Running", "sum by (instance) (", "sum by (instance) (rate(", "HTTP 400"),
    ],
)
def test_a_wrong_panel_is_found(proof: Proof, uid: str, title: str, right: str, wrong: str, why: str) -> None:
    dashboard = DASHBOARDS[uid]
    panel = next(panel for panel in dashboard.panels if panel.title == title)
    queries = tuple(replace(query, expression=query.expression.replace(right, wrong)) for query in panel.queries)
    assert queries != panel.queries
    [shown] = proof.of(replace(dashboard, panels=(replace(panel, queries=queries),)))
    assert any(why in problem for problem in shown.problems), shown.problems


def test_the_tiers_agree_with_each_other(proof: Proof) -> None:
    """What the clients cannot see: how often host memory was written and given up, and what is in it at the end."""

    def at_the_end(name: str, **labels: str) -> dict[str, float]:
        matchers = ", ".join(f'{label}="{value}"' for label, value in labels.items())
        return proof.by_instance(f"sluice_{name}{{{matchers}}}")

    saved = at_the_end("kv_cache_host_copied_blocks_total", direction="save")
    given_up = at_the_end("kv_cache_host_evicted_blocks_total")
    evicted = at_the_end("kv_cache_evicted_blocks_total", cause="prefix_lru")
    used = at_the_end("kv_cache_host_blocks", state="used")
    for instance in proof.stage.windows:
        assert saved[instance] - given_up[instance] == used[instance]
        assert saved[instance] <= evicted[instance]
    for state in ("used", "cached", "free"):
        blocks = at_the_end("kv_cache_blocks", state=state)
        nbytes = at_the_end("kv_cache_bytes", tier="device", state=state)
        assert nbytes == {instance: count * QUICK.block_bytes for instance, count in blocks.items()}


def test_only_known_variables_are_filled_in() -> None:
    filled = substitute('rate(x{a=~"$model", b=~"${instance:regex}"}[$__rate_interval])', "m", ".*", 4.0)
    assert filled == 'rate(x{a=~"m", b=~".*"}[4000ms])'
    with pytest.raises(ValueError, match="unknown variable"):
        substitute("x{job=$job}", "m", ".*", 4.0)
