"""Our metrics under the names that vLLM gives them, for dashboards, routers and autoscalers that know only those.

Beside the names of today stand older ones that are still read: `gpu_...` and `time_per_output_token_seconds`. `engine`
numbers the engines of a server, of which there is one. Buckets are ours; a query for a quantile reads their bounds from
the labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.metrics.families import Families
from server.metrics.instruments import HistogramFamily, Together

PREFIX = "vllm:"
ENGINE = "0"


@dataclass(frozen=True, slots=True)
class Source:
    """Which of our families a name shows.

    labels: those of ours that are kept, beside the model's, with the name each goes by. Series that differ in others
        only are added up.
    """

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


SCALARS = {
    "num_requests_running": Source("requests_running"),
    "num_requests_waiting": Source("requests_waiting"),
    "kv_cache_usage_perc": Source("kv_cache_usage_ratio"),
    "gpu_cache_usage_perc": Source("kv_cache_usage_ratio"),
    "prefix_cache_queries_total": Source("prefix_cache_queried_tokens_total"),
    "prefix_cache_hits_total": Source("prefix_cache_hit_tokens_total"),
    "gpu_prefix_cache_queries_total": Source("prefix_cache_queried_tokens_total"),
    "gpu_prefix_cache_hits_total": Source("prefix_cache_hit_tokens_total"),
    "prompt_tokens_total": Source("prompt_tokens_total"),
    "prompt_tokens_cached_total": Source("prompt_tokens_cached_total"),
    "generation_tokens_total": Source("generation_tokens_total"),
    "num_preemptions_total": Source("preemptions_total"),
    "request_success_total": Source("requests_total", {"finish_reason": "finished_reason"}),
    "cache_config_info": Source(
        "cache_config_info",
        {
            "block_size": "block_size",
            "num_gpu_blocks": "num_gpu_blocks",
            "kv_cache_dtype": "cache_dtype",
            "prefix_caching": "enable_prefix_caching",
        },
    ),
}
"""Counters and gauges, by vLLM's name without its prefix."""

HISTOGRAMS = {
    "time_to_first_token_seconds": "time_to_first_token_seconds",
    "inter_token_latency_seconds": "inter_token_latency_seconds",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds": "request_duration_seconds",
    "request_queue_time_seconds": "request_queue_duration_seconds",
    "request_prefill_time_seconds": "request_prefill_duration_seconds",
    "request_decode_time_seconds": "request_decode_duration_seconds",
    "request_prompt_tokens": "request_prompt_tokens",
    "request_generation_tokens": "request_generation_tokens",
    # The longest of a request's sequences; here each sequence is a request.
    "request_max_num_generation_tokens": "request_generation_tokens",
    "iteration_tokens_total": "engine_step_tokens",
}
"""Histograms, whose series of ours, of steps of different phases, are added up."""


class VllmScalars(Collector):
    """The counters and gauges, read when they are asked for; and the share of prompt tokens found in the prefix cache
    since the start, which is no metric of ours: a rate of the two counters tells it for any time.
    """

    def __init__(self, families: Families) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return self.collect()

    def collect(self) -> Iterable[Metric]:
        for name, source in SCALARS.items():
            yield self._renamed(name, source)
        queried, hit = (self._value(f"prefix_cache_{what}_tokens_total") for what in ("queried", "hit"))
        rate = Metric(
            f"{PREFIX}gpu_prefix_cache_hit_rate", "Share (0 to 1) of prompt tokens that were cached.", "gauge"
        )
        rate.add_sample(rate.name, self._common, hit / queried if queried else 0.0)
        yield rate

    @property
    def _common(self) -> dict[str, str]:
        return {"model_name": self._families.model, "engine": ENGINE}

    def _renamed(self, name: str, source: Source) -> Metric:
        (ours,) = self._families[source.name].collect()
        theirs = Metric(PREFIX + name.removesuffix("_total"), ours.documentation, ours.type)
        sums: dict[tuple[str, ...], float] = {}
        for sample in ours.samples:
            kept = tuple(sample.labels[label] for label in source.labels)
            sums[kept] = sums.get(kept, 0.0) + sample.value
        for kept, value in sums.items():
            labels = self._common | dict(zip(source.labels.values(), kept, strict=True))
            theirs.add_sample(PREFIX + name, labels, value)
        return theirs

    def _value(self, name: str) -> float:
        (family,) = self._families[name].collect()
        (sample,) = family.samples
        return float(sample.value)


def add_vllm_names(families: Families) -> None:
    """Have the families also shown under vLLM's names. To be called once all of them are made."""
    families.add(VllmScalars(families))
    for name, source in HISTOGRAMS.items():
        ours = families[source]
        assert isinstance(ours, HistogramFamily)
        theirs = HistogramFamily(PREFIX + name, ours.help, ("model_name", "engine"), ours.bounds)
        theirs.add(Together(ours.all_series), families.model, ENGINE)
        families.add(theirs)
