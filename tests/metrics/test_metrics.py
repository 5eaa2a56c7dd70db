"""The metrics, read back through Prometheus' own text format."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from server.config import Objectives
from server.generation import Phase
from server.metrics import Metrics
from server.reports import FinishedReport, HostReport, ModelReport, PoolReport, StepReport
from tests.programs import program

STEP = StepReport(
    prefill_requests=1,
    prefill_tokens=96,
    decode_requests=31,
    decode_tokens=31,
    duration_seconds=0.1,
    schedule_seconds=0.01,
    forward_seconds=0.08,
    sample_seconds=0.006,
    detokenize_seconds=0.004,
)
MODEL = ModelReport(
    model="org/tiny",
    revision="abc",
    dtype="float32",
    max_model_len=2048,
    block_size=16,
    num_blocks=100,
    kv_cache_dtype="float32",
    prefix_caching=False,
    max_num_seqs=32,
    max_queued_requests=256,
    block_bytes=4096,
    host_blocks=50,
    num_groups=1,
)
NO_TOKENS = {"finish_reason": "length", "generation_tokens": 0, "prefill_seconds": None, "decode_seconds": None}
IDLE = PoolReport(running=0, used_blocks=0, cached_blocks=40, free_blocks=60)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> Metrics:
    return Metrics(CollectorRegistry(), "tiny", clock=clock)


def families(metrics: Metrics) -> list[Metric]:
    return list(text_string_to_metric_families(metrics.render().decode()))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    """The one sample of this name with these labels beside the model's name."""
    wanted = {"model_name": "tiny", **labels}
    found = [s.value for f in families(metrics) for s in f.samples if s.name == f"sluice_{name}" and s.labels == wanted]
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return found[0]


def total(metrics: Metrics, name: str) -> float:
    """The sum over all series of a name."""
    found = [s.value for f in families(metrics) for s in f.samples if s.name == f"sluice_{name}"]
    assert found, name
    return sum(found)


def finished(**changes: object) -> FinishedReport:
    report: dict[str, object] = {
        "endpoint": "completions",
        "finish_reason": "stop",
        "abort_cause": None,
        "prompt_tokens": 100,
        "cached_tokens": 16,
        "generation_tokens": 20,
        "queue_seconds": 0.01,
        "prefill_seconds": 0.1,
        "decode_seconds": 0.4,
        "total_seconds": 0.51,
    }
    return FinishedReport(**(report | changes))


def exercised(metrics: Metrics) -> Metrics:
    """Call everything once, so that every family has a series."""
    metrics.requests.received("completions", True)
    metrics.requests.rejected("queue_full")
    metrics.engine.step(replace(STEP, copy_seconds=0.003, compaction_seconds=0.002))
    metrics.engine.idle(0.5)
    metrics.requests.first_token(0.1)
    metrics.requests.inter_token(0.02, 31)
    metrics.tokens.prompt_computed(100, 16)
    metrics.tokens.generated(32)
    metrics.requests.finished(finished())
    metrics.tokens.discarded("preemption", 5)
    metrics.pool.update(
        replace(
            IDLE,
            evicted_by={"prefix_lru": 3, "h2o": 4},
            kept_tokens={"h2o": 64},
            dropped_tokens={"h2o": 32},
            host=HostReport(capacity_blocks=50, used_blocks=2, saved_blocks=3, loaded_blocks=1, evicted_blocks=1),
        )
    )
    metrics.engine.state(Phase.READY)
    metrics.engine.startup("load_weights", 3.5)
    metrics.engine.memory("weights", 1 << 20)
    metrics.engine.loaded(MODEL)
    metrics.pool.allocated(MODEL)
    metrics.http.answered("POST", "/v1/completions", 200, "ok", 0.6)
    metrics.http.lagged(0.002)
    return metrics


def test_names_and_help_follow_the_conventions(metrics: Metrics) -> None:
    """The rules that `promtool check metrics` applies, and our own on labels."""
    typed_words = {"counter", "gauge", "histogram", "summary", "total", "count", "sum", "bucket"}
    scaled_units = {"milliseconds", "ms", "minutes", "hours", "percent", "perc", "kb", "mb", "gb", "kilobytes"}
    helps = set()
    for line in exercised(metrics).render().decode().splitlines():
        if line.startswith("# HELP sluice_"):
            name, help_text = line.removeprefix("# HELP ").split(" ", 1)
            assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
            assert help_text.endswith(".")
            assert help_text not in helps
            helps.add(help_text)
        elif line.startswith("# TYPE sluice_"):
            name, kind = line.removeprefix("# TYPE ").split()
            assert (kind == "counter") == name.endswith("_total"), name
            words = name.removesuffix("_total").split("_")
            assert not typed_words & set(words), name
            assert not scaled_units & set(words), name
    assert len(helps) > 40


