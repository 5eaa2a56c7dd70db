"""What is on the dashboard `sluice-replicas`: what matters, a line for each instance."""

from __future__ import annotations

from deploy.grafana.panels import Panel, Query, facts, states, timeseries
from deploy.grafana.queries import (
    UP,
    aggregate,
    engine_seconds,
    error_ratio,
    fragmentation,
    gauge,
    goodput,
    hit_ratio,
    kv_usage,
    process,
    process_rate,
    quantile,
    rate,
    ratio,
    series,
)

STATES = {-1: "down", 0: "loading", 1: "ready", 2: "draining", 3: "dead"}


def lines(
    title: str, description: str, unit: str, expression: str, *, width: int = 8, most: float | None = None
) -> Panel:
    """One line for each instance, in the instance's colour."""
    return timeseries(title, description, unit, [Query(expression, "{{instance}}")], width=width, most=most)


def state() -> str:
    """One of STATES for each instance."""
    numbered = [
        gauge("engine_state", "instance", f'state="{name}"') + (f" * {number}" if number > 1 else "")
        for number, name in STATES.items()
        if number > 0
    ]
    down = aggregate("max", f"{UP} == 0", "instance")
    return f"({' + '.join(numbered)})\nor on (instance) ({down} - 1)"


def fleet() -> list[Panel]:
    return [
        states(
            "State",
            """What each instance was doing when. A bar that is loading again and again is a server that fails as it
            starts; down or dead asks for its log and a restart.""",
            Query(state(), "{{instance}}"),
            STATES,
        ),
        facts(
            "Instances",
            """Each instance now: uptime, what runs on it, how much of it is in use. One that stands out from its peers
            is where to look first.""",
            [
                aggregate("max", f"time() - {process('process_start_time_seconds')}", "instance"),
                aggregate("max", series("requests_running"), "instance"),
                aggregate("max", series("requests_waiting"), "instance"),
                aggregate("max", series("kv_cache_usage_ratio"), "instance"),
                aggregate("max", series("build_info"), "instance, version"),
                aggregate("max", series("model_info"), "instance, model, revision, dtype, max_model_len"),
            ],
            {"up for": "dtdurations", "running": "none", "waiting": "none", "KV pool in use": "percentunit"},
        ),
    ]


def service() -> list[Panel]:
    return [
        lines(
            "Finished requests",
            """Requests a second that ended on each instance, however they ended. Uneven lines: see how the load
            balancer shares out.""",
            "reqps",
            rate("requests_total", "instance"),
        ),
        lines(
            "Error ratio",
            """Share of requests that the instance could not answer. When one alone fails, take it out of the load
            balancer and read its log.""",
            "percentunit",
            error_ratio("instance"),
        ),
        lines(
            "Goodput",
            """Share of finished requests that met both objectives. When one is below its peers with the same load, its
            device or its CPUs are slower.""",
            "percentunit",
            goodput("instance"),
            most=1,
        ),
        lines(
            "Time to first token, p95",
            """19 of 20 requests had their first token within this time. When one is above its peers, see whether its
            queue is longer.""",
            "s",
            quantile(0.95, "time_to_first_token_seconds", "instance"),
        ),
        lines(
            "Inter-token latency, p95",
            """19 of 20 gaps between tokens of a request were shorter. When one is above its peers, see its step
            duration and its prompts.""",
            "s",
            quantile(0.95, "inter_token_latency_seconds", "instance"),
        ),
        lines(
            "End to end, p95",
            """19 of 20 requests took no longer. When one is above its peers and its outputs are not longer, see its
            step duration.""",
            "s",
            quantile(0.95, "request_duration_seconds", "instance"),
        ),
        lines(
            "Running",
            """Requests in the instance's running batch. When one is at the limit and others are not, the load balancer
            does not look at the load.""",
            "none",
            gauge("requests_running", "instance"),
        ),
        lines(
            "Waiting",
            """Requests in the instance's queue. When one has a queue while others idle, the load balancer should count
            open requests, not take turns.""",
            "none",
            gauge("requests_waiting", "instance"),
        ),
        lines(
            "Time in the queue, p95",
            """19 of 20 finished requests waited no longer before they were admitted. When it grows on all, add
            replicas; on one, see the load balancer.""",
            "s",
            quantile(0.95, "request_queue_duration_seconds", "instance"),
        ),
    ]


