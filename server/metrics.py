"""What the server tells Prometheus.

Every series carries `model_name`; each scalar gauge is one series, so that a router may read it without summing. Units
are base units and named (`_seconds`, `_bytes`, `_ratio`, `_tokens`). Counters reconcile at any time at which the engine
has taken in all that was handed to it:

    requests_received = requests + request_rejections + requests_running + requests_waiting

where `requests` counts the finished ones, whatever their end. A request here is one sequence: a body with two prompts
and n = 3 is six of them, and a body that is refused whole is one.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import get_args

from prometheus_client import (
    CONTENT_TYPE_PLAIN_0_0_4,
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from server import __version__
from server.generation import Phase
from server.instruments import Histogram, WindowRate, log_buckets, power_buckets
from server.reports import (
    ENDPOINTS,
    FINISH_REASONS,
    WAIT_REASONS,
    AbortCause,
    DiscardReason,
    FinishedReport,
    MemoryKind,
    ModelReport,
    PoolReport,
    RejectReason,
    StartupPhase,
    StepReport,
)

RATE_WINDOW_SECONDS = 5.0
_LATENCY = log_buckets(0.001, 180.0)
_DURATION = log_buckets(0.001, 1800.0)
_GAP = log_buckets(0.0005, 10.0)
_TOKENS = power_buckets(2**20)


class Metrics:
    """All collectors of one server, in a registry of its own.

    `received`, `rejected` and `http` are called from the HTTP loop, `state` from both, everything else from the
    engine's thread alone, or from the HTTP loop once that thread has ended. A scrape holds the lock of one value at a
    time, for as long as it takes to read it. Label children are resolved here, once, and all series whose labels are
    known exist from the start, so that a rate sees their first event.
    """

    content_type = CONTENT_TYPE_PLAIN_0_0_4

    def __init__(
        self,
        registry: CollectorRegistry,
        model_name: str,
        *,
        endpoints: tuple[str, ...] = ENDPOINTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # doubles the series, and no one reads them
        self._registry = registry
        self._model = model_name
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        self._make_requests(endpoints)
        self._make_tokens(clock)
        self._make_pool()
        self._make_engine()
        self._make_http()
        self._gauge(
            "build_info",
            "Versions of what is running; always 1.",
            "version",
            "python",
            "torch",
            "transformers",
        ).labels(
            model_name,
            __version__,
            platform.python_version(),
            version("torch"),
            version("transformers"),
        ).set(1)

    def render(self) -> bytes:
        """The body of GET /metrics, in Prometheus' text format (`content_type`)."""
        return generate_latest(self._registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"sluice_{name}", help, ("model_name", *labels), registry=self._registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"sluice_{name}", help, ("model_name", *labels), registry=self._registry)

    def _histogram(self, name: str, help: str, bounds: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"sluice_{name}", help, ("model_name", *labels), bounds, self._registry)

    # Requests

    def _make_requests(self, endpoints: tuple[str, ...]) -> None:
        model = self._model
        self._received = self._counter(
            "requests_received_total", "Requests (sequences) received, refused ones included.", "endpoint", "streaming"
        )
        self._requests = self._counter(
            "requests_total", "Requests (sequences) finished, by how they ended.", "endpoint", "finish_reason"
        )
        for endpoint in endpoints:
            for streaming in ("true", "false"):
                self._received.labels(model, endpoint, streaming)
            for finish_reason in FINISH_REASONS:
                self._requests.labels(model, endpoint, finish_reason)
        self._rejections = self._counter(
            "request_rejections_total", "Requests (sequences) refused before they reached the queue.", "reason"
        )
        for reason in get_args(RejectReason):
            self._rejections.labels(model, reason)
        self._aborts = self._counter(
            "request_aborts_total", "Requests (sequences) ended before they were complete, by what ended them.", "cause"
        )
        for cause in get_args(AbortCause):
            self._aborts.labels(model, cause)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "Seconds from a request's arrival to its first token.", _LATENCY
        ).series(model)
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Seconds between consecutive tokens of a request.", _GAP
        ).series(model)
        self._total = self._histogram(
            "request_duration_seconds", "Seconds from a request's arrival to its end, however it ended.", _DURATION
        ).series(model)
        self._queue = self._histogram(
            "request_queue_duration_seconds", "Seconds from a request's arrival to its first admission.", _DURATION
        ).series(model)
        self._prefill = self._histogram(
            "request_prefill_duration_seconds", "Seconds from a request's admission to its first token.", _DURATION
        ).series(model)
        self._decode = self._histogram(
            "request_decode_duration_seconds", "Seconds from a request's first token to its last.", _DURATION
        ).series(model)
        self._prompt_length = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a finished request.", _TOKENS
        ).series(model)
        self._output_length = self._histogram(
            "request_generation_tokens", "Output tokens of a finished request.", _TOKENS
        ).series(model)

    def received(self, endpoint: str, streaming: bool) -> None:
        """A request has arrived. To be called once for each sequence, before it is refused or submitted."""
        self._received.labels(self._model, endpoint, "true" if streaming else "false").inc()

    def rejected(self, reason: RejectReason) -> None:
        """A request counted by `received` was refused and will not finish."""
        self._rejections.labels(self._model, reason).inc()

    def first_token(self, seconds: float) -> None:
        """A request has its first token, `seconds` after it arrived."""
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """`count` tokens came, each `seconds` after the one before it in its request."""
        self._gap.observe(seconds, count)

    def finished(self, report: FinishedReport) -> None:
        """A request counted by `received` is over."""
        self._requests.labels(self._model, report.endpoint, report.finish_reason).inc()
        if report.abort_cause is not None:
            self._aborts.labels(self._model, report.abort_cause).inc()
        self._total.observe(report.total_seconds)
        if report.queue_seconds is not None:
            self._queue.observe(report.queue_seconds)
        if report.prefill_seconds is not None:
            self._prefill.observe(report.prefill_seconds)
        if report.decode_seconds is not None:
            self._decode.observe(report.decode_seconds)
        self._prompt_length.observe(report.prompt_tokens)
        self._output_length.observe(report.generation_tokens)

    # Tokens

    def _make_tokens(self, clock: Callable[[], float]) -> None:
        model = self._model
        self._prompt_tokens = self._counter(
            "prompt_tokens_total", "Prompt tokens of requests whose prompt is computed, cached ones included."
        ).labels(model)
        self._cached_tokens = self._counter(
            "prompt_tokens_cached_total", "Those of prompt_tokens_total that the prefix cache spared."
        ).labels(model)
        self._generation_tokens = self._counter("generation_tokens_total", "Output tokens delivered.").labels(model)
        discarded = self._counter(
            "discarded_tokens_total", "Tokens computed in vain: computed again later, or never delivered.", "reason"
        )
        self._discarded = {reason: discarded.labels(model, reason) for reason in get_args(DiscardReason)}
        self._prompt_rate = WindowRate(RATE_WINDOW_SECONDS, clock=clock)
        self._generation_rate = WindowRate(RATE_WINDOW_SECONDS, clock=clock)
        window = f"over the last {RATE_WINDOW_SECONDS:g} seconds; 0 when idle."
        self._gauge("prompt_tokens_per_second", f"Rate of prompt_tokens_total {window}").labels(model).set_function(
            self._prompt_rate.rate
        )
        self._gauge("generation_tokens_per_second", f"Rate of generation_tokens_total {window}").labels(
            model
        ).set_function(self._generation_rate.rate)

    def prompt_computed(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A request's prompt of `prompt_tokens` is in the cache, `cached_tokens` of them without being computed.

        To be called once a request: recomputation after preemption does not count again.
        """
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._prompt_rate.add(prompt_tokens)

    def generated(self, count: int) -> None:
        """`count` output tokens were delivered, of any requests."""
        self._generation_tokens.inc(count)
        self._generation_rate.add(count)

    def discarded(self, reason: DiscardReason, tokens: int) -> None:
        """`tokens` computed tokens were thrown away."""
        self._discarded[reason].inc(tokens)

    # Scheduler and pool

    def _make_pool(self) -> None:
        model = self._model
        self._running = self._gauge("requests_running", "Requests (sequences) in the running batch.").labels(model)
        self._waiting = self._gauge("requests_waiting", "Requests (sequences) in the queue.").labels(model)
        by_reason = self._gauge(
            "requests_waiting_by_reason", "Requests (sequences) in the queue, by what they wait for.", "reason"
        )
        self._waiting_tokens = self._gauge(
            "requests_waiting_tokens", "Prompt tokens of the requests in the queue that have not started yet."
        ).labels(model)
        self._waiting_by = {reason: by_reason.labels(model, reason) for reason in WAIT_REASONS}
        self._usage = self._gauge(
            "kv_cache_usage_ratio",
            "Share (0 to 1) of the KV blocks that running requests hold; evictable ones are not.",
        ).labels(model)
        blocks = self._gauge("kv_cache_blocks", "KV blocks by state; the states sum to the capacity.", "state")
        self._used, self._cached, self._free = (blocks.labels(model, state) for state in ("used", "cached", "free"))
        self._block_size = self._gauge("kv_cache_block_size_tokens", "Tokens that a KV block holds.").labels(model)
        self._capacity = self._gauge("kv_cache_capacity_blocks", "KV blocks in the pool.").labels(model)
        self._cache_config = self._gauge(
            "cache_config_info",
            "How the KV cache is set up; always 1.",
            "block_size",
            "num_gpu_blocks",
            "kv_cache_dtype",
            "prefix_caching",
        )
        self._evicted = _Total(
            self._counter("kv_cache_evicted_blocks_total", "Cached KV blocks given up for new content.").labels(model)
        )
        self._preempted = _Total(
            self._counter(
                "preemptions_total", "Running requests sent back to the queue because the pool ran out of blocks."
            ).labels(model)
        )
        self._queried = _Total(
            self._counter("prefix_cache_queried_tokens_total", "Prompt tokens looked up in the prefix cache.").labels(
                model
            )
        )
        self._hit = _Total(
            self._counter("prefix_cache_hit_tokens_total", "Prompt tokens found in the prefix cache.").labels(model)
        )

    def pool(self, report: PoolReport) -> None:
        """The scheduler's counts after a step, or while idle; reporting the same state twice changes nothing."""
        self._running.set(report.running)
        waiting = dict.fromkeys(WAIT_REASONS, 0) | dict(report.waiting)
        self._waiting.set(sum(waiting.values()))
        self._waiting_tokens.set(report.waiting_tokens)
        for reason, count in waiting.items():
            self._waiting_by[reason].set(count)
        capacity = report.used_blocks + report.cached_blocks + report.free_blocks
        self._usage.set(report.used_blocks / capacity if capacity else 0.0)
        self._used.set(report.used_blocks)
        self._cached.set(report.cached_blocks)
        self._free.set(report.free_blocks)
        self._evicted.reach(report.evicted_blocks)
        self._preempted.reach(report.preemptions)
        self._queried.reach(report.queried_tokens)
        self._hit.reach(report.hit_tokens)

    # Engine

    def _make_engine(self) -> None:
        model = self._model
        phases = ("prefill", "decode", "mixed")
        duration = self._histogram(
            "engine_step_duration_seconds",
            "Seconds of an engine step, by what it computed.",
            log_buckets(0.0005, 60.0),
            "phase",
        )
        tokens = self._histogram(
            "engine_step_tokens", "Tokens computed in an engine step.", power_buckets(2**15), "phase"
        )
        requests = self._histogram(
            "engine_step_requests", "Requests (sequences) in an engine step.", power_buckets(2**10), "phase"
        )
        self._steps = {
            phase: (duration.series(model, phase), tokens.series(model, phase), requests.series(model, phase))
            for phase in phases
        }
        computed = self._counter(
            "engine_computed_tokens_total", "Tokens that went through the model, recomputed ones included.", "kind"
        )
        self._prefill_tokens, self._decode_tokens = (computed.labels(model, kind) for kind in ("prefill", "decode"))
        busy = self._counter("engine_busy_seconds_total", "Seconds the engine spent working, by stage.", "stage")
        self._schedule, self._forward, self._sample, self._detokenize = (
            busy.labels(model, stage) for stage in ("schedule", "forward", "sample", "detokenize")
        )
        self._idle = self._counter("engine_idle_seconds_total", "Seconds the engine had nothing to do.").labels(model)
        state = self._gauge("engine_state", "1 for the state the engine is in, else 0.", "state")
        self._states = {phase: state.labels(model, phase.value) for phase in Phase}
        self.state(Phase.LOADING)
        self._step_age = self._gauge(
            "engine_step_age_seconds", "Seconds the step in progress has taken so far; 0 when idle."
        ).labels(model)
        self._startup = self._gauge("startup_duration_seconds", "Seconds a phase of the start took.", "phase")
        self._memory = self._gauge("memory_bytes", "Bytes of memory on the model's device, by use.", "kind")
        self._model_info = self._gauge(
            "model_info", "The model being served; always 1.", "model", "revision", "dtype", "max_model_len"
        )

    def step(self, report: StepReport) -> None:
        """A step is over and its output delivered."""
        phase = "prefill" if not report.decode_requests else "mixed" if report.prefill_requests else "decode"
        duration, tokens, requests = self._steps[phase]
        duration.observe(report.duration_seconds)
        tokens.observe(report.prefill_tokens + report.decode_tokens)
        requests.observe(report.prefill_requests + report.decode_requests)
        self._prefill_tokens.inc(report.prefill_tokens)
        self._decode_tokens.inc(report.decode_tokens)
        self._schedule.inc(report.schedule_seconds)
        self._forward.inc(report.forward_seconds)
        self._sample.inc(report.sample_seconds)
        self._detokenize.inc(report.detokenize_seconds)

    def idle(self, seconds: float) -> None:
        """The engine waited for work this long. Report long waits in parts, so that the rate stays smooth."""
        self._idle.inc(seconds)

    def state(self, phase: Phase) -> None:
        """The engine's life has reached `phase`."""
        for state, gauge in self._states.items():
            gauge.set(state is phase)

    def watch_step(self, age: Callable[[], float]) -> None:
        """Have each scrape ask `age` for how many seconds the step in progress has taken, so that a hang shows."""
        self._step_age.set_function(age)

    def startup(self, phase: StartupPhase, seconds: float) -> None:
        """A phase of the start took this long."""
        self._startup.labels(self._model, phase).set(seconds)

    def memory(self, kind: MemoryKind, nbytes: int) -> None:
        """So many bytes of the device's memory are in use (or, for device_free, not)."""
        self._memory.labels(self._model, kind).set(nbytes)

    def model_loaded(self, report: ModelReport) -> None:
        """The model is in memory and its pool is allocated."""
        self._model_info.labels(
            self._model, report.model, report.revision or "", report.dtype, report.max_model_len
        ).set(1)
        self._cache_config.labels(
            self._model,
            report.block_size,
            report.num_blocks,
            report.kv_cache_dtype,
            "true" if report.prefix_caching else "false",
        ).set(1)
        self._block_size.set(report.block_size)
        self._capacity.set(report.num_blocks)
        self._free.set(report.num_blocks)

    # HTTP

    def _make_http(self) -> None:
        self._http_requests = self._counter(
            "http_requests_total",
            "HTTP requests answered, by status sent and by outcome: a stream that fails midway is status 200, error.",
            "method",
            "route",
            "status",
            "outcome",
        )
        self._http_duration = self._histogram(
            "http_request_duration_seconds",
            "Seconds from an HTTP request's arrival to the last byte of its answer.",
            _DURATION,
            "method",
            "route",
            "status",
        )

    def http(self, method: str, route: str, status: int, outcome: str, seconds: float) -> None:
        """An HTTP request is answered. `route` is the template, never the path: a path would make endless series.

        outcome: "ok", "refused" (4xx), "error" or "disconnect"; it differs from the status where a stream broke off
            after its 200.
        """
        code = str(status)
        self._http_requests.labels(self._model, method, route, code, outcome).inc()
        self._http_duration.series(self._model, method, route, code).observe(seconds)


class _Total:
    """Feeds a counter from a running total kept elsewhere."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._reached = 0

    def reach(self, total: int | None) -> None:
        if total is not None and total != self._reached:
            self._counter.inc(total - self._reached)
            self._reached = total
