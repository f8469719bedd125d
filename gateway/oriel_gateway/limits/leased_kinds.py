"""The leased meters of rates, slots and calendar windows, and what this gateway admits of each alone."""

from math import inf

from oriel_gateway.limits.leased import LEASE_S, LeasedMeter
from oriel_gateway.limits.ledger_client import LedgerClient
from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.ledger import RATE, SLOTS, WINDOW, Answer, Ask
from oriel_policies.bounds.limits import Bound, Gcra
from oriel_policies.documents import RateLimit

RENEW_S = 1.0
SLOT_WAIT_S = 0.02  # a ledger without a free slot is not asked again before this
_QUOTA_PART = 8  # at most one eighth of a quota's remaining units is leased at a time


class LeasedRate(LeasedMeter):
    """Requests or bytes per second, tokens per minute.

    spent: units that were handed out alone and are not reported yet. free: time at which a refused call gets units.
    """

    def __init__(self, bound: Bound, tenant: str, ledger_client: LedgerClient) -> None:
        super().__init__(bound, tenant, ledger_client)
        self._local = Gcra()
        self._shared: tuple[RateLimit | None, float, RateLimit] | None = None
        self._spent = 0
        self._free_s = 0.0

    def use(self, units: int, now: float) -> None:
        self.balance -= units
        share = self._share()
        self._local.charge(share, now, units)
        # The arrival never goes further than an empty bucket: one gateway may use more than its share while others do
        # not.
        self._local.arrival = min(self._local.arrival, now + share.burst / share.requests_per_s)

    def charge(self, units: int, now: float) -> None:
        super().charge(units, now)
        self._local.charge(self._share(), now, units)
        if units < 0 and not self._keeps_s():
            self.return_balance(now)

    def alone(self, units: int, now: float) -> float:
        wait_s = self._local.acquire(self._share(), now, units)
        if wait_s == 0.0:
            if self._ledger_client.up:
                # the ledger's answer is only late, perhaps because of this gateway: the units count in full
                self.balance -= units
            else:
                self._spent += units
        return wait_s

    def undo(self, units: int, now: float) -> None:
        alone = min(units, self._spent)
        self._spent -= alone
        self.balance += units - alone
        self._local.charge(self._share(), now, -units)
        self._ledger_client.activate(self)

    def droppable(self, now: float) -> bool:
        return super().droppable(now) and not self._spent and self._local.arrival <= now

    def quiet(self, now: float) -> bool:
        return super().droppable(now) and not self._spent

    def ask_finished(self, ask: Ask, answer: Answer | None, now: float) -> None:
        super().ask_finished(ask, answer, now)
        if answer is None:
            self._spent += int(ask.spent)
        elif answer.wait_us > 0.0:
            self._free_s = now + answer.wait_us * 1e-6

    def _ask(self, now: float) -> Ask:
        bound = self.bound
        assert bound.rate is not None
        rest = self._ledger_client.rest
        burst, rate = max(1.0, bound.limit * rest), bound.rate.requests_per_s * rest
        if self._leases():  # the burst must be as large as what arrives between two asks
            burst = max(burst, rate * LEASE_S)
        ask = Ask(key=bound.name, kind=RATE, limit=burst, step=1e6 / rate, spent=self._spent)
        self._spent = 0
        return ask

    def _most(self) -> int:
        assert self.bound.rate is not None
        return int(self.bound.rate.requests_per_s * LEASE_S / self._ledger_client.replicas)

    def _reports(self, now: float) -> bool:
        return self._spent > 0

    def _block(self, wait_s: float) -> float:
        # Most of the tokens that calls reserve are given back, perhaps by another gateway: ask again soon.
        return min(wait_s, RENEW_S) if self.bound.counts is Counts.TOKENS else wait_s

    def _keeps_s(self) -> float:
        return 0.0 if self.bound.counts is Counts.TOKENS and not self._leases() else LEASE_S

    def _wait(self, now: float) -> float:
        return max(self._free_s, self._blocked_s) - now

    def _share(self) -> RateLimit:
        rate, share = self.bound.rate, self._ledger_client.share
        known = self._shared
        if known is not None and known[0] is rate and known[1] == share:
            return known[2]
        assert rate is not None
        alone = RateLimit(requests_per_s=rate.requests_per_s * share, burst=max(1, int(rate.burst * share)))
        self._shared = (rate, share, alone)
        return alone


