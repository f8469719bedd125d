"""Meters on leases: they hand out units that come from a ledger which several gateways share.

`balance` is what was granted and is not used yet; below zero it is what was used without a grant, which the next ask
reports. If this gateway's share of a limit is at least `MANY` calls per `LEASE_S`, units are leased ahead by demand
and no call waits; below that every call asks for what it needs. Units that are idle for a lease go back.

While the ledger cannot be asked (`LedgerClient.up`), a meter admits this gateway's share by itself. Rates use a GCRA of
their own for that, which also runs while the ledger answers: losing the ledger must not allow another burst.
"""

from abc import abstractmethod

from oriel_gateway.limits.ledger_client import TICK_S, LedgerClient
from oriel_gateway.limits.meters import ASK, Meter
from oriel_policies.bounds.ledger import Answer, Ask
from oriel_policies.bounds.limits import Bound

LEASE_S = 0.25
MANY = 50


class LeasedMeter(Meter):
    """The common part of all leased meters: a `Meter` that is also a `Reporting` for the ledger client."""

    def __init__(self, bound: Bound, tenant: str, ledger_client: LedgerClient) -> None:
        super().__init__(bound)
        self.tenant = tenant
        self.balance = 0
        self._ledger_client = ledger_client
        self._asking = 0  # number of asks under way
        self._blocked_s = 0.0  # until this time the ledger has nothing for calls of _blocked_units or more
        self._blocked_units = 0.0
        self._next_ask_s = 0.0
        self._last_ask_s = 0.0
        self._used_s = 0.0
        self._ticked_s = 0.0
        self._demand = 0  # units that calls wanted since the last tick
        self._rate = 0.0  # the smoothed demand per second
        self._mean = 1.0  # the mean units per call
        self._left = float(bound.limit)

    # Methods for the limiter -----------------------------------------------------------------------------------

    def acquire(self, units: int, now: float) -> float:
        self._demand += units
        self._mean += 0.1 * (units - self._mean)
        self._used_s = now
        ledger_client = self._ledger_client
        ledger_client.activate(self)
        if self.balance >= units and self._lasts(now):
            self.use(units, now)
            return 0.0
        if not ledger_client.up:
            return self.alone(units, now)
        if now < self._blocked_s and units >= self._blocked_units:
            return self._wait(now)
        if now < self._next_ask_s and units <= self._mean * 2:
            return self._next_ask_s - now  # the lease was not granted in full a moment ago
        return ASK

    def charge(self, units: int, now: float) -> None:
        self.balance -= units
        if units < 0:
            self._blocked_s = 0.0  # the units that came back may be enough for a waiting call
        self._ledger_client.activate(self)

    def return_balance(self, now: float) -> None:
        """Give what is not used back to the ledger at once, where it is not leased ahead of need."""
        if self.balance > 0 and not self._asking and self._ledger_client.up:
            ask = self._return(now)
            self._ledger_client.send(
                self.tenant, [ask], lambda got: self.ask_finished(ask, got[0] if got else None, now)
            )

    def remaining(self, now: float) -> tuple[float, float]:
        return max(0.0, self._left + self.balance), 0.0

    def droppable(self, now: float) -> bool:
        return not self._asking and not self.balance and self._used_s < now - 2 * LEASE_S

    # Methods for asks ------------------------------------------------------------------------------------------

    def use(self, units: int, now: float) -> None:
        """Hand out units of the balance."""
        self.balance -= units

    @abstractmethod
    def alone(self, units: int, now: float) -> float:
        """Admit units by this gateway's share alone. Returns 0.0, or the seconds to wait."""

    def ask(self, need: int, now: float) -> Ask:
        """Build the ask for `need` units with everything there is to report. Pass its outcome to `ask_finished`."""
        ask = self._ask(now)
        ask.need = need
        ask.want = need + self._wanted(now)
        if self.balance < 0 and self._may_report():
            ask.debt -= self.balance
            self.balance = 0
        self._asking += 1
        self._last_ask_s = now
        return ask

    def ask_finished(self, ask: Ask, answer: Answer | None, now: float) -> None:
        """Take in the answer to an ask. answer: the answer; None if it was lost, then the ask's report is repeated."""
        self._asking -= 1
        if answer is None:
            self.balance -= int(ask.debt)
            return
        self.balance += int(answer.granted)
        self._left = answer.left
        if answer.wait_us > 0.0:
            self._blocked_s = now + self._block(answer.wait_us * 1e-6)
            self._blocked_units = ask.need
        elif ask.want > answer.granted and ask.want > ask.need:
            self._next_ask_s = now + TICK_S
        self._learned(answer, now)

    def tick(self, now: float) -> Ask | None:
        """Return an ask that reports, refills or gives back; see `Reporting.tick`."""
        passed_s = min(1.0, max(1e-3, now - self._ticked_s))
        self._ticked_s = now
        self._rate += 0.5 * (self._demand / passed_s - self._rate)
        self._demand = 0
        if self._asking:
            return None
        if self.balance > 0 and self._used_s < now - self._keeps_s():
            return self._return(now)
        if (
            self.balance < 0
            or self._reports(now)
            or (now >= self._next_ask_s and self._wanted(now) > self.balance // 2)
        ):
            return self.ask(0, now)
        return None

    def final_ask(self, now: float) -> Ask | None:
        return (
            self._return(now) if self.balance > 0 else self.ask(0, now) if self.balance or self._reports(now) else None
        )

    def quiet(self, now: float) -> bool:
        return self.droppable(now) and not self._reports(now)

    def refused_s(self, answer: Answer, now: float) -> float:
        """Return the seconds until a call that the ledger refused would get what it needs."""
        return answer.wait_us * 1e-6

    # Methods that differ between the kinds ---------------------------------------------------------------------

    @abstractmethod
    def _ask(self, now: float) -> Ask:
        """Build an ask that reports what this kind reports in each."""

    def _wanted(self, now: float) -> int:
        """Return the units to lease beyond what calls need now; 0 where every call asks."""
        if not self._leases():
            return 0
        return max(0, min(int(self._rate * LEASE_S), self._most()) - max(0, self.balance))

    def _leases(self) -> bool:
        return self._most() >= MANY * self._mean

    @abstractmethod
    def _most(self) -> int:
        """Return the most units that may be leased at a time: this gateway's share of a lease period."""

    def _return(self, now: float) -> Ask:
        ask = self._ask(now)
        ask.debt -= self.balance
        self.balance = 0
        self._asking += 1
        self._last_ask_s = now
        return ask

    def _lasts(self, now: float) -> bool:
        return True

    def _keeps_s(self) -> float:
        """Return the seconds after which idle units go back."""
        return LEASE_S

    def _may_report(self) -> bool:
        return True

    def _reports(self, now: float) -> bool:
        return False

    def _block(self, wait_s: float) -> float:
        return wait_s

    def _wait(self, now: float) -> float:
        return self._blocked_s - now

    def _learned(self, answer: Answer, now: float) -> None:
        pass
