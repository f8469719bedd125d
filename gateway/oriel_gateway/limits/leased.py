"""Meters on leases: units come from a ledger that other gateways share, and are handed out here.

`balance` is what was granted and is not used yet; below zero it is what was used without having been granted, which
the next ask reports. Where this gateway's share of a limit is at least `MANY` calls per `LEASE_S`, units are leased
ahead by demand and no call waits; below that every call asks for what it needs. What lies idle for a lease goes back.

While the ledger cannot be asked (`Courier.up`), a meter admits this gateway's share by itself. Rates do that on a GCRA
of their own, which also runs along in good times, so that losing the ledger is not worth a burst.
"""

from oriel_gateway.limits.courier import TICK_S, Courier
from oriel_gateway.limits.meters import ASK
from oriel_policies.ledger import Answer, Ask
from oriel_policies.limits import Bound, state_item

__all__ = ["LEASE_S", "LeasedMeter"]

LEASE_S = 0.25
MANY = 50


class LeasedMeter:
    """What all kinds share. `Meter` for the limiter, `Reporting` for the courier."""

    __slots__ = (
        "_asking",
        "_blocked_s",
        "_blocked_units",
        "_courier",
        "_demand",
        "_last_ask_s",
        "_left",
        "_mean",
        "_next_ask_s",
        "_rate",
        "_ticked_s",
        "_used_s",
        "balance",
        "bound",
        "tenant",
    )
    kind = ""

    def __init__(self, bound: Bound, tenant: str, courier: Courier) -> None:
        self.bound = bound
        self.tenant = tenant
        self.balance = 0
        self._courier = courier
        self._asking = 0  # asks under way
        self._blocked_s = 0.0  # until then the ledger has nothing for calls of _blocked_units and more
        self._blocked_units = 0.0
        self._next_ask_s = 0.0
        self._last_ask_s = 0.0
        self._used_s = 0.0
        self._ticked_s = 0.0
        self._demand = 0  # units asked for since the last tick
        self._rate = 0.0  # the same per second, smoothed
        self._mean = 1.0  # units per call
        self._left = float(bound.limit)

    # For the limiter -------------------------------------------------------------------------------------------

    def take(self, units: int, now: float) -> float:
        self._demand += units
        self._mean += 0.1 * (units - self._mean)
        self._used_s = now
        courier = self._courier
        courier.active(self)
        if self.balance >= units and self._lasts(now):
            self.use(units, now)
            return 0.0
        if not courier.up:
            return self.alone(units, now)
        if now < self._blocked_s and units >= self._blocked_units:
            return self._wait(now)
        if now < self._next_ask_s and units <= self._mean * 2:
            return self._next_ask_s - now  # the lease was not given in full a moment ago
        return ASK

    def wait(self, units: int, now: float) -> float:
        return self._blocked_s - now if now < self._blocked_s and units >= self._blocked_units else 0.0

    def undo(self, units: int, now: float) -> None:
        self.charge(-units, now)

    def charge(self, units: int, now: float) -> None:
        self.balance -= units
        self._courier.active(self)

    def leave(self, held_s: float, now: float) -> None:
        raise AssertionError("only slots are left")

    def began(self, now: float) -> float:
        raise AssertionError("only quotas have windows")

    def left(self, now: float) -> tuple[float, float]:
        return max(0.0, self._left + self.balance), 0.0

    def state(self, now: float) -> str:
        return state_item(self.bound, *self.left(now))

    def idle(self, now: float) -> bool:
        """Whether forgetting this meter loses nothing."""
        return not self._asking and not self.balance and self._used_s < now - 2 * LEASE_S

    # For asks --------------------------------------------------------------------------------------------------

    def use(self, units: int, now: float) -> None:
        """Hand out units of the balance."""
        self.balance -= units

    def alone(self, units: int, now: float) -> float:
        """Admit by this gateway's share: 0.0 or the wait."""
        raise NotImplementedError

    def ask(self, need: int, now: float) -> Ask:
        """The question that gets `need` units, with everything there is to report; `ended` has to hear what became."""
        ask = self._ask(now)
        ask.need = need
        ask.want = need + self._wanted(now)
        if self.balance < 0 and self._may_report():
            ask.owed -= self.balance
            self.balance = 0
        self._asking += 1
        self._last_ask_s = now
        return ask

    def ended(self, ask: Ask, answer: Answer | None, now: float) -> None:
        """Take in the answer; without one, what was reported may not have arrived and is reported again."""
        self._asking -= 1
        if answer is None:
            self.balance -= int(ask.owed)
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
        """Report, refill, give back; see `Courier`."""
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

    def parting(self, now: float) -> Ask | None:
        return (
            self._return(now) if self.balance > 0 else self.ask(0, now) if self.balance or self._reports(now) else None
        )

    def quiet(self, now: float) -> bool:
        return self.idle(now) and not self._reports(now)

    def refused_s(self, answer: Answer, now: float) -> float:
        """Seconds until a call that the ledger refused would get what it needs."""
        return answer.wait_us * 1e-6

    # What differs ----------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> Ask:
        raise NotImplementedError

    def _wanted(self, now: float) -> int:
        """Units to lease beyond what calls need now; 0 where every call asks."""
        if not self._leases():
            return 0
        return max(0, min(int(self._rate * LEASE_S), self._most()) - max(0, self.balance))

    def _leases(self) -> bool:
        return self._most() >= MANY * self._mean

    def _most(self) -> int:
        """Units that may be leased at a time: this gateway's share of a lease period."""
        raise NotImplementedError

    def _return(self, now: float) -> Ask:
        ask = self._ask(now)
        ask.owed -= self.balance
        self.balance = 0
        self._asking += 1
        self._last_ask_s = now
        return ask

    def _lasts(self, now: float) -> bool:
        return True

    def _keeps_s(self) -> float:
        """How long units lie idle until they go back."""
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
