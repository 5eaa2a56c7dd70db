"""Fair sharing between tenants, by the virtual token counters of VTC.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Each tenant has a counter of the tokens computed
for it, and the next request to start is of the waiting tenant that has had the least. A tenant that comes to the queue
with nothing waiting is lifted to the least of those that wait, so that nobody saves up service while idle. While two
tenants both have requests waiting, what they get differs by no more than the batch in flight (see the paper's theorem
4.4), however many requests each of them sends.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from server.scheduler.request import Request

INPUT_WEIGHT = 1
OUTPUT_WEIGHT = 2
"""A token of output has the batch compute one more row in a step of its own; a prompt's tokens share a step."""


class TokenCounters:
    """How much service each tenant has had, and who is next. There is one counter a tenant, kept for good."""

    def __init__(self) -> None:
        self._served: dict[str, int] = {}
        self._waiting: Counter[str] = Counter()  # requests in the queue, of the tenants that have some
        self._last: str | None = None  # the tenant whose last request left the queue most recently

    def enter(self, tenant: str) -> None:
        """A request of the tenant has come to the queue, new or preempted."""
        if tenant not in self._waiting:
            own = self._served.get(tenant, 0)
            others = [self._served[other] for other in self._waiting]
            floor = min(others) if others else self._served[self._last] if self._last is not None else 0
            self._served[tenant] = max(own, floor)
        self._waiting[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant has left the queue, to run or for good."""
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def charge(self, tenant: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """So many tokens were, or are about to be, computed for the tenant."""
        self._served[tenant] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)

    def in_turn(self, waiting: Iterable[Request]) -> Iterator[Request]:
        """The queue in the order of admission: the preempted, whose tenants have paid already, then fairly.

        Within a tenant the order is by priority, then arrival. What is charged between two requests counts for the
        second. `waiting` may change meanwhile; its requests of the first call are the ones that come.
        """
        queues: dict[str, deque[Request]] = {}
        preempted: list[Request] = []
        for request in sorted(waiting, key=lambda request: (request.priority, request.arrival)):
            if request.num_preemptions:
                preempted.append(request)
            else:
                queues.setdefault(request.tenant, deque()).append(request)
        yield from sorted(preempted, key=lambda request: request.arrival)

        turns = [(self._served[tenant], queue[0].arrival, tenant) for tenant, queue in queues.items()]
        heapify(turns)
        while turns:
            _, _, tenant = heappop(turns)
            queue = queues[tenant]
            yield queue.popleft()
            if queue:
                heappush(turns, (self._served[tenant], queue[0].arrival, tenant))

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raises AssertionError if the queue is another than this one has been told."""
        assert self._waiting == Counter(request.tenant for request in waiting), "a tenant's queue was miscounted"
