"""What is on the dashboard `sluice` about the KV cache: what is in it, what it gives up, where that goes."""

from __future__ import annotations

from typing import get_args

from deploy.grafana.panels import Panel, Query, quantiles, timeseries
from deploy.grafana.queries import fragmentation, gauge, hit_ratio, kv_usage, rate, used_tokens
from server.reports import EVICTION_CAUSES
from server.step import EvictionPolicy


def pool() -> list[Panel]:
    return [
        timeseries(
            "Usage",
            """Share of all KV blocks that running requests hold, and that of the fullest replica. Near 100 % with
            preemptions: more memory for the cache, lower --max-num-seqs, or another replica.""",
            "percentunit",
            [Query(kv_usage(), "used"), Query(gauge("kv_cache_usage_ratio", how="max"), "fullest replica")],
            most=1,
        ),
        timeseries(
            "Blocks by state",
            """KV blocks held by running requests, kept for their content (free to take), and empty; together they are
            the capacity. No free ones is normal; no cached ones either means that the pool is full.""",
            "none",
            [
                Query(gauge("kv_cache_blocks", "state"), "{{state}}", ("used", "cached", "free")),
                Query(gauge("kv_cache_capacity_blocks"), "capacity"),
            ],
            stacked=True,
        ),
        timeseries(
            "Fragmentation",
            """Share of the token slots in used blocks that hold no token yet: the open ends of last blocks, and prompts
            not yet computed. When it is high though no long prompts are under way, requests are short: lower
            --block-size.""",
            "percentunit",
            [Query(fragmentation(), "empty slots")],
            most=1,
        ),
        timeseries(
            "Prefix cache hits",
            """Share of the prompt tokens looked up that were found in the cache, each token counting once. When it
            falls, see whether evictions rise, or whether the router spreads a prefix over replicas.""",
            "percentunit",
            [Query(hit_ratio(), "found")],
            most=1,
        ),
        timeseries(
            "Evictions and preemptions",
            """Cached blocks given up for new content, and running requests sent back to the queue, a second. Evictions
            are normal; lasting preemptions waste work: give the pool more memory or use --admission reserve.""",
            "ops",
            [
                Query(rate("kv_cache_evicted_blocks_total", where='cause="prefix_lru"'), "evicted blocks"),
                Query(rate("preemptions_total"), "preemption"),
            ],
        ),
        timeseries(
            "Capacity in tokens",
            """Tokens that all pools have room for, and the room that running requests take. Divided by the usual tokens
            of a request (prompt and output), the capacity is how many fit at once, or more if layers have windows.""",
            "si:tok",
            [
                Query(used_tokens(), "used"),
                Query(gauge("kv_cache_capacity_tokens"), "capacity"),
            ],
        ),
    ]


def tiers() -> list[Panel]:
    kept_and_dropped = [f"{policy} {outcome}" for policy in get_args(EvictionPolicy) for outcome in ("kept", "dropped")]
    return [
        timeseries(
            "Evicted blocks by cause",
            """KV blocks given up a second. prefix_lru: cached prefixes make room for new content; sliding_window: no
            layer sees them any more, which costs nothing; h2o and window: requests have outgrown their budget, and
            lose what the policy drops.""",
            "ops",
            [Query(rate("kv_cache_evicted_blocks_total", "cause"), "{{cause}}", EVICTION_CAUSES)],
            stacked=True,
            width=6,
        ),
        timeseries(
            "Tokens kept and dropped by budgets",
            """Tokens a second that requests over their budget dropped, and those they kept, counted at each compaction.
            Dropped ones are context that the model no longer sees: when answers suffer, raise --kv-budget or the
            requests' kv_budget.""",
            "si:tok/s",
            [Query(rate("kv_budget_tokens_total", "policy, outcome"), "{{policy}} {{outcome}}", kept_and_dropped)],
            width=6,
        ),
        timeseries(
            "Compaction time",
            """Seconds that a step with a request over its budget took to drop what is beyond, before it computed
            anything. When it nears 'Step duration by phase', larger budgets make it rarer.""",
            "s",
            quantiles("kv_compaction_seconds"),
            width=6,
        ),
        timeseries(
            "Copy time",
            """Seconds that a step spent on copies of blocks to and from host memory, before it computed anything. When
            it nears 'Step duration by phase', host memory costs more than it spares: lower --kv-host-memory.""",
            "s",
            quantiles("kv_copy_seconds"),
            width=6,
        ),
        timeseries(
            "Bytes by tier and state",
            """Bytes of KV blocks on the device and in host memory, by what is in them; together they are all that the
            cache has. Mostly device used, with preemptions: see 'When the cache is full' in docs/operating.md.""",
            "bytes",
            [
                Query(
                    gauge("kv_cache_bytes", "tier, state"),
                    "{{tier}} {{state}}",
                    ("device used", "device cached", "device free", "host used", "host free"),
                )
            ],
            stacked=True,
        ),
        timeseries(
            "Host blocks by state",
            """KV blocks of host memory that hold an evicted prefix, and empty ones; none without --kv-host-memory. Full
            with many evictions beside: more of it would keep prefixes longer.""",
            "none",
            [Query(gauge("kv_cache_host_blocks", "state"), "{{state}}", ("used", "free"))],
            stacked=True,
        ),
        timeseries(
            "Host copies and evictions",
            """KV blocks a second saved to host memory, loaded from it instead of computed again, and given up there for
            newer ones. Many saved and few loaded: prompts do not come back, and host memory is no help.""",
            "ops",
            [
                Query(rate("kv_cache_host_copied_blocks_total", "direction"), "{{direction}}", ("save", "load")),
                Query(rate("kv_cache_host_evicted_blocks_total"), "evicted from host"),
            ],
        ),
    ]
