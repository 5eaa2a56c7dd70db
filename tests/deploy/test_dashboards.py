"""The dashboards: the committed files are what is generated, ask only for what the server exports, and can be true."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from deploy.grafana import dashboards
from server.metrics import Metrics
from tests.deploy.dashboard_lint import Exported, Json, problems, used_metrics
from tests.metrics.test_metrics import exercised

NAMES = ("sluice", "sluice-replicas")
UNUSED = {
    "process_virtual_memory_bytes": "address space that CUDA reserves, and nobody uses",
    "python_info": "build_info has the version",
    "sluice_prompt_tokens_per_second": "for routers and people without a Prometheus; a panel takes the counter's rate",
    "sluice_generation_tokens_per_second": "likewise",
    "sluice_kv_cache_block_size_tokens": "for routers, which hash prefixes by the block",
}


@pytest.fixture(scope="module")
def exported() -> Exported:
    metrics = exercised(Metrics(CollectorRegistry(), "tiny"))
    return Exported(metrics.render().decode())


def committed(name: str) -> Json:
    return json.loads((dashboards.FOLDER / f"{name}.json").read_text())


def test_the_committed_files_are_what_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    assert dashboards.main(["--check"]) == 0, capsys.readouterr().out
    assert {path.name for path in dashboards.FOLDER.glob("*")} == set(dashboards.dashboards())


def test_check_says_so_when_they_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dashboards, "FOLDER", tmp_path)
    assert dashboards.main(["--check"]) == 1
    assert dashboards.main([]) == 0
    assert dashboards.main(["--check"]) == 0
    (tmp_path / "sluice.json").write_text("{}")
    assert dashboards.main(["--check"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_wrong(name: str, exported: Exported) -> None:
    dashboard = committed(name)
    assert dashboard["uid"] == name
    assert problems(dashboard, exported, per_instance=name == "sluice-replicas") == []


def test_they_link_to_each_other() -> None:
    for name, other in (NAMES, NAMES[::-1]):
        (link,) = committed(name)["links"]
        assert link["url"] == f"/d/{other}"
        assert link["includeVars"]
        assert link["keepTime"]


def test_every_metric_is_on_a_panel(exported: Exported) -> None:
    used = set.union(*(used_metrics(committed(name), exported) for name in NAMES))
    unused = {family for family, names in exported.families.items() if not names & used}
    assert unused == set(UNUSED)


def test_a_series_has_one_colour_wherever_it_is() -> None:
    colours: dict[str, set[str]] = {}
    for name in NAMES:
        for panel in committed(name)["panels"]:
            for override in panel.get("fieldConfig", {}).get("overrides", []):
                for each in override["properties"]:
                    if each["id"] == "color" and each["value"]["mode"] == "fixed":
                        colours.setdefault(override["matcher"]["options"], set()).add(each["value"]["fixedColor"])
    assert len(colours) > 40
    assert {name: found for name, found in colours.items() if len(found) > 1} == {}


# A lint that finds nothing may be blind: each fault, made on purpose, is found


def panel(dashboard: Json, title: str) -> Json:
    """The last panel of this title: the stat row has some of the same."""
    return [each for each in dashboard["panels"] if each["title"] == title][-1]


def asks(expression: str, legend: str = "x") -> Callable[[Json], None]:
    def change(dashboard: Json) -> None:
        panel(dashboard, "Usage")["targets"][0].update(expr=expression, legendFormat=legend)

    return change


def sets(**fields: object) -> Callable[[Json], None]:
    return lambda dashboard: panel(dashboard, "End to end").update(fields)


def defaults(**fields: object) -> Callable[[Json], None]:
    return lambda dashboard: panel(dashboard, "End to end")["fieldConfig"]["defaults"].update(fields)


CHOSEN = 'model_name=~"$model", instance=~"$instance"'
RATE = f"rate(sluice_requests_total{{{CHOSEN}}}[$__rate_interval])"
BUCKETS = f"rate(sluice_request_duration_seconds_bucket{{{CHOSEN}}}[$__rate_interval])"
SUM = f"sum(rate(sluice_request_duration_seconds_sum{{{CHOSEN}}}[$__rate_interval]))"
FAULTS: dict[str, tuple[Callable[[Json], None], str]] = {
    "a name of the past": (asks(f"sum(sluice_gpu_cache_usage{{{CHOSEN}}})"), "does not export"),
    "seconds of work as a duration": (asks(SUM), "without its count"),
    "a mean over replicas": (asks(f"avg(sluice_kv_cache_usage_ratio{{{CHOSEN}}})"), "an idle one counts as much"),
    "a sum of ratios": (asks(f"sum(sluice_kv_cache_usage_ratio{{{CHOSEN}}})"), "a ratio"),
    "a rate of a gauge": (asks(f"sum(rate(sluice_requests_running{{{CHOSEN}}}[$__rate_interval]))"), "a gauge"),
    "a counter as it is": (asks(f"sum(sluice_requests_total{{{CHOSEN}}})"), "needs a rate"),
    "a bucket as it is": (asks(f"sum(sluice_request_duration_seconds_bucket{{{CHOSEN}}})"), "needs a rate"),
    "a rate after a sum": (asks(f"rate(sum({RATE})[5m:])"), "window"),
    "a fixed window": (asks(f"sum({RATE.replace('$__rate_interval', '10m')})"), "window [10m]"),
    "a quantile of all buckets": (asks(f"histogram_quantile(0.9, sum({BUCKETS}))"), "without le"),
    "replicas under one legend": (asks(f"sluice_kv_cache_usage_ratio{{{CHOSEN}}}"), "keeps apart the instances"),
    "reasons under one legend": (asks(f"sum by (finish_reason) ({RATE})"), "the legend shows []"),
    "a label it lacks": (asks(f"sum by (reason) ({RATE})", "{{reason}}"), "does not have"),
    "a matcher it lacks": (asks(f'sum(sluice_requests_running{{{CHOSEN}, container="x"}})'), "has no label container"),
    "a value it lacks": (asks(f'sum(sluice_kv_cache_blocks{{{CHOSEN}, state="busy"}})'), "is never state=busy"),
    "all models": (asks('sum(sluice_requests_running{instance=~"$instance"})'), "not limited to model_name"),
    "all instances": (asks('sum(sluice_requests_running{model_name=~"$model"})'), "not limited to instance"),
    "sides that never meet": (
        asks(f"sum by (finish_reason) ({RATE}) / sum({RATE})", "{{finish_reason}}"),
        "never match",
    ),
    "half a query": (asks("sum("), "does not parse"),
    "seconds as a share": (defaults(unit="percentunit"), "seconds in the unit percentunit"),
    "no unit": (defaults(unit=None), "unit None"),
    "red from 80": (defaults(thresholds={}), "red from 80"),
    "thresholds nobody sees": (defaults(thresholds={"steps": [{}, {"value": 80}]}), "colour nothing"),
    "a false origin": (defaults(min=None), "begin at 0"),
    "no description": (sets(description=""), "no description"),
    "no title": (sets(title=""), "no title"),
    "somebody's data source": (sets(datasource={"type": "prometheus", "uid": "PBFA97CFB590B2093"}), "data source"),
    "an id twice": (sets(id=1), "given twice"),
    "one over another": (sets(gridPos={"x": 0, "y": 1, "w": 8, "h": 8}), "overlap"),
    "off the grid": (sets(gridPos={"x": 20, "y": 900, "w": 8, "h": 8}), "off the grid"),
    "an export's inputs": (lambda dashboard: dashboard.update(__inputs=[]), "__inputs"),
    "no uid": (lambda dashboard: dashboard.update(uid=None), "uid"),
    "an id of a database": (lambda dashboard: dashboard.update(id=7), "an id"),
    "a query's own data source": (
        lambda dashboard: panel(dashboard, "Usage")["targets"][0].pop("datasource"),
        "data source is not the variable",
    ),
    "a variable without quotes": (
        lambda dashboard: dashboard["templating"]["list"][1].update(multi=False),
        "does not quote",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, exported: Exported) -> None:
    change, complaint = FAULTS[fault]
    dashboard = copy.deepcopy(committed("sluice"))
    change(dashboard)
    found = problems(dashboard, exported, per_instance=False)
    assert found
    assert any(complaint in each for each in found), found


def test_a_summed_dashboard_is_not_one_by_replica(exported: Exported) -> None:
    found = problems(committed("sluice"), exported, per_instance=True)
    assert sum("sums over the instances" in each for each in found) > 50