class LeasedSlots(LeasedMeter):
    """Concurrent calls. The ledger's count for this gateway is always `inflight + balance`."""

    def __init__(self, bound: Bound, tenant: str, ledger_client: LedgerClient) -> None:
        super().__init__(bound, tenant, ledger_client)
        self.inflight = 0
        self._hold_s = 0.0
        self._unsure = False  # True after an answer was lost: the ledger's count is unknown

    def use(self, units: int, now: float) -> None:
        self.balance -= units
        self.inflight += units

    def alone(self, units: int, now: float) -> float:
        if self.inflight >= max(1, int(self.bound.limit * self._ledger_client.share)):
            return self._wait(now)
        self.use(units, now)
        return 0.0

    def undo(self, units: int, now: float) -> None:
        self.balance += units
        self.inflight -= units
        self._ledger_client.activate(self)

    def release_slot(self, took_s: float, now: float) -> None:
        self.undo(1, now)
        self._hold_s += (0.1 if self._hold_s else 1.0) * (took_s - self._hold_s)
        if not self._leases():
            self.return_balance(now)

    def droppable(self, now: float) -> bool:
        return super().droppable(now) and not self.inflight

    def _ask(self, now: float) -> Ask:
        return Ask(
            key=self.bound.name,
            kind=SLOTS,
            limit=max(1, int(self.bound.limit * self._ledger_client.rest + 1e-6)),
            step=0.0,
            number=-1 if self._asking else 0,
            used=self.inflight + self.balance,
        )

    def _most(self) -> int:
        return self.bound.limit // (4 * self._ledger_client.replicas)

    def _reports(self, now: float) -> bool:
        return self._unsure or (self.inflight + self.balance > 0 and now >= self._last_ask_s + RENEW_S)

    def _keeps_s(self) -> float:
        return LEASE_S if self._leases() else 0.0

    def _block(self, wait_s: float) -> float:
        return SLOT_WAIT_S

    def _wait(self, now: float) -> float:
        return max(self._hold_s / self.bound.limit, 1e-3)

    def refused_s(self, answer: Answer, now: float) -> float:
        return self._wait(now)

    def ask_finished(self, ask: Ask, answer: Answer | None, now: float) -> None:
        limit = self.bound.limit
        # An ask that was overtaken brings the ledger an old count, and the ledger grants what is taken already. Beyond
        # the limit no grant is accepted, and the ledger soon gets the true count.
        if answer is not None and ask.need and self.inflight >= limit:
            answer.wait_us = max(answer.wait_us, 1.0)
        super().ask_finished(ask, answer, now)
        self._unsure = answer is None or (self._unsure and ask.number < 0)
        if self.balance > 0 and self.inflight + self.balance > limit:
            self.balance = max(0, limit - self.inflight)
            self._unsure = True


class LeasedQuota(LeasedMeter):
    """Requests or computing of a calendar window, whose bounds the ledger's clock decides."""

    def __init__(self, bound: Bound, tenant: str, ledger_client: LedgerClient, clock: CalendarClock) -> None:
        super().__init__(bound, tenant, ledger_client)
        self._clock = clock
        self._ends_s: float | None = None  # monotonic end of the ledger's window
        self._number = -1
        self._born = 0
        self._seen = 0.0  # units used according to the ledger's latest answer
        self._alone = 0  # units admitted alone since then
        self._least = 0  # units that were used before the ledger counted any; see `Meter.at_least`

    def at_least(self, units: int, now: float) -> None:
        self._least = units
        self._ledger_client.activate(self)

    def alone(self, units: int, now: float) -> float:
        bound = self.bound
        assert bound.period is not None
        self._lasts(now)
        if self._ends_s is None:
            self._ends_s = now + self._clock.ends_in(bound.period, now)
        most = max(1.0, (bound.limit - self._seen) * self._ledger_client.share) if self._seen < bound.limit else 0.0
        if self._alone + min(units, most) > most or most <= 0.0:
            return max(1e-3, self._ends_s - now)
        self._alone += units
        self.balance -= units
        return 0.0

    def undo(self, units: int, now: float) -> None:
        self._alone -= min(units, self._alone)
        super().undo(units, now)

    def _lasts(self, now: float) -> bool:
        """Return whether the window of the balance is still the present one; if not, all counts begin anew."""
        if self._ends_s is None or now < self._ends_s:
            return True
        assert self.bound.period is not None
        self._ends_s = now + self._clock.ends_in(self.bound.period, now)
        self._seen, self._alone, self.balance, self._number = 0.0, 0, 0, -1
        return False

    def _may_report(self) -> bool:
        return self._number >= 0  # before the first answer, the ledger's window is unknown

    def droppable(self, now: float) -> bool:
        return super().droppable(now) and (self._ends_s is None or self._ledger_client.up)

    def quiet(self, now: float) -> bool:
        return super().droppable(now)

    def began(self, now: float) -> float:
        period = self.bound.period
        assert period is not None
        return 0.0 if self._ends_s is None else self._ends_s - self._clock.length(period, now)

    def remaining(self, now: float) -> tuple[float, float]:
        return max(0.0, self._left + self.balance), max(0.0, (self._ends_s or now) - now)

    def _ask(self, now: float) -> Ask:
        bound = self.bound
        assert bound.period is not None
        step = 0.0 if bound.period == "day" else 1.0
        return Ask(
            key=bound.name,
            kind=WINDOW,
            limit=bound.limit,
            step=step,
            number=self._number,
            born=self._born,
            used=self._seen,
        )

    def _most(self) -> int:
        return int(max(0.0, self._left) / (_QUOTA_PART * self._ledger_client.replicas))

    def _reports(self, now: float) -> bool:
        return self._least > 0

    def _learned(self, answer: Answer, now: float) -> None:
        self._number, self._born, self._seen = answer.number, answer.born, answer.used
        if self._least > answer.used and now < (self._ends_s or inf):
            self._seen, self._born = self._least, 0  # as after a flush: of several reports the ledger takes the largest
        else:
            self._least = 0
        self._ends_s = now + answer.ends_us * 1e-6
        if not self._asking:
            self._alone = 0


def leased_meter(bound: Bound, tenant: str, ledger_client: LedgerClient, clock: CalendarClock) -> LeasedMeter:
    """Build the meter for a bound."""
    if bound.slots:
        return LeasedSlots(bound, tenant, ledger_client)
    if bound.period is None:
        return LeasedRate(bound, tenant, ledger_client)
    return LeasedQuota(bound, tenant, ledger_client, clock)
