"""Admission of calls to one pool: a bounded number of permits, and the SLA queue for calls that find none free.

A permit is acquired by `acquire`, or granted to a waiting call by `next_admitted`, and released by `release`, exactly
once. A new call never overtakes waiting ones: `acquire` then refuses, and the caller has to join the `queue`. Calls of
a model that has all the permits it may have (`model_share`) are set aside in the queue.
"""

from collections import OrderedDict
from math import ceil

from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.model_share import ModelShares
from oriel_policies.waiting.queue import SlaQueue


class Charges:
    """Estimated charge per (route, tenant): exponentially weighted mean of what earlier calls cost, in seconds.

    Holds at most `max_keys`; the oldest key is dropped for a new one. A plain dict finds its oldest key by passing all
    that it has dropped, of which there are tens of thousands.
    """

    def __init__(self, *, default_s: float = 0.01, alpha: float = 0.1, max_keys: int = 65536) -> None:
        self.default_s = default_s
        self._alpha = alpha
        self._max_keys = max_keys
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()

    def estimate(self, route: str, tenant: str) -> float:
        """Seconds a call of this tenant on this route is expected to be charged."""
        return self._known.get((route, tenant), self.default_s)

    def learn(self, route: str, tenant: str, actual_s: float) -> None:
        """Update the estimate with the actual charge of a finished call."""
        key = (route, tenant)
        before = self._known.get(key)
        if before is None:
            if len(self._known) >= self._max_keys:
                self._known.popitem(last=False)
            self._known[key] = actual_s
        else:
            self._known[key] = before + self._alpha * (actual_s - before)


class Admission:
    """The permits of one pool and the queue for them. limit: number of permits; inflight: permits in use.

    Calls of model "" count for no model. now: monotonic seconds, see `SlaQueue.pop`.
    """

    def __init__(self, *, limit: int, queue: SlaQueue) -> None:
        self.limit = limit
        self.queue = queue
        self.inflight = 0
        self._mean_s = 0.0
        self._shares = ModelShares()

    def acquire(self, model: str = "", now: float = 0.0) -> bool:
        """Acquire a permit if one is free for the model and no call waits for it."""
        queue, free = self.queue, self.limit - self.inflight
        if free <= 0 or queue.items or model in queue.aside:
            return False
        if model and not self._shares.acquire(model, free, self.limit, now):
            return False
        self.inflight += 1
        return True

    def next_admitted(self, now: float = 0.0) -> Ticket | None:
        """The waiting ticket that is granted a permit now, or None."""
        queue = self.queue
        if self.inflight >= self.limit:
            return None
        for model in list(queue.aside):
            if self._shares.allows(model, self.limit - self.inflight, self.limit, now):
                queue.bring_back(model, now)
        while (ticket := queue.peek(now)) is not None:
            if not ticket.model or self._shares.acquire(ticket.model, self.limit - self.inflight, self.limit, now):
                self.inflight += 1
                return queue.pop(now)
            queue.set_aside(now)
        return None

    def release(self, took_s: float, model: str = "", now: float = 0.0) -> None:
        """Release a permit that a call of `model` had for `took_s` seconds."""
        self.inflight -= 1
        self._mean_s += 0.05 * (took_s - self._mean_s)
        if model:
            self._shares.release(model, took_s, now)

    def release_unused(self, model: str) -> None:
        """Release a permit that was not used."""
        self.inflight -= 1
        self._shares.release(model, 0.0, 0.0)

    def retry_after_s(self) -> int:
        """Whole seconds, 1 to 60, after which the queue has probably emptied."""
        return max(1, min(60, ceil((len(self.queue) + 1) * self._mean_s / max(1, self.limit))))
