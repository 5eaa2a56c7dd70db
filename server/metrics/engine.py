"""The engine: its life, its steps, where their time goes, and the memory it has taken."""

from __future__ import annotations

from collections.abc import Callable

from server.generation import Phase
from server.metrics.families import Families
from server.metrics.instruments import log_buckets, power_buckets
from server.reports import STAGES, MemoryKind, ModelReport, StartupPhase, StepReport

PART_OF_STEP = log_buckets(0.0001, 10.0)


class EngineMetrics:
    """`state` is called on either loop, all else on the engine's thread."""

    def __init__(self, families: Families) -> None:
        model = self._model = families.model
        phases = ("prefill", "decode", "mixed")
        duration = families.histogram(
            "engine_step_duration_seconds",
            "Seconds of an engine step, by what it computed.",
            log_buckets(0.0005, 60.0),
            "phase",
        )
        tokens = families.histogram(
            "engine_step_tokens", "Tokens computed in an engine step.", power_buckets(2**15), "phase"
        )
        requests = families.histogram(
            "engine_step_requests", "Requests (sequences) in an engine step.", power_buckets(2**10), "phase"
        )
        self._steps = {
            phase: (duration.series(model, phase), tokens.series(model, phase), requests.series(model, phase))
            for phase in phases
        }
        computed = families.counter(
            "engine_computed_tokens_total", "Tokens that went through the model, recomputed ones included.", "kind"
        )
        self._prefill_tokens, self._decode_tokens = (computed.labels(model, kind) for kind in ("prefill", "decode"))
        busy = families.counter("engine_busy_seconds_total", "Seconds the engine spent working, by stage.", "stage")
        self._schedule, self._copy, self._compact, self._forward, self._sample, self._detokenize = (
            busy.labels(model, stage) for stage in STAGES
        )
        self._copies = families.histogram(
            "kv_copy_seconds", "Seconds of a step's copies of KV blocks to and from host memory.", PART_OF_STEP
        ).series(model)
        self._compactions = families.histogram(
            "kv_compaction_seconds",
            "Seconds a step took to drop what requests held beyond their budget of the KV cache.",
            PART_OF_STEP,
        ).series(model)
        self._idle = families.counter("engine_idle_seconds_total", "Seconds the engine had nothing to do.").labels(
            model
        )
        state = families.gauge("engine_state", "1 for the state the engine is in, else 0.", "state")
        self._states = {phase: state.labels(model, phase.value) for phase in Phase}
        self.state(Phase.LOADING)
        self._step_age = families.gauge(
            "engine_step_age_seconds", "Seconds the step in progress has taken so far; 0 when idle."
        ).labels(model)
        self._startup = families.gauge("startup_duration_seconds", "Seconds a phase of the start took.", "phase")
        self._memory = families.gauge("memory_bytes", "Bytes of memory on the model's device, by use.", "kind")
        self._model_info = families.gauge(
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
        if report.copy_seconds is not None:
            self._copy.inc(report.copy_seconds)
            self._copies.observe(report.copy_seconds)
        if report.compaction_seconds is not None:
            self._compact.inc(report.compaction_seconds)
            self._compactions.observe(report.compaction_seconds)

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

    def loaded(self, report: ModelReport) -> None:
        """The model is in memory."""
        self._model_info.labels(
            self._model, report.model, report.revision or "", report.dtype, report.max_model_len
        ).set(1)