def test_promtool_has_nothing_to_object(metrics: Metrics) -> None:
    promtool = program("promtool", "prometheus")
    text = exercised(metrics).render()
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


def test_every_series_names_the_model_and_scalar_gauges_are_one_series(metrics: Metrics) -> None:
    for family in families(exercised(metrics)):
        if family.name.startswith("sluice_"):
            assert family.samples, family.name
            assert all(sample.labels["model_name"] == "tiny" for sample in family.samples)
            if family.type == "gauge" and all(set(s.labels) == {"model_name"} for s in family.samples):
                assert len(family.samples) == 1
        assert not family.name.endswith("_created")


def test_no_series_appears_with_its_first_event(metrics: Metrics) -> None:
    """A counter that starts at its first event has no rate over that event. Routes and info gauges are not known."""
    late = ("sluice_http_", "sluice_memory_bytes", "sluice_startup_", "sluice_model_info", "sluice_cache_config_info")

    def series() -> set[tuple[str, frozenset[tuple[str, str]]]]:
        return {
            (sample.name, frozenset(sample.labels.items()))
            for family in families(metrics)
            for sample in family.samples
            if not sample.name.startswith(late)
        }

    before = series()
    exercised(metrics)
    assert series() == before


def test_counters_reconcile_under_random_traffic(metrics: Metrics) -> None:
    rng = random.Random(7)
    waiting = running = received = rejected = done = prompt = output = 0
    for _ in range(2000):
        event = rng.choice(("arrive", "refuse", "admit", "finish", "abort_waiting"))
        if event in ("arrive", "refuse"):
            metrics.requests.received("completions", rng.random() < 0.5)
            received += 1
            if event == "refuse":
                metrics.requests.rejected(rng.choice(("invalid", "queue_full", "too_long", "draining")))
                rejected += 1
            else:
                waiting += 1
        elif event == "admit" and waiting:
            waiting, running = waiting - 1, running + 1
            length = rng.randrange(1, 300)
            metrics.tokens.prompt_computed(length, length // 2)
            prompt += length
        elif event == "finish" and running:
            running, done = running - 1, done + 1
            count = rng.randrange(1, 50)
            metrics.tokens.generated(count)
            output += count
            metrics.requests.finished(finished(finish_reason=rng.choice(("stop", "length")), generation_tokens=count))
        elif event == "abort_waiting" and waiting:
            waiting, done = waiting - 1, done + 1
            cause = rng.choice(("disconnect", "deadline", "queue_timeout"))
            metrics.requests.finished(
                finished(finish_reason="abort", abort_cause=cause, prefill_seconds=None, decode_seconds=None)
            )
        metrics.pool.update(PoolReport(running, running, 0, 5000 - running, {"slots": waiting}))
    assert done > 100
    assert rejected > 100
    assert total(metrics, "requests_received_total") == received
    assert received == (
        total(metrics, "requests_total")
        + total(metrics, "request_rejections_total")
        + value(metrics, "requests_running")
        + value(metrics, "requests_waiting")
    )
    assert value(metrics, "requests_waiting") == total(metrics, "requests_waiting_by_reason") == waiting
    assert total(metrics, "request_aborts_total") == value(
        metrics, "requests_total", endpoint="completions", finish_reason="abort"
    )
    assert value(metrics, "prompt_tokens_total") == prompt
    assert value(metrics, "generation_tokens_total") == output
    assert value(metrics, "request_duration_seconds_count") == done
    assert value(metrics, "request_prefill_duration_seconds_count") < done


def test_gauges_return_to_zero_when_idle(metrics: Metrics, clock: Clock) -> None:
    metrics.pool.update(PoolReport(3, 30, 20, 50, {"slots": 2, "kv_blocks": 1}, waiting_tokens=700))
    metrics.tokens.generated(10)
    metrics.tokens.prompt_computed(10, 0)
    assert value(metrics, "kv_cache_usage_ratio") == 0.3
    assert value(metrics, "requests_waiting") == 3
    assert value(metrics, "requests_waiting_tokens") == 700
    assert value(metrics, "generation_tokens_per_second") > 0
    metrics.pool.update(IDLE)
    clock.now += 6
    for name in (
        "requests_running",
        "requests_waiting",
        "requests_waiting_tokens",
        "kv_cache_usage_ratio",
        "generation_tokens_per_second",
        "prompt_tokens_per_second",
    ):
        assert value(metrics, name) == 0, name
    assert total(metrics, "requests_waiting_by_reason") == 0
    assert total(metrics, "kv_cache_blocks") == 100


def test_what_no_token_fills_of_the_used_blocks(metrics: Metrics) -> None:
    used = PoolReport(running=2, used_blocks=10, cached_blocks=3, free_blocks=87, unused_slots=20)
    metrics.pool.update(used)
    assert value(metrics, "kv_cache_fragmentation_ratio") == 0  # no pool yet
    metrics.pool.allocated(MODEL)
    metrics.pool.update(used)
    assert value(metrics, "kv_cache_fragmentation_ratio") == 20 / (10 * 16)
    metrics.pool.update(IDLE)
    assert value(metrics, "kv_cache_fragmentation_ratio") == 0


def test_limits_stand_beside_what_they_limit(metrics: Metrics) -> None:
    metrics.pool.allocated(MODEL)
    assert value(metrics, "requests_running_limit") == 32
    assert value(metrics, "requests_waiting_limit") == 256


@pytest.mark.parametrize(
    ("met", "changes"),
    [
        ("true", {}),
        ("true", {"queue_seconds": 1.0, "prefill_seconds": 1.0}),  # at the limit is within it
        ("false", {"queue_seconds": 1.1, "prefill_seconds": 1.0}),
        ("true", {"decode_seconds": 19 * 0.2}),
        ("false", {"decode_seconds": 19 * 0.21}),
        ("true", {"decode_seconds": 0.0, "generation_tokens": 1}),
        ("true", NO_TOKENS | {"total_seconds": 1.9}),
        ("false", NO_TOKENS | {"total_seconds": 2.1}),
        ("false", {"finish_reason": "error"}),
        *(
            ("false", {"finish_reason": "abort", "abort_cause": c})
            for c in ("sibling", "queue_timeout", "deadline", "deadline_empty", "shutdown")
        ),
        *((None, {"finish_reason": "abort", "abort_cause": cause}) for cause in ("disconnect", "api")),
    ],
)
def test_who_was_served_well(metrics: Metrics, met: str | None, changes: dict[str, object]) -> None:
    metrics.requests.finished(finished(**changes))
    counted = {met: value(metrics, "requests_slo_total", met=met) for met in ("true", "false")}
    assert counted == {"true": met == "true", "false": met == "false"}


def test_the_objectives_are_the_operators(clock: Clock) -> None:
    metrics = Metrics(CollectorRegistry(), "tiny", objectives=Objectives(0.05, 1.0), clock=clock)
    assert value(metrics, "slo_seconds", of="ttft") == 0.05
    assert value(metrics, "slo_seconds", of="inter_token") == 1
    metrics.requests.finished(finished())
    assert value(metrics, "requests_slo_total", met="false") == 1


def test_an_objective_is_a_bound_of_the_buckets(clock: Clock) -> None:
    """Else a quantile of latencies just below it could be estimated above it, and page somebody."""
    metrics = Metrics(CollectorRegistry(), "tiny", objectives=Objectives(2.0, 0.2), clock=clock)
    for seconds in (1.9, 2.0, 2.1):
        metrics.requests.first_token(seconds)
    assert value(metrics, "time_to_first_token_seconds_bucket", le="1.8") == 0
    assert value(metrics, "time_to_first_token_seconds_bucket", le="2.0") == 2
    assert value(metrics, "request_time_per_output_token_seconds_bucket", le="0.2") == 0
    bounds = [
        s.labels["le"] for f in families(metrics) for s in f.samples if s.name.endswith("first_token_seconds_bucket")
    ]
    assert [float(bound) for bound in bounds] == sorted({float(bound) for bound in bounds})


def test_unknown_waiting_reason_is_not_lost(metrics: Metrics) -> None:
    with pytest.raises(KeyError, match="lunch"):
        metrics.pool.update(PoolReport(0, 0, 0, 1, {"lunch": 1}))


def test_pool_totals_count_once_however_often_they_are_reported(metrics: Metrics) -> None:
    report = PoolReport(1, 1, 1, 1, preemptions=2, queried_tokens=100, hit_tokens=48)
    metrics.pool.update(report)
    metrics.pool.update(report)
    metrics.pool.update(IDLE)
    assert value(metrics, "preemptions_total") == 2
    assert value(metrics, "prefix_cache_queried_tokens_total") == 100
    assert value(metrics, "prefix_cache_hit_tokens_total") == 48


@pytest.mark.parametrize(("prefills", "decodes", "phase"), [(2, 0, "prefill"), (0, 3, "decode"), (1, 1, "mixed")])
def test_steps_by_phase(metrics: Metrics, prefills: int, decodes: int, phase: str) -> None:
    metrics.engine.step(StepReport(prefills, 64 * prefills, decodes, decodes, 0.5, 0.1, 0.2, 0.1, 0.05))
    assert value(metrics, "engine_step_duration_seconds_count", phase=phase) == 1
    assert total(metrics, "engine_step_duration_seconds_count") == 1
    assert value(metrics, "engine_step_tokens_sum", phase=phase) == 64 * prefills + decodes
    assert value(metrics, "engine_step_requests_sum", phase=phase) == prefills + decodes
    assert value(metrics, "engine_computed_tokens_total", kind="prefill") == 64 * prefills
    assert value(metrics, "engine_busy_seconds_total", stage="forward") == 0.2


def test_the_age_of_a_step_is_read_at_each_scrape(metrics: Metrics) -> None:
    """So that it grows while the thread that would report it hangs."""
    assert value(metrics, "engine_step_age_seconds") == 0
    ages = iter((1.5, 99.0))
    metrics.engine.watch_step(lambda: next(ages))
    assert value(metrics, "engine_step_age_seconds") == 1.5
    assert value(metrics, "engine_step_age_seconds") == 99


@pytest.mark.parametrize("endpoint", ["completions", "chat", "responses", "messages"])
def test_every_endpoint_has_its_series_before_its_first_request(metrics: Metrics, endpoint: str) -> None:
    assert value(metrics, "requests_received_total", endpoint=endpoint, streaming="true") == 0
    assert value(metrics, "requests_total", endpoint=endpoint, finish_reason="stop") == 0


def test_states_are_exclusive(metrics: Metrics) -> None:
    assert value(metrics, "engine_state", state="loading") == 1
    metrics.engine.state(Phase.DRAINING)
    assert value(metrics, "engine_state", state="draining") == 1
    assert total(metrics, "engine_state") == 1


def test_a_broken_stream_is_an_error_with_status_200(metrics: Metrics) -> None:
    metrics.http.answered("POST", "/v1/completions", 200, "error", 1.0)
    route = {"method": "POST", "route": "/v1/completions", "status": "200"}
    assert value(metrics, "http_requests_total", **route, outcome="error") == 1
    assert value(metrics, "http_request_duration_seconds_count", **route) == 1


def test_the_router_finds_block_size_and_count_in_both_forms(metrics: Metrics) -> None:
    """An endpoint picker reads them from the labels of an info gauge or from two plain gauges."""
    metrics.pool.allocated(MODEL)
    labels = {"block_size": "16", "num_gpu_blocks": "100", "kv_cache_dtype": "float32", "prefix_caching": "false"}
    assert value(metrics, "cache_config_info", **labels) == 1
    assert value(metrics, "kv_cache_block_size_tokens") == 16
    assert value(metrics, "kv_cache_capacity_blocks") == 100


def test_a_token_takes_room_in_each_block_table(metrics: Metrics) -> None:
    metrics.pool.allocated(replace(MODEL, num_groups=3))
    assert value(metrics, "kv_cache_capacity_tokens") == 33 * 16


def test_histogram_on_the_wire(metrics: Metrics) -> None:
    metrics.requests.inter_token(0.0004, 3)
    metrics.requests.inter_token(0.012)
    metrics.requests.inter_token(99.0)
    wire = {
        sample.labels["le"]: sample.value
        for family in families(metrics)
        for sample in family.samples
        if sample.name == "sluice_inter_token_latency_seconds_bucket"
    }
    assert wire["0.0005"] == 3
    assert wire["+Inf"] == 5
    counts = [wire[key] for key in sorted(wire, key=float)]
    assert counts == sorted(counts)
    assert counts[-2] == 4
    assert value(metrics, "inter_token_latency_seconds_count") == 5
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.0012 + 0.012 + 99)


def test_steady_traffic_shows_its_rate(metrics: Metrics, clock: Clock) -> None:
    readings = []
    for step in range(1000):
        clock.now += 0.02
        metrics.tokens.generated(4)
        if step > 300 and step % 97 == 0:  # the window is full after 250 steps
            readings.append(value(metrics, "generation_tokens_per_second"))
    assert readings == pytest.approx([200.0] * 7, rel=0.02)


def test_two_servers_in_one_process_do_not_share_series(metrics: Metrics) -> None:
    other = Metrics(CollectorRegistry(), "other")
    other.tokens.generated(5)
    assert value(metrics, "generation_tokens_total") == 0


def test_importing_metrics_imports_nothing_slow() -> None:
    code = "import server.metrics, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