def engine() -> list[Panel]:
    return [
        lines(
            "Generated tokens",
            """Output tokens delivered a second. When one is below its peers while its requests run, its device is
            slower: see its step duration.""",
            "si:tok/s",
            rate("generation_tokens_total", "instance"),
        ),
        lines(
            "Prompt tokens",
            """Prompt tokens a second, cached ones included. When one has most of them, long prompts go to the same
            replica: see how the load balancer shares out.""",
            "si:tok/s",
            rate("prompt_tokens_total", "instance"),
        ),
        lines(
            "Step duration, p95",
            """19 of 20 steps took no longer. When one is above its peers with the same batch, look at its device's
            clocks and temperature.""",
            "s",
            quantile(0.95, "engine_step_duration_seconds", "instance"),
        ),
        lines(
            "KV pool in use",
            """Share of the instance's KV blocks that running requests hold. Near 100 % with preemptions, this instance
            has too little memory for its share.""",
            "percentunit",
            kv_usage("instance"),
            most=1,
        ),
        lines(
            "Prefix cache hits",
            """Share of the prompt tokens looked up that were found in this instance's cache. When all are low though
            prompts repeat, route by prefix.""",
            "percentunit",
            hit_ratio("instance"),
            most=1,
        ),
        lines(
            "Fragmentation",
            """Share of the token slots in used blocks that hold no token yet. Higher on one with shorter requests;
            nothing to do about it.""",
            "percentunit",
            fragmentation("instance"),
            most=1,
        ),
        lines(
            "Preemptions",
            """Running requests sent back to the queue a second. When they last, give the pool more memory or use
            --admission reserve.""",
            "ops",
            rate("preemptions_total", "instance"),
        ),
        lines(
            "Engine busy",
            """Share of the engine's time at work. At 100 % the instance gives what it can; idle while its requests wait
            is a fault to report.""",
            "percentunit",
            ratio(rate("engine_busy_seconds_total", "instance"), engine_seconds("instance")),
            most=1,
        ),
        lines(
            "Step in progress",
            """Seconds that the step in progress has taken so far; 0 when idle. A line that climbs without end is a hung
            device: restart that instance.""",
            "s",
            gauge("engine_step_age_seconds", "instance"),
        ),
    ]


def processes() -> list[Panel]:
    return [
        lines(
            "Resident memory",
            "Host memory of the process. A line that climbs for hours is a leak: report it, and restart the instance.",
            "bytes",
            aggregate("max", process("process_resident_memory_bytes"), "instance"),
            width=6,
        ),
        lines(
            "CPU cores",
            "Cores that the process keeps busy. At the container's limit the event loop lags: raise the limit.",
            "none",
            aggregate("max", process_rate("process_cpu_seconds_total"), "instance"),
            width=6,
        ),
        lines(
            "Event-loop lag, p99",
            """How late the HTTP loop woke up, 99 times of 100 by less. Above some tens of milliseconds, streams and
            probes are late too: give the process more CPU.""",
            "s",
            quantile(0.99, "event_loop_lag_seconds", "instance"),
            width=6,
        ),
        lines(
            "Open files",
            """File descriptors in use; every connection is one. A line that climbs while requests do not is a leak of
            connections: report it.""",
            "none",
            aggregate("max", process("process_open_fds"), "instance"),
            width=6,
        ),
    ]


def rows() -> list[tuple[str, list[Panel]]]:
    return [("Fleet", fleet()), ("Service", service()), ("Engine", engine()), ("Process", processes())]
