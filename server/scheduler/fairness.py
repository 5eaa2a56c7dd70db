"""Fair sharing between tenants, by the virtual token counters of VTC.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024. Each tenant has a counter of the tokens computed
for it, and the next request to start is of the waiting tenant that has had the least. A tenant that comes to the queue
with nothing waiting is lifted to the least of those that wait, so that nobody saves up service while idle. While two
tenants both have requests waiting, what they get differs by no more than the batch in flight (see the paper's theorem
4.4), however many requests each of them sends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
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
        self._preempted: list[Request] = []  # those of them that have run, by order
        self._queues: dict[str, list[Request]] = {}  # the others of each tenant that has some, by rank
        self._last: str | None = None  # the tenant whose last request left the queue most recently

    def enter(self, request: Request) -> None:
        """A request has come to the queue, new or preempted."""
        tenant = request.tenant
        if tenant not in self._waiting:
            own = self._served.get(tenant, 0)
            others = [self._served[other] for other in self._waiting]
            floor = min(others) if others else self._served[self._last] if self._last is not None else 0
            self._served[tenant] = max(own, floor)
        self._waiting[tenant] += 1
        if request.num_preemptions:
            insort(self._preempted, request, key=_order)
        else:
            insort(self._queues.setdefault(tenant, []), request, key=_rank)

    def leave(self, request: Request) -> None:
        """A request has left the queue, to run or for good."""
        tenant = request.tenant
        if request.num_preemptions:
            del self._preempted[bisect_left(self._preempted, _order(request), key=_order)]
        else:
            queue = self._queues[tenant]
            del queue[bisect_left(queue, _rank(request), key=_rank)]
            if not queue:
                del self._queues[tenant]
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
            self._last = tenant

    def charge(self, tenant: str, *, input_tokens: int = 0, output_tokens: int = 0) -> None:
        """So many tokens were, or are about to be, computed for the tenant."""
        self._served[tenant] += INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> int:
        return self._served.get(tenant, 0)

    def in_turn(self) -> Iterator[Request]:
        """The queue in the order of admission: the preempted, whose tenants have paid already, then fairly.

        Within a tenant the order is by priority, then arrival. What is charged between two requests counts for the
        second. Requests may leave meanwhile; those of the first call are the ones that come.
        """
        yield from self._preempted.copy()

        queues = {tenant: deque(queue) for tenant, queue in self._queues.items()}
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
        kept = [*self._preempted, *(request for queue in self._queues.values() for request in queue)]
        assert sorted(kept, key=_order) == sorted(waiting, key=_order), "a request is missing in the queue, or lost"
        assert self._waiting == Counter(request.tenant for request in kept), "a tenant's queue was miscounted"
        assert all(self._queues.values()), "a tenant without requests has a queue"
        for queue, key in ((self._preempted, _order), *((queue, _rank) for queue in self._queues.values())):
            assert queue == sorted(queue, key=key), "a queue is out of order"


def _order(request: Request) -> tuple[int, int]:
    return request.order


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.arrival
