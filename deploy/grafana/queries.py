"""PromQL for the dashboards. Three rules keep the panels true:

- A ratio is a ratio of sums, never a mean of ratios: an idle replica would count as much as a busy one. A quantile is
  taken of the summed buckets, never averaged.
- Where nothing happened there is no value: neither 0, which looks like a very good latency, nor NaN, which spoils the
  legend's mean. `> 0` on denominators and `>= 0` on quantiles drop those points and keep real zeros.
- A rate looks back `$__rate_interval`, which Grafana keeps at four scrapes or more.

`by` names the labels that stay, separated by commas: nothing sums over the chosen instances, "instance" keeps them
apart.
"""

from __future__ import annotations

CHOSEN = 'model_name=~"$model", instance=~"$instance"'


def series(name: str, where: str = "") -> str:
    """The chosen instances' series of one of the server's own metrics. `where`: further matchers."""
    return f"sluice_{name}{{{joined(CHOSEN, where)}}}"


def joined(*parts: str) -> str:
    return ", ".join(filter(None, parts))


def aggregate(how: str, expression: str, by: str = "") -> str:
    return f"{how} by ({by}) ({expression})" if by else f"{how}({expression})"


def gauge(name: str, by: str = "", where: str = "", how: str = "sum") -> str:
    return aggregate(how, series(name, where), by)


def rate(counter: str, by: str = "", where: str = "") -> str:
    """Increase a second."""
    return aggregate("sum", f"rate({series(counter, where)}[$__rate_interval])", by)


def ratio(numerator: str, denominator: str, match: str = "") -> str:
    """No value where the denominator is 0. `match`: how series pair up, where their labels differ."""
    return f"{numerator}\n/ {match} ({denominator} > 0)" if match else f"{numerator}\n/ ({denominator} > 0)"


def quantile(q: float, histogram: str, by: str = "", where: str = "") -> str:
    return f"histogram_quantile({q:g}, {rate(f'{histogram}_bucket', joined('le', by), where)}) >= 0"


def mean(histogram: str, by: str = "") -> str:
    return ratio(rate(f"{histogram}_sum", by), rate(f"{histogram}_count", by))


def or_no_data(expression: str) -> str:
    """NaN where there is no value, so that the last value of a range is that of now and not of before an outage."""
    return f"({expression}) or vector(NaN)"


# What several panels show


def failures(by: str = "") -> str:
    """Requests that the server could not answer, a second: as SluiceErrors counts them (deploy/prometheus/rules)."""
    errors = rate("requests_total", by, 'finish_reason="error"')
    aborts = rate("request_aborts_total", by, 'cause=~"queue_timeout|deadline_empty|shutdown"')
    refused = rate("request_rejections_total", by, 'reason="dead"')
    return f"({errors}\n+ {aborts}\n+ {refused})"


def error_ratio(by: str = "") -> str:
    """Of all that ended other than by the client's own doing."""
    answered = rate("requests_total", by, 'finish_reason=~"stop|length"')
    return ratio(failures(by), f"({failures(by)}\n+ {answered})")


def refused_ratio(by: str = "") -> str:
    return ratio(
        rate("request_rejections_total", by, 'reason=~"queue_full|queue_tokens|loading|draining"'),
        rate("requests_received_total", by),
    )


def goodput(by: str = "") -> str:
    return ratio(rate("requests_slo_total", by, 'met="true"'), rate("requests_slo_total", by))


def used_blocks(by: str = "") -> str:
    return gauge("kv_cache_blocks", by, 'state="used"')


def kv_usage(by: str = "") -> str:
    return ratio(used_blocks(by), gauge("kv_cache_capacity_blocks", by))


def fragmentation(by: str = "") -> str:
    """Weighted by the blocks in use."""
    blocks = series("kv_cache_blocks", 'state="used"')
    empty = f"{series('kv_cache_fragmentation_ratio')} * ignoring (state) {blocks}"
    return ratio(aggregate("sum", empty, by), used_blocks(by))


def used_tokens(by: str = "") -> str:
    """Of the tokens that the pools have room for, the share that running requests take."""
    return aggregate("sum", f"{series('kv_cache_usage_ratio')} * {series('kv_cache_capacity_tokens')}", by)


def hit_ratio(by: str = "") -> str:
    return ratio(rate("prefix_cache_hit_tokens_total", by), rate("prefix_cache_queried_tokens_total", by))


def engine_seconds(by: str = "") -> str:
    """Seconds a second that the engines accounted for, at work or idle: about one an engine."""
    return f"({rate('engine_busy_seconds_total', by)} + {rate('engine_idle_seconds_total', by)})"


# The process's own metrics, which do not know the model


def of_process(expression: str) -> str:
    """Those of `expression` (per-instance series) that come from a Sluice serving the chosen model."""
    return f'({expression}\nand on (job, instance) sluice_build_info{{model_name=~"$model"}})'


def process(name: str) -> str:
    return of_process(f'{name}{{instance=~"$instance"}}')


def process_rate(name: str) -> str:
    return of_process(f'rate({name}{{instance=~"$instance"}}[$__rate_interval])')


UP = '(up{job="sluice", instance=~"$instance"}\nunless on (job, instance) sluice_build_info{model_name!~"$model"})'
"""1 or 0 for each target. One that is down names no model, so it counts for all."""
