"""HTTP: its requests by route and outcome, and how free the loop is that answers them."""

from __future__ import annotations

from server.metrics.families import DURATION, Families
from server.metrics.instruments import log_buckets


class HttpMetrics:
    """Called on the HTTP loop."""

    def __init__(self, families: Families) -> None:
        self._model = families.model
        self._requests = families.counter(
            "http_requests_total",
            "HTTP requests answered, by status sent and by outcome: a stream that fails midway is status 200, error.",
            "method",
            "route",
            "status",
            "outcome",
        )
        self._duration = families.histogram(
            "http_request_duration_seconds",
            "Seconds from an HTTP request's arrival to the last byte of its answer.",
            DURATION,
            "method",
            "route",
            "status",
        )
        self._lag = families.histogram(
            "event_loop_lag_seconds",
            "Seconds by which the event loop that answers HTTP woke up late from a short sleep.",
            log_buckets(0.0005, 10.0),
        ).series(self._model)

    def answered(self, method: str, route: str, status: int, outcome: str, seconds: float) -> None:
        """An HTTP request is answered. `route` is the template, never the path: a path would make endless series.

        outcome: "ok", "refused" (4xx), "error" or "disconnect"; it differs from the status where a stream broke off
            after its 200.
        """
        code = str(status)
        self._requests.labels(self._model, method, route, code, outcome).inc()
        self._duration.series(self._model, method, route, code).observe(seconds)

    def lagged(self, seconds: float) -> None:
        """The loop woke up so late from a sleep."""
        self._lag.observe(seconds)
