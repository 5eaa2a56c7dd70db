"""What is on the dashboard `sluice` about the inside of a server: tokens, steps, process."""

from __future__ import annotations

from typing import get_args

from deploy.grafana.panels import Panel, Query, bars, facts, heat, quantiles, timeseries
from deploy.grafana.queries import (
    UP,
    aggregate,
    engine_seconds,
    gauge,
    mean,
    of_process,
    process,
    process_rate,
    quantile,
    rate,
    ratio,
    series,
)
from server.generation import Phase
from server.reports import STAGES, DiscardReason, MemoryKind, StartupPhase

STEP_PHASES = ("prefill", "decode", "mixed")


def tokens() -> list[Panel]:
    prompt, cached = rate("prompt_tokens_total"), rate("prompt_tokens_cached_total")
    return [
        timeseries(
            "Tokens a second",
            """Output tokens delivered, prompt tokens computed, and prompt tokens that the prefix cache spared. When
            generated falls as computed prompt rises, long prompts take the steps: see the shares beside.""",
            "si:tok/s",
            [
                Query(rate("generation_tokens_total"), "generated"),
                Query(f"{prompt} - {cached}", "computed prompt"),
                Query(cached, "cached prompt"),
            ],
        ),
        timeseries(
            "Prefill and decode share",
            """Share of all tokens through the model that belong to prompts (or are computed again) and to outputs.
            Mostly prefill: prefix caching and shorter prompts help; mostly decode: larger batches do.""",
            "percentunit",
            [
                Query(
                    ratio(
                        rate("engine_computed_tokens_total", "kind"),
                        rate("engine_computed_tokens_total"),
                        "on () group_left ()",
                    ),
                    "{{kind}}",
                    ("prefill", "decode"),
                )
            ],
            stacked=True,
            most=1,
        ),
        timeseries(
            "Discarded tokens by reason",
            """Tokens a second computed in vain. preemption: the pool is too small; disconnect and abort: clients give
            up, often as it is too slow; error: see the log.""",
            "si:tok/s",
            [Query(rate("discarded_tokens_total", "reason"), "{{reason}}", get_args(DiscardReason))],
            stacked=True,
        ),
        timeseries(
            "Tokens in a step",
            """Mean number of tokens that a step computes, by what it did. Far below --max-num-batched-tokens while
            requests wait means that slots or blocks are what is short.""",
            "si:tok",
            [Query(mean("engine_step_tokens", "phase"), "{{phase}}", STEP_PHASES)],
        ),
        timeseries(
            "Requests in a step",
            """Mean number of requests that a step works on, by what it did: the batch size. When small while requests
            wait, see 'Waiting by reason'.""",
            "none",
            [Query(mean("engine_step_requests", "phase"), "{{phase}}", STEP_PHASES)],
        ),
        timeseries(
            "Prompt length",
            """Prompt tokens of finished requests, estimated between powers of two. When it grows, so do prefill time
            and the blocks that a request holds: compare before looking for a fault.""",
            "si:tok",
            quantiles("request_prompt_tokens"),
            width=4,
        ),
        timeseries(
            "Output length",
            """Output tokens of finished requests, estimated between powers of two. When it grows, so does the
            end-to-end time, and fewer requests finish a second.""",
            "si:tok",
            quantiles("request_generation_tokens"),
            width=4,
        ),
    ]


def steps() -> list[Panel]:
    return [
        timeseries(
            "Step duration by phase",
            """Wall time of a step, by what it computed; a running request gets one token a step. When p95 of mixed is
            far above decode, long prompts hold up outputs: lower --max-num-batched-tokens.""",
            "s",
            [
                Query(quantile(q, "engine_step_duration_seconds", "phase"), f"{{{{phase}}}} p{q * 100:g}", STEP_PHASES)
                for q in (0.5, 0.95)
            ],
        ),
        timeseries(
            "Engine time by stage",
            """Share of the engines' time in each stage and idle. Much of copy or compact: see 'KV evictions and tiers'.
            Idle while requests wait, or another stage than forward being large, is the server's fault and not the
            model's: report it with these numbers.""",
            "percentunit",
            [
                Query(
                    ratio(rate("engine_busy_seconds_total", "stage"), engine_seconds(), "on () group_left ()"),
                    "{{stage}}",
                    STAGES,
                ),
                Query(ratio(rate("engine_idle_seconds_total"), engine_seconds()), "idle"),
            ],
            stacked=True,
            most=1,
        ),
        timeseries(
            "Steps a second",
            """Steps that ended, by what they computed. None while requests run means that the engine is stuck: see
            'Step in progress'.""",
            "ops",
            [Query(rate("engine_step_duration_seconds_count", "phase"), "{{phase}}", STEP_PHASES)],
            stacked=True,
        ),
        heat(
            "Step duration",
            """How many steps a second took how long. Two bands are decode and prefill; a third that appears alone, far
            above, is something that holds up the device.""",
            "s",
            rate("engine_step_duration_seconds_bucket", "le"),
        ),
        timeseries(
            "Step in progress",
            """Seconds that the longest step in progress has taken so far; 0 when idle. A line that climbs without end
            is a hung device: SluiceStuck fires at one minute, restart the server.""",
            "s",
            [Query(gauge("engine_step_age_seconds", how="max"), "oldest step")],
            width=6,
        ),
        timeseries(
            "Engines by state",
            """Engines loading, ready, draining and dead. A dead one does not come back: see its log and restart the
            process; the dashboard by replica says which it is.""",
            "none",
            [Query(gauge("engine_state", "state"), "{{state}}", [phase.value for phase in Phase])],
            stacked=True,
            width=6,
        ),
    ]


