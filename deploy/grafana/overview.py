"""What is on the dashboard `sluice`, the chosen instances as one server: what clients see of it."""

from __future__ import annotations

from typing import get_args

from deploy.grafana import cache, internals
from deploy.grafana.panels import Panel, Query, number, quantiles, red_from, timeseries
from deploy.grafana.queries import (
    UP,
    aggregate,
    error_ratio,
    gauge,
    goodput,
    kv_usage,
    or_no_data,
    quantile,
    rate,
    ratio,
    refused_ratio,
    series,
)
from server.reports import FINISH_REASONS, WAIT_REASONS, AbortCause, RejectReason


def objective(of: str) -> Query:
    return Query(gauge("slo_seconds", where=f'of="{of}"', how="max"), "objective")


def now() -> list[Panel]:
    """The stat row at the top."""
    return [
        number(
            "Goodput",
            """Share of finished requests that met both objectives (--slo-ttft, --slo-inter-token); green from 99 %, red
            below 94 %, where the error budget of a 99 % objective burns six times too fast. When low, see which of the
            two is missed in the row SLO.""",
            "percentunit",
            [Query(or_no_data(goodput()), "goodput")],
            steps=[(None, "red"), (0.94, "orange"), (0.99, "green")],
            most=1,
        ),
        number(
            "Error ratio",
            """Share of requests that the server could not answer; red from 5 %, where the alert SluiceErrors fires.
            When it is not 0, the log has a line for each failure, and the row Load says which kind.""",
            "percentunit",
            [Query(or_no_data(error_ratio()), "error ratio")],
            steps=[(None, "green"), (0.05, "red")],
        ),
        number(
            "Generated tokens",
            """Output tokens delivered a second, all chosen instances together. When it falls while requests wait, see
            the row Engine steps.""",
            "si:tok/s",
            [Query(or_no_data(rate("generation_tokens_total")), "generated")],
        ),
        number(
            "Running",
            "Requests in the running batches now. When it stays at the limit (row Load), further ones wait.",
            "none",
            [Query(or_no_data(gauge("requests_running")), "running")],
            colour="green",
        ),
        number(
            "Waiting",
            """Requests in the queues now. When it does not come back to 0, 'Waiting by reason' in the row Load says
            what they wait for.""",
            "none",
            [Query(or_no_data(gauge("requests_waiting")), "waiting")],
            colour="yellow",
        ),
        number(
            "KV pool in use",
            """Share of the KV blocks that running requests hold. A full pool is well used; it is too small when there
            are preemptions as well (row KV pool).""",
            "percentunit",
            [Query(or_no_data(kv_usage()), "used")],
            most=1,
        ),
        number(
            "TTFT p95",
            """19 of 20 requests had their first token within this time. When it is above the objective, compare queue
            and prefill under 'Where a request's time goes'.""",
            "s",
            [Query(or_no_data(quantile(0.95, "time_to_first_token_seconds")), "p95")],
            colour="orange",
        ),
        red_from(
            number(
                "Replicas",
                """Targets that answer Prometheus' scrape, and those that do not. When one is down, see the end of its
                log and that it is restarted.""",
                "none",
                [
                    Query(or_no_data(aggregate("sum", UP)), "up"),
                    Query(or_no_data(f"{aggregate('count', UP)} - {aggregate('sum', UP)}"), "down"),
                ],
                colour="green",
            ),
            "down",
            1,
        ),
    ]


