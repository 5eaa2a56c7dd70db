"""The recording and alert rules: checked and put to work by promtool, and held against the metrics there are."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from server.metrics import Metrics
from tests.programs import program

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules/sluice.yml"
TESTS = RULES.with_name("sluice.test.yml")
CONFIG = ROOT / "deploy/prometheus/prometheus.yml"
OPERATING = ROOT / "docs/operating.md"
OF_SCRAPES = {"job", "instance"}
"""Labels that Prometheus adds itself."""


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def alerts(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for rule in rules if "alert" in rule]


@pytest.fixture(scope="module")
def exported() -> dict[str, list[dict[str, str]]]:
    """The labels of each series of a server that has just started, by name."""
    found: dict[str, list[dict[str, str]]] = {}
    text = Metrics(CollectorRegistry(), "tiny").render().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample.labels)
    return found


def promtool(*arguments: str | Path) -> None:
    ended = subprocess.run(
        [program("promtool", "prometheus"), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    """All the selectors of an expression, in reading order."""
    pending: list[Any] = [promql_parser.parse(expression)]
    while pending:
        node = pending.pop()
        if isinstance(node, promql_parser.VectorSelector):
            yield node
        elif isinstance(node, promql_parser.MatrixSelector):
            yield node.vector_selector
        else:
            parts = (getattr(node, name, None) for name in ("rhs", "lhs", "expr"))
            pending.extend(part for part in (*parts, *reversed(getattr(node, "args", []))) if part is not None)


def matches(matcher: promql_parser.Matcher, labels: dict[str, str]) -> bool:
    value = labels.get(matcher.name, "")
    if matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.NotEqual):
        same = value == matcher.value
    else:
        same = re.fullmatch(matcher.value, value) is not None
    return same == (matcher.op in (promql_parser.MatchOp.Equal, promql_parser.MatchOp.Re))


def test_promtool_accepts_the_rules() -> None:
    promtool("check", "rules", RULES)


def test_promtool_accepts_the_configuration() -> None:
    promtool("check", "config", CONFIG)
    assert yaml.safe_load(CONFIG.read_text())["rule_files"] == ["rules/sluice.yml"]


def test_the_rules_do_what_their_tests_say() -> None:
    promtool("test", "rules", TESTS)


def test_every_selector_finds_a_series(rules: list[dict[str, Any]], exported: dict[str, list[dict[str, str]]]) -> None:
    """Of the server, each value that a matcher names included, or of a rule above."""
    recorded: set[str] = set()
    for rule in rules:
        for selector in selectors(rule["expr"]):
            if selector.name == "up" or selector.name in recorded:
                continue
            assert selector.name in exported, f"{selector.name} is not exported, nor recorded before {rule['expr']}"
            wanted = [matcher for matcher in selector.matchers.matchers if matcher.name not in OF_SCRAPES]
            for matcher in wanted:
                for value in matcher.value.split("|"):
                    assert any(labels.get(matcher.name) == value for labels in exported[selector.name]), selector
            assert any(all(matches(matcher, labels) for matcher in wanted) for labels in exported[selector.name])
        recorded.add(rule.get("record", ""))


def test_the_names_of_recorded_series_say_what_they_are(rules: list[dict[str, Any]]) -> None:
    """Labels that are left, metric, and what was done to it: level:metric:operations."""
    for name in (rule["record"] for rule in rules if "record" in rule):
        assert re.fullmatch(r"(instance_)?model_name(_le)?:sluice_[a-z_]+:([a-z0-9]+_)?(rate(5m|30m|1h|6h)|sum)", name)


def test_every_alert_says_what_happened_and_what_to_do(alerts: list[dict[str, Any]]) -> None:
    assert {alert["alert"] for alert in alerts} == {
        "SluiceDown",
        "SluiceAbsent",
        "SluiceErrors",
        "SluiceTTFTBurn",
        "SluiceQueueGrowing",
        "SluicePoolFull",
        "SluiceStuck",
    }
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"docs/operating.md#{alert['alert'].lower()}"
        assert ("{{" in alert["annotations"]["summary"]) == (alert["alert"] != "SluiceAbsent")


def test_the_page_that_alerts_link_to_has_a_heading_for_each(alerts: list[dict[str, Any]]) -> None:
    headings = re.findall(r"^#+ (\w+)$", OPERATING.read_text(), re.MULTILINE)
    assert {alert["alert"] for alert in alerts} <= set(headings)


def test_every_alert_is_seen_to_fire_and_not_to(alerts: list[dict[str, Any]]) -> None:
    """Each rule fires in some case of promtool's, and each name has cases in which it must not."""
    fires: set[tuple[tuple[str, str], ...]] = set()
    silent: set[str] = set()
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in test.get("alert_rule_test", ()):
            for expected in case["exp_alerts"]:
                labels = {key: expected["exp_labels"].get(key, "") for key in ("severity", "cause")}
                fires.add((("alert", case["alertname"]), *labels.items()))
            if not case["exp_alerts"]:
                silent.add(case["alertname"])
    for alert in alerts:
        labels = {key: alert["labels"].get(key, "") for key in ("severity", "cause")}
        assert (("alert", alert["alert"]), *labels.items()) in fires, alert["alert"]
        assert alert["alert"] in silent
