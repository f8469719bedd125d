"""What a gRPC stream holds of its limits.

Its first message has a grant like any call. A later message that names another model takes what it needs of that
model's limits (`Limiter.further`): a slot for the rest of the stream, computing by estimate. An answer says which model
it is of: its bytes count for that one, and the stream's computing counts for every model of which a message has no
answer yet, or that answers now (one that says more was at work since it last spoke). Where an answer does not say, or
names none that was asked, it may be of any: then everything counts for all that were named, or a stream could evade the
limits of one by naming another. Messages of several models under way at the same time count in full for each.
"""

from collections.abc import Collection, Iterable

from oriel_gateway.limits.grants import Grant
from oriel_gateway.limits.meters import Meter
from oriel_policies.limits import Counts

__all__ = ["StreamGrant"]

_MAX_MODELS = 256  # of one stream; what answers of further ones used counts for all


class StreamGrant:
    """One stream's meters, from its first message to its end; settle it once. Single writer: the loop.

    first: the grant of its first message, for `model`, settled with it; None if nothing limits that one.
    """

    __slots__ = ("_bytes", "_first", "_later", "_messages", "_models", "_moved_s", "_spent", "_total_us", "held")

    def __init__(self, first: Grant | None, model: str, now: float) -> None:
        self._first = first
        self._messages = 1
        self._total_us = 0
        self.held: dict[Meter, None] = {}  # slots and computing
        self._models: dict[str, dict[Meter, None]] = {}  # computing and bytes that count each of those named
        self._later: dict[Meter, tuple[float, int]] = {}  # of those held: since when, units taken
        self._spent: dict[Meter, int] = {}  # computing that was counted as it passed, in microseconds
        self._moved_s: dict[Meter | None, float] = {None: now}  # until when; None: for any
        self._bytes: dict[Meter, None] = {}
        self._named(model, first.meters if first is not None else (), now)

    def took(self, grant: Grant, model: str, now: float) -> None:
        """A later message, for this model, was let through with this."""
        self._messages += 1
        meters = list(grant.meters)
        fresh = [meter for meter in meters if meter not in self.held]
        self._named(model, meters, now)
        for meter in meters:
            units = grant.units(meter)
            if meter in fresh:
                if meter in self.held:
                    self._later[meter] = now, units
            elif meter.bound.counts is Counts.COMPUTE_US:
                meter.charge(-units, now)  # one message's worth is reserved; what has passed is counted

    def _named(self, model: str, meters: Iterable[Meter], now: float) -> None:
        of = self._models.setdefault(model, {}) if model in self._models or len(self._models) < _MAX_MODELS else {}
        for meter in meters:
            bound = meter.bound
            if bound.counts is Counts.BYTES:
                self._bytes[meter] = of[meter] = None
            elif bound.slots:
                self.held[meter] = None
            elif bound.counts is Counts.COMPUTE_US:
                self.held[meter] = of[meter] = None
                if meter not in self._spent:
                    self._spent[meter] = 0
                    self._moved_s[meter] = now

    def _of(self, models: Collection[str]) -> Iterable[Meter]:
        """The meters that count these models."""
        if len(models) == 1:
            (model,) = models
            return self._models.get(model, (*self._spent, *self._bytes))
        found: dict[Meter, None] = {}
        for model in models:
            if (of := self._models.get(model)) is None:
                return *self._spent, *self._bytes
            found |= of
        return found

    def answered(self, size_bytes: int, model: str, now: float) -> None:
        """An answer of this size passed, or part of it. model: that it names, "" if it names none."""
        for meter in self._of((model,)):
            if meter.bound.counts is Counts.BYTES:
                meter.charge(size_bytes, now)

    def asks(self, model: str, at_work: Collection[str], now: float) -> None:
        """A message for this model goes to the server. at_work: see `worked`; what is not begins now."""
        busy = set(self._of(at_work)) if at_work else ()
        for meter in self._of((model,)):
            if meter in self._spent and meter not in busy:
                self._moved_s[meter] = now
        if not at_work:
            self._moved_s[None] = now

    def worked(self, models: Collection[str], until_s: float, share: float, now: float) -> None:
        """Until then the server had something to do for these models, at this share of its pool: counted as it passes,
        so that a long stream does not outrun its quota."""
        if not models:
            return
        moved_s = self._moved_s
        self._total_us += max(0, int((until_s - moved_s[None]) * share * 1e6))
        moved_s[None] = now
        for meter in self._of(models):
            if meter in self._spent:
                us = int((until_s - moved_s[meter]) * share * 1e6)
                moved_s[meter] = now
                if us > 0:
                    self._spent[meter] += us
                    meter.charge(us, now)

    def settle(self, cost_us: int, now: float) -> None:
        """The stream is over, see `Grant.settle`: a model is charged its part of what the stream cost."""
        total = self._total_us
        due = {
            meter: (cost_us * min(us, total) // total if total else cost_us) - us for meter, us in self._spent.items()
        }
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
