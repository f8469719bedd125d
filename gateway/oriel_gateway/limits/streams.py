"""Count what a gRPC stream uses of its limits.

The first message has a grant like any call. A later message that names another model acquires what it needs of that
model's limits (`Limiter.acquire_further`): a slot for the rest of the stream, and computing by estimate.

An answer names the model that it is of: its bytes count for that model, and the stream's computing counts for every
model that has an unanswered message or answers now (a model that sends a further answer was at work since its last
one). An answer that names no model, or one that was not asked, may be of any model: then everything counts for all
models that the stream named, or a stream could evade the limits of one by naming another. Messages of several models
under way at the same time count in full for each.
"""

from collections.abc import Collection, Iterable

from oriel_gateway.limits.grants import Grant
from oriel_gateway.limits.meters import Meter
from oriel_policies.bounds.kinds import Counts

MAX_MODELS = 256  # the most models of one stream; answers of further ones count for all


class StreamGrant:
    """One stream's meters, from its first message to its end; settle it once. Single writer: the loop.

    first: the grant of the first message, for `model`, which is settled with the stream; None if that model has no
    limit.
    """

    def __init__(self, first: Grant | None, model: str, now: float) -> None:
        self._first = first
        self._messages = 1
        self._total_us = 0
        self.held: dict[Meter, None] = {}  # slots and computing
        self._models: dict[str, dict[Meter, None]] = {}  # computing and bytes that count each named model
        # since when each meter is held, and the units acquired from it
        self._later: dict[Meter, tuple[float, int]] = {}
        self._spent: dict[Meter, int] = {}  # microseconds of computing that were counted while they passed
        # until when computing is counted; None is the key for any model
        self._moved_s: dict[Meter | None, float] = {None: now}
        self._bytes: dict[Meter, None] = {}
        self._named(model, first.meters if first is not None else (), now)

    def add_message(self, grant: Grant, model: str, now: float) -> None:
        """Add the grant of a later message for this model."""
        self._messages += 1
        meters = list(grant.meters)
        fresh = [meter for meter in meters if meter not in self.held]
        self._named(model, meters, now)
        for meter in meters:
            units = grant.units(meter)
            if meter.bound.counts is Counts.BUDGET:
                meter.charge(-units, now)  # it has only said whether something is left
            elif meter in fresh:
                if meter in self.held:
                    self._later[meter] = now, units
            elif meter.bound.counts is Counts.COMPUTE_US:
                meter.charge(-units, now)  # one message's worth is reserved, and what has passed is counted already

    def _named(self, model: str, meters: Iterable[Meter], now: float) -> None:
        of = self._models.setdefault(model, {}) if model in self._models or len(self._models) < MAX_MODELS else {}
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
        """Return the meters that count these models."""
        if len(models) == 1:
            (model,) = models
            return self._models.get(model, (*self._spent, *self._bytes))
        found: dict[Meter, None] = {}
        for model in models:
            if (of := self._models.get(model)) is None:
                return *self._spent, *self._bytes
            found |= of
        return found

    def count_answer(self, size_bytes: int, model: str, now: float) -> None:
        """Count the bytes of an answer, or of part of it. model: the one it names; "" if it names none."""
        for meter in self._of((model,)):
            if meter.bound.counts is Counts.BYTES:
                meter.charge(size_bytes, now)

    def message_sent(self, model: str, at_work: Collection[str], now: float) -> None:
        """Note that a message for this model is sent. at_work: the models with unanswered messages."""
        busy = set(self._of(at_work)) if at_work else ()
        for meter in self._of((model,)):
            if meter in self._spent and meter not in busy:
                self._moved_s[meter] = now
        if not at_work:
            self._moved_s[None] = now

    def resume(self, now: float) -> None:
        """Count no computing for the time until now: the client did not read."""
        for meter in self._moved_s:
            self._moved_s[meter] = now

    def worked(self, models: Collection[str], share: float, now: float) -> None:
        """Count what the server has computed for these models until now.

        share: this stream's share of its pool. Computing is counted as it passes, so that a long stream does not exceed
        its quota.
        """
        if not models:
            return
        moved_s = self._moved_s
        self._total_us += max(0, int((now - moved_s[None]) * share * 1e6))
        moved_s[None] = now
        for meter in self._of(models):
            if meter in self._spent:
                us = int((now - moved_s[meter]) * share * 1e6)
                moved_s[meter] = now
                if us > 0:
                    self._spent[meter] += us
                    meter.charge(us, now)

    def settle(self, cost_us: int, now: float) -> None:
        """Settle the stream: each model is charged its part of the stream's cost; see `Grant.settle`."""
        total = self._total_us
        due = {
            meter: (cost_us * min(us, total) // total if total else cost_us) - us for meter, us in self._spent.items()
        }
        if self._first is not None:
            mixed = bool(self._later)
            self._first.settle(cost_us, True, now, due, messages=0 if mixed else self._messages)
        for meter, (since_s, units) in self._later.items():
            if meter.bound.slots:
                meter.release_slot(now - since_s, now)
                continue
            units = due[meter] - units
            if units > 0 or (units and meter.began(now) <= since_s):  # the same rule as in `Grant.settle`
                meter.charge(units, now)
        self._later = {}