def slo() -> list[Panel]:
    return [
        timeseries(
            "Goodput",
            """Share of finished requests that met both --slo-ttft and --slo-inter-token; what a client cancelled does
            not count. When low, the panels below say which objective is missed: first token means queue or prefill,
            inter-token means steps that take too long.""",
            "percentunit",
            [Query(goodput(), "goodput")],
            most=1,
        ),
        timeseries(
            "Error ratio",
            """Failed: ended in an error, a queue timeout, a shutdown or at a dead engine, as share of all that the
            client did not end. Refused: sent away by a full, loading or draining server, as share of all received.
            Failures are in the log; refusals ask for more replicas.""",
            "percentunit",
            [Query(error_ratio(), "failed"), Query(refused_ratio(), "refused")],
        ),
        timeseries(
            "Finished requests by objective",
            """Requests a second that met, or missed, the objectives: how much traffic the goodput rests on. A bad
            goodput of three requests may be chance.""",
            "reqps",
            [
                Query(rate("requests_slo_total", where='met="true"'), "met"),
                Query(rate("requests_slo_total", where='met="false"'), "not met"),
            ],
            stacked=True,
        ),
        timeseries(
            "Time to first token",
            """From arrival to the first token, of requests that got one; the objective is --slo-ttft (the loosest of
            the chosen instances). Estimated between bounds up to a factor of 1.8 apart, of which the objective is one.
            When high, see whether it is queueing or prefill under 'Where a request's time goes'.""",
            "s",
            [*quantiles("time_to_first_token_seconds"), objective("ttft")],
            width=6,
        ),
        timeseries(
            "Time per output token",
            """Mean time from token to token of each finished request; the objective is --slo-inter-token. When high,
            steps take too long: lower --max-num-batched-tokens or --max-num-seqs, or add replicas.""",
            "s",
            [*quantiles("request_time_per_output_token_seconds"), objective("inter_token")],
            width=6,
        ),
        timeseries(
            "Inter-token latency",
            """Each single gap between tokens of a request, as they happen. A p99 far above p50 is a stream that
            stutters: long prompts or preemptions come between, see the row Engine steps.""",
            "s",
            quantiles("inter_token_latency_seconds"),
            width=6,
        ),
        timeseries(
            "End to end",
            """From a request's arrival to its end, however it ended. It grows with the length of the output: compare it
            with 'Output length' before looking for a fault.""",
            "s",
            quantiles("request_duration_seconds"),
            width=6,
        ),
    ]


