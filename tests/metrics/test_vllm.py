"""What vLLM's own dashboard and those who read a vLLM server's metrics find here, by name and by value."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from server.metrics import Metrics
from server.reports import PoolReport
from tests.metrics.test_metrics import MODEL, STEP, exercised, finished

DASHBOARD = {
    "vllm:e2e_request_latency_seconds",
    "vllm:generation_tokens_total",
    "vllm:inter_token_latency_seconds",
    "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds",
    "vllm:request_generation_tokens",
    "vllm:request_max_num_generation_tokens",
    "vllm:request_prefill_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_queue_time_seconds",
    "vllm:request_success_total",
    "vllm:time_to_first_token_seconds",
}
"""Of vLLM's examples/observability/prometheus_grafana/grafana.json, at commit 4b5c627."""

OLDER_DASHBOARD = (DASHBOARD - {"vllm:inter_token_latency_seconds", "vllm:kv_cache_usage_perc"}) | {
    "vllm:cpu_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:num_requests_swapped",
    "vllm:time_per_output_token_seconds",
}
"""Of examples/online_serving/prometheus_grafana/grafana.json, where it stood before, at commit e88892c."""

PRODUCTION_STACK = {
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hit_rate",
    "vllm:gpu_prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_queries_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:current_qps",
    "vllm:e2e_request_latency_seconds",
    "vllm:healthy_pods_total",
    "vllm:kv_cache_usage_perc",
    "vllm:num_incoming_requests_total",
    "vllm:request_time_per_output_token_seconds",
    "vllm:time_to_first_token_seconds",
}
"""Of vLLM production-stack's router (src/vllm_router/stats/engine_stats.py), dashboards (helm/dashboards) and scaling
(observability/prom-adapter.yaml, helm/templates/scaledobject-vllm.yaml), at commit a6c01db."""

ENDPOINT_PICKER = {
    "vllm:cache_config_info",
    "vllm:kv_cache_usage_perc",
    "vllm:lora_requests_info",
    "vllm:num_preemptions_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
"""Of the endpoint picker of llm-d and the Gateway API Inference Extension, in its mapping for vLLM."""

NOT_OFFERED = {
    "vllm:cpu_cache_usage_perc": "nothing is swapped out to main memory",
    "vllm:num_requests_swapped": "nothing is swapped out to main memory",
    "vllm:lora_requests_info": "there are no adapters",
    "vllm:current_qps": "the router's own",
    "vllm:healthy_pods_total": "the router's own",
    "vllm:num_incoming_requests_total": "the router's own",
}

LABELS = {"model_name": "tiny", "engine": "0"}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), "tiny", compat="vllm")


def shown(metrics: Metrics) -> dict[str, str]:
    """Names of families as queries write them, histograms without their suffix, and the types."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}


def samples(metrics: Metrics, name: str) -> list[Sample]:
    families = text_string_to_metric_families(metrics.render().decode())
    return [sample for family in families for sample in family.samples if sample.name == f"vllm:{name}"]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = [sample.value for sample in samples(metrics, name) if sample.labels == LABELS | labels]
    assert len(found) == 1, f"{len(found)} samples of {name} {labels}"
    return found[0]


@pytest.mark.parametrize("readers", [DASHBOARD, OLDER_DASHBOARD, PRODUCTION_STACK, ENDPOINT_PICKER])
def test_every_name_is_there_or_is_said_not_to_be(metrics: Metrics, readers: set[str]) -> None:
    missing = readers - shown(exercised(metrics)).keys()
    assert missing == readers & NOT_OFFERED.keys()


def test_names_are_shown_only_where_they_are_asked_for() -> None:
    metrics = exercised(Metrics(CollectorRegistry(), "tiny"))
    assert not [name for name in shown(metrics) if name.startswith("vllm:")]


def test_every_series_is_there_before_the_first_request(metrics: Metrics) -> None:
    """But for the cache's, which is not known before the model is."""

    def series() -> set[tuple[str, frozenset[tuple[str, str]]]]:
        families = text_string_to_metric_families(metrics.render().decode())
        found = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
        return {(sample.name, frozenset(sample.labels.items())) for sample in found}

    before = series()
    exercised(metrics)
    assert {name for name, _ in series() - before} == {"vllm:cache_config_info"}


