"""Keeps the calls that wait for a batch, and decides when the next batch is due. Pure: the batcher acts on it.

Both batchers use it: the one of a model in the inference server, and the one of a batched function in the logic
server. `oriel_policies.waiting.queue` orders the calls, and `oriel_policies.waiting.batch` decides when a batch is
released and how many rows it may have. This module connects the two: it counts the rows that wait, and keeps the order
of arrival, because a batch may be delayed only as long as its oldest call allows.

Ownership: one writer, the loop that owns the batcher.
"""

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from oriel_policies.waiting.batch import Backlog, BatchBounds, Decision, ServiceCurve, decide
from oriel_policies.waiting.queue import SlaQueue

_SLACK = 64  # arrivals kept beyond twice the calls that wait


class Member(Protocol):
    """A call that may wait. arrived_s: monotonic seconds."""

    @property
    def arrived_s(self) -> float: ...
    @property
    def waits(self) -> bool: ...


M = TypeVar("M", bound=Member)


class BatchQueue(Generic[M]):
    """A batcher's waiting calls: their tickets, rows and arrivals.

    queue: their tickets.
    bounds, curve: as for `oriel_policies.waiting.batch.decide`.
    rows: the number of rows of all calls that wait. The batcher adds those of a call when it has pushed the call, and
    subtracts them when the call has left the queue for whatever reason. A ticket may state fewer rows than its call
    has, to count less in `rows_ahead`.
    """

    def __init__(self, queue: SlaQueue, bounds: BatchBounds, curve: ServiceCurve) -> None:
        self.queue = queue
        self.bounds = bounds
        self.curve = curve
        self.rows = 0
        self._arrivals: deque[M] = deque()  # in order of arrival; some have left the queue

    def arrived(self, member: M) -> None:
        """Note the arrival of a call that was pushed. Not needed where `max_delay_s` is 0."""
        arrivals = self._arrivals
        arrivals.append(member)
        if len(arrivals) > 2 * len(self.queue) + _SLACK:  # one that waits for long must not keep all that follow
            self._arrivals = deque(each for each in arrivals if each.waits)

    def waiting(self) -> Iterator[M]:
        """The calls that wait, by arrival; only those that `arrived` noted."""
        return (each for each in self._arrivals if each.waits)

    def decide(
        self,
        now: float,
        tightest_s: float,
        *,
        released_rows: int = 0,
        coming: tuple[int, float, float] = (0, 0.0, 0.0),
    ) -> Decision:
        """Decide whether a batch is due now, or until when to wait. At least one call waits, and none has expired.

        tightest_s: the earliest deadline of those that wait.
        released_rows: rows of batches that are due already and will be filled later.
        coming: the result of `Returns.coming`, the rows of callers that are about to return.
        """
        arrivals = self._arrivals
        while arrivals and not arrivals[0].waits:
            arrivals.popleft()
        oldest_s = arrivals[0].arrived_s if arrivals else now
        backlog = Backlog(self.rows - released_rows, oldest_s, tightest_s, self.queue.size_bytes, *coming)
        return decide(backlog, self.bounds, self.curve, now)