def process_panels() -> list[Panel]:
    used_files = 'process_open_fds{instance=~"$instance"} / process_max_fds{instance=~"$instance"}'
    return [
        timeseries(
            "Replicas",
            """Targets of the job sluice, those that answer the scrape, and those that are ready for requests. Up but
            not ready is loading, draining or dead: see 'Engines by state'.""",
            "none",
            [
                Query(aggregate("count", UP), "targets"),
                Query(aggregate("sum", UP), "up"),
                Query(gauge("engine_state", where='state="ready"'), "ready"),
            ],
            width=6,
        ),
        facts(
            "What is running",
            """Model, versions and cache of each instance, as of now. Rows that differ in a rollout that should be over
            name the replica that was left behind.""",
            [
                aggregate("max", series("build_info"), "instance, version, python, torch, transformers"),
                aggregate("max", series("model_info"), "instance, model, revision, dtype, max_model_len"),
                aggregate(
                    "max",
                    series("cache_config_info"),
                    "instance, block_size, num_gpu_blocks, kv_cache_dtype, prefix_caching",
                ),
            ],
            {},
            width=18,
            height=8,
        ),
        timeseries(
            "Resident memory",
            """Host memory of the processes: all together, and the largest. It rises while loading and then stays; a
            line that climbs for hours is a leak: report it, and restart in turn.""",
            "bytes",
            [
                Query(aggregate("sum", process("process_resident_memory_bytes")), "all"),
                Query(aggregate("max", process("process_resident_memory_bytes")), "largest replica"),
            ],
        ),
        timeseries(
            "CPU cores",
            """Cores that the processes keep busy: all together, and the busiest. On a GPU about one a replica; at a
            container's CPU limit the event loop lags: raise the limit.""",
            "none",
            [
                Query(aggregate("sum", process_rate("process_cpu_seconds_total")), "all"),
                Query(aggregate("max", process_rate("process_cpu_seconds_total")), "busiest replica"),
            ],
        ),
        timeseries(
            "Memory by kind",
            """How each server divided its device's memory at its start, all instances together; it does not change
            after. device_free near 0 leaves nothing for what else runs there: lower --gpu-memory-utilization.""",
            "bytes",
            [Query(gauge("memory_bytes", "kind"), "{{kind}}", get_args(MemoryKind))],
            stacked=True,
        ),
        timeseries(
            "Event-loop lag",
            """How late the HTTP loop wakes up from a short sleep. Above some tens of milliseconds, streams and probes
            are late too: give the process more CPU.""",
            "s",
            quantiles("event_loop_lag_seconds"),
        ),
        timeseries(
            "Open files",
            """File descriptors in use as share of the limit, of the replica nearest to it; every connection is one.
            Near 100 % connections fail: raise the limit (ulimit -n).""",
            "percentunit",
            [Query(aggregate("max", of_process(used_files)), "nearest to its limit")],
            most=1,
        ),
        timeseries(
            "Garbage collections",
            """Python's collections a second by generation. Frequent ones of generation 2 pause every thread: report it
            together with 'Event-loop lag'.""",
            "ops",
            [
                Query(
                    aggregate("sum", process_rate("python_gc_collections_total"), "generation"),
                    "generation {{generation}}",
                )
            ],
        ),
        timeseries(
            "Garbage found",
            """Objects in cycles that the collections found, and those they could not free, a second. Uncollectable ones
            are a leak: report it.""",
            "ops",
            [
                Query(aggregate("sum", process_rate("python_gc_objects_collected_total")), "collected"),
                Query(aggregate("sum", process_rate("python_gc_objects_uncollectable_total")), "uncollectable"),
            ],
            width=12,
        ),
        bars(
            "Start",
            """Seconds that the slowest instance took for each phase of its start. When load_weights dominates, put the
            weights on a local disk; startup probes must allow for the total.""",
            "s",
            Query(gauge("startup_duration_seconds", "phase", how="max"), "{{phase}}", get_args(StartupPhase)),
            width=12,
        ),
    ]
