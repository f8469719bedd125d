"""What a gRPC stream holds of its limits.

Its first message has a grant like any call. A later message that names another model takes what it needs of that
model's limits (`Limiter.further`): a slot for the rest of the stream, computing by estimate. From then on the stream's
computing and the bytes of its answers count for that model too. Which of several models a server works for cannot be
told from outside (answers may come in any order, and several for one message), and dividing them by a guess would let
cheap messages pay for dear ones. A stream of one model is counted exactly.
"""

from oriel_gateway.limits.grants import Grant
from oriel_gateway.limits.meters import Meter
from oriel_policies.limits import Counts

__all__ = ["StreamGrant"]


class StreamGrant:
    """One stream's meters, from its first message to its end; settle it once. Single writer: the loop.

    first: the grant of its first message, settled with it; None if nothing limits that one.
    """

    __slots__ = ("_bytes", "_first", "_later", "_messages", "_moved_s", "_spent", "_total_us", "held")

    def __init__(self, first: Grant | None, now: float) -> None:
        self._first = first
        self._messages = 1
        self._moved_s = now
        self._total_us = 0
        self.held: dict[Meter, None] = {}  # slots and computing
        self._later: dict[Meter, tuple[float, int]] = {}  # of them: since when, units taken
        self._spent: dict[Meter, int] = {}  # computing that was counted as it passed, in microseconds
        self._bytes: dict[Meter, None] = {}
        if first is not None:
            for meter in first.meters:
                self._hold(meter)

    def took(self, grant: Grant, now: float) -> None:
        """A later message was let through with this."""
        self._messages += 1
        for meter in grant.meters:
            units = grant.units(meter)
            if meter in self.held:
                if meter.bound.counts is Counts.COMPUTE_US:
                    meter.charge(-units, now)  # one message's worth is reserved; what has passed is counted
                continue
            self._hold(meter)
            if meter in self.held:
                self._later[meter] = now, units

    def _hold(self, meter: Meter) -> None:
        bound = meter.bound
        if bound.counts is Counts.BYTES:
            self._bytes[meter] = None
        elif bound.slots:
            self.held[meter] = None
        elif bound.counts is Counts.COMPUTE_US:
            self.held[meter] = None
            self._spent[meter] = 0

    def answered(self, size_bytes: int, now: float) -> None:
        """An answer of this size passed."""
        for meter in self._bytes:
            meter.charge(size_bytes, now)

    def worked(self, until_s: float, share: float, now: float) -> None:
        """Until then, 0.0 for not at all, the server had something to do, at this share of its pool: counted as it
        passes, so that a long stream does not outrun its quota."""
        us = int((until_s - self._moved_s) * share * 1e6)
        self._moved_s = now
        if us > 0:
            self._total_us += us
            for meter in self._spent:
                self._spent[meter] += us
                meter.charge(us, now)

    def settle(self, cost_us: int, now: float) -> None:
        """The stream is over, see `Grant.settle`: a model is charged what it cost since it was first named."""
        total = self._total_us
        due = {meter: (cost_us * us // total if total else cost_us) - us for meter, us in self._spent.items()}
        if self._first is not None:
            mixed = bool(self._later)
            self._first.settle(cost_us, True, now, due, messages=0 if mixed else self._messages)
        for meter, (since_s, units) in self._later.items():
            if meter.bound.slots:
                meter.leave(now - since_s, now)
                continue
            units = due[meter] - units
            if units > 0 or (units and meter.began(now) <= since_s):  # as for a grant
                meter.charge(units, now)
        self._later = {}