def load() -> list[Panel]:
    finished = rate("request_duration_seconds_count")
    return [
        timeseries(
            "Finished requests by reason",
            """Requests a second by how they ended. Errors are faults of the server (see its log); aborts are told apart
            under 'Aborts by cause'.""",
            "reqps",
            [Query(rate("requests_total", "finish_reason"), "{{finish_reason}}", FINISH_REASONS)],
            stacked=True,
        ),
        timeseries(
            "Received requests by endpoint",
            """Requests a second as they arrive, refused ones included. When it stays above what finishes and what is
            rejected together, the queue grows.""",
            "reqps",
            [Query(rate("requests_received_total", "endpoint, streaming"), "{{endpoint}}, streaming {{streaming}}")],
            stacked=True,
        ),
        timeseries(
            "Running and waiting",
            """Requests in the running batches and in the queues; the limit is the sum of --max-num-seqs. When running
            is below the limit while others wait, 'Waiting by reason' says for what: mostly the KV pool is full.""",
            "none",
            [
                Query(gauge("requests_running"), "running"),
                Query(gauge("requests_waiting"), "waiting"),
                Query(gauge("requests_running_limit"), "limit"),
            ],
        ),
        timeseries(
            "Use of the limits",
            """Running requests over --max-num-seqs, and open ones (running and waiting) over that and
            --max-queued-requests together, also of the fullest replica. When that reaches 100 %, its clients are
            refused (429): add replicas or, where all together are far below, see how the load balancer shares out.""",
            "percentunit",
            [
                Query(ratio(gauge("requests_running"), gauge("requests_running_limit")), "running"),
                Query(
                    ratio(
                        f"({gauge('requests_running')}\n+ {gauge('requests_waiting')})",
                        f"({gauge('requests_running_limit')}\n+ {gauge('requests_waiting_limit')})",
                    ),
                    "open",
                ),
                Query(
                    aggregate(
                        "max",
                        ratio(
                            f"({series('requests_running')}\n+ {series('requests_waiting')})",
                            f"({series('requests_running_limit')}\n+ {series('requests_waiting_limit')})",
                        ),
                    ),
                    "fullest replica",
                ),
            ],
            most=1,
        ),
        timeseries(
            "Waiting by reason",
            """What holds up the head of the queue. slots: raise --max-num-seqs; kv_blocks: more memory for the cache or
            another replica; token_budget and shared_prompt pass by themselves.""",
            "none",
            [Query(gauge("requests_waiting_by_reason", "reason"), "{{reason}}", WAIT_REASONS)],
            stacked=True,
        ),
        timeseries(
            "Prompt tokens waiting",
            """Prompt tokens in the queues that nobody has started on. Divided by all prompt tokens a second, cached
            ones included, it is about how long a new request waits.""",
            "si:tok",
            [Query(gauge("requests_waiting_tokens"), "waiting")],
        ),
        timeseries(
            "Time in the queue",
            """From arrival to admission, of finished requests that were admitted: who gave up or timed out in the queue
            is only under 'Aborts by cause'. When it grows, more comes than can be served: see 'Waiting by reason'.""",
            "s",
            quantiles("request_queue_duration_seconds"),
        ),
        timeseries(
            "Where a request's time goes",
            """Mean seconds that a finished request spent in each phase. The largest is what to work on: queue -
            capacity; prefill - prompt lengths and prefix hits; decode - step duration and output lengths.""",
            "s",
            [
                Query(ratio(rate(f"request_{phase}_duration_seconds_sum"), finished), phase)
                for phase in ("queue", "prefill", "decode")
            ],
            stacked=True,
        ),
        timeseries(
            "Rejections by reason",
            """Requests a second that were refused on arrival. queue_full and queue_tokens: add replicas or lengthen the
            queue; invalid and too_long: the client's mistake; dead: restart the server.""",
            "reqps",
            [Query(rate("request_rejections_total", "reason"), "{{reason}}", get_args(RejectReason))],
            stacked=True,
        ),
        timeseries(
            "Aborts by cause",
            """Requests a second that ended before they were complete. disconnect and api are the client's will;
            sibling, that another choice of the same request failed; queue_timeout, deadline (cut short) and
            deadline_empty (nothing to show) say that the server was too slow; shutdown, that --shutdown-timeout is too
            short (often unseen, as the process ends before the next scrape: see its log).""",
            "reqps",
            [Query(rate("request_aborts_total", "cause"), "{{cause}}", get_args(AbortCause))],
            stacked=True,
        ),
        timeseries(
            "HTTP answers by status",
            """HTTP answers a second on all routes, probes included, by the status sent. 5xx and 429 are the server's;
            for other 4xx ask the client. The first answer of a kind since the server's start does not show: count
            faults by 'Error ratio'.""",
            "reqps",
            [Query(rate("http_requests_total", "status"), "{{status}}", ("200", "429", "499", "500", "503"))],
            stacked=True,
        ),
        timeseries(
            "HTTP answers by outcome",
            """HTTP answers a second by how they really ended. A stream that fails after its 200 shows only here: error
            asks for the log, disconnect for the clients' or the proxy's timeouts, refused (4xx) for the client.""",
            "reqps",
            [
                Query(rate("http_requests_total", "outcome"), "{{outcome}}", ("ok", "refused", "error", "disconnect")),
            ],
            stacked=True,
        ),
        timeseries(
            "HTTP duration by route, p95",
            """From an HTTP request's arrival to the last byte of its answer. /health, /ready and /metrics must stay in
            milliseconds: when they do not, see 'Event-loop lag'.""",
            "s",
            [Query(quantile(0.95, "http_request_duration_seconds", "route"), "{{route}}")],
            width=24,
        ),
    ]


def rows() -> list[tuple[str, list[Panel]]]:
    return [
        ("", now()),
        ("SLO", slo()),
        ("Load", load()),
        ("Tokens", internals.tokens()),
        ("KV pool", cache.pool()),
        ("KV evictions and tiers", cache.tiers()),
        ("Engine steps", internals.steps()),
        ("Process", internals.process_panels()),
    ]