def test_a_gauge_is_one_series(metrics: Metrics) -> None:
    exercised(metrics)
    gauges = [name for name, kind in shown(metrics).items() if kind == "gauge" and name.startswith("vllm:")]
    assert len(gauges) == 6
    for name in gauges:
        assert len(samples(metrics, name.removeprefix("vllm:"))) == 1, name


def test_gauges_and_totals_are_ours(metrics: Metrics) -> None:
    metrics.pool.allocated(MODEL)
    metrics.pool.update(
        PoolReport(3, 30, 20, 50, {"slots": 2, "kv_blocks": 1}, preemptions=4, queried_tokens=200, hit_tokens=50)
    )
    metrics.tokens.prompt_computed(100, 16)
    metrics.tokens.generated(7)
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 3
    assert value(metrics, "kv_cache_usage_perc") == value(metrics, "gpu_cache_usage_perc") == 0.3
    assert value(metrics, "num_preemptions_total") == 4
    for name in ("prefix_cache", "gpu_prefix_cache"):
        assert value(metrics, f"{name}_queries_total") == 200
        assert value(metrics, f"{name}_hits_total") == 50
    assert value(metrics, "gpu_prefix_cache_hit_rate") == 0.25
    assert value(metrics, "prompt_tokens_total") == 100
    assert value(metrics, "prompt_tokens_cached_total") == 16
    assert value(metrics, "generation_tokens_total") == 7
    cache = {"block_size": "16", "num_gpu_blocks": "100", "cache_dtype": "float32", "enable_prefix_caching": "false"}
    assert value(metrics, "cache_config_info", **cache) == 1


def test_the_hit_rate_of_nothing_is_zero(metrics: Metrics) -> None:
    assert value(metrics, "gpu_prefix_cache_hit_rate") == 0


def test_endpoints_are_added_up_by_how_requests_ended(metrics: Metrics) -> None:
    metrics.requests.finished(finished())
    metrics.requests.finished(finished(endpoint="chat"))
    metrics.requests.finished(finished(endpoint="chat", finish_reason="length"))
    counted = {reason: value(metrics, "request_success_total", finished_reason=reason) for reason in REASONS}
    assert counted == {"stop": 2, "length": 1, "abort": 0, "error": 0}


REASONS = ("stop", "length", "abort", "error")


def test_histograms_are_ours(metrics: Metrics) -> None:
    metrics.requests.first_token(0.3)
    metrics.requests.inter_token(0.02, 5)
    metrics.requests.finished(finished())
    sums = {
        "time_to_first_token_seconds": (1, 0.3),
        "inter_token_latency_seconds": (5, 0.1),
        "time_per_output_token_seconds": (5, 0.1),
        "request_time_per_output_token_seconds": (1, 0.4 / 19),
        "e2e_request_latency_seconds": (1, 0.51),
        "request_queue_time_seconds": (1, 0.01),
        "request_prefill_time_seconds": (1, 0.1),
        "request_decode_time_seconds": (1, 0.4),
        "request_prompt_tokens": (1, 100),
        "request_generation_tokens": (1, 20),
        "request_max_num_generation_tokens": (1, 20),
    }
    for name, (count, total) in sums.items():
        assert value(metrics, f"{name}_count") == value(metrics, f"{name}_bucket", le="+Inf") == count, name
        assert value(metrics, f"{name}_sum") == pytest.approx(total), name
    assert value(metrics, "time_to_first_token_seconds_bucket", le="0.18") == 0


def test_steps_of_all_phases_are_added_up(metrics: Metrics) -> None:
    metrics.engine.step(STEP)
    metrics.engine.step(STEP.__class__(0, 0, 31, 31, 0.1, 0, 0, 0, 0))
    assert value(metrics, "iteration_tokens_total_count") == 2
    assert value(metrics, "iteration_tokens_total_sum") == 96 + 31 + 31
