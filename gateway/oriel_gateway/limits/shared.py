"""The limiter of several gateways: the same accounts, with meters on leases from one ledger."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from time import monotonic, time

from prometheus_client.core import Metric

from oriel_gateway.limits.error_text import refusal
from oriel_gateway.limits.grants import Grant
from oriel_gateway.limits.leased import LeasedMeter
from oriel_gateway.limits.leased_kinds import leased_meter
from oriel_gateway.limits.ledger import Ledger
from oriel_gateway.limits.ledger_client import BUDGET_S, DEFAULTS, LedgerClient, LedgerClientLimits
from oriel_gateway.limits.metered import MAX_ACCOUNTS, Limiter
from oriel_gateway.limits.meters import Meter
from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.bounds.ledger import Answer, Ask
from oriel_policies.bounds.limits import Amounts, Bound
from oriel_wire.engine.families import counter, gauge


class SharedLimiter(Limiter):
    """Limits calls together with other gateways.

    ledger: the counts that they share. replicas: their number until it reports it.
    """

    asks = True

    def __init__(
        self,
        ledger: Ledger,
        *,
        replicas: int = 1,
        budget_s: float = BUDGET_S,
        limits: LedgerClientLimits = DEFAULTS,
        wall: Callable[[], float] = time,
        clock: Callable[[], float] = monotonic,
        max_accounts: int = MAX_ACCOUNTS,
    ) -> None:
        super().__init__(max_accounts=max_accounts)
        self.ledger = ledger
        self.ledger_client = LedgerClient(ledger, replicas=replicas, budget_s=budget_s, limits=limits, clock=clock)
        self._calendar = CalendarClock(wall)
        self._clock = clock

    def open(self) -> None:
        """Start the heartbeat to the ledger; nothing waits for the ledger."""
        self.ledger_client.open()

    async def close(self) -> None:
        await self.ledger_client.close()

    def _meter(self, tenant: str, bound: Bound) -> Meter:
        return leased_meter(bound, tenant, self.ledger_client, self._calendar)

    def _drop(self, tenant: str, meter: Meter) -> None:
        """Keep nothing: the counts are in the ledger."""

    def _ask(self, grant: Grant, meters: Sequence[Meter], amounts: Amounts, now: float) -> None:
        grant.ready = False
        _Question(grant, meters, amounts, self.ledger_client, self._clock).send(now)


class _Question:
    """One grant that waits for the ledger, at most for its budget: then the gateway's own share decides."""

    def __init__(
        self,
        grant: Grant,
        meters: Sequence[Meter],
        amounts: Amounts,
        ledger_client: LedgerClient,
        clock: Callable[[], float],
    ) -> None:
        self._grant = grant
        self._meters = [meter for meter in meters if isinstance(meter, LeasedMeter)]
        self._amounts = amounts
        self._ledger_client = ledger_client
        self._clock = clock
        self._asks: list[Ask] = []
        self._decided = False
        self._timer: asyncio.TimerHandle | None = None

    def send(self, now: float) -> None:
        self._asks = [meter.ask(self._amounts[meter.bound.counts], now) for meter in self._meters]
        self._timer = asyncio.get_running_loop().call_later(self._ledger_client.patience_s(now), self._late)
        self._ledger_client.send(self._meters[0].tenant, self._asks, self._answered)

    def _answered(self, answers: list[Answer] | None) -> None:
        now = self._clock()
        for number, (meter, ask) in enumerate(zip(self._meters, self._asks, strict=True)):
            meter.ask_finished(ask, answers[number] if answers else None, now)
        if self._decided:
            return  # units that came too late stay on the balance, and go back if no call needs them
        if answers is None:
            self._late()
            return
        refused = [
            (meter.refused_s(answer, now), number)
            for number, (meter, answer) in enumerate(zip(self._meters, answers, strict=True))
            if answer.wait_us > 0.0
        ]
        if not self._decide():
            return
        if refused:
            wait_s, number = max(refused)
            self._refuse(self._meters[number], wait_s, now)
            return
        for meter in self._meters:
            meter.use(self._amounts[meter.bound.counts], now)
        self._grant.admit(self._meters)

    def _late(self) -> None:
        """Decide by this gateway's share, because the ledger's answer is late or lost."""
        if not self._decide():
            return
        now = self._clock()
        taken: list[LeasedMeter] = []
        for meter in self._meters:
            units = self._amounts[meter.bound.counts]
            wait_s = meter.alone(units, now)
            if wait_s > 0.0:
                for other in taken:
                    other.undo(self._amounts[other.bound.counts], now)
                self._refuse(meter, wait_s, now)
                return
            taken.append(meter)
        self._grant.admit(self._meters)

    def _decide(self) -> bool:
        """Return whether the call is still to be decided; only the first caller decides."""
        if self._decided:
            return False
        self._decided = True
        assert self._timer is not None
        self._timer.cancel()
        return not self._grant.over

    def _refuse(self, meter: LeasedMeter, wait_s: float, now: float) -> None:
        waiter = self._grant.waiter
        if waiter is not None:
            waiter.refuse(refusal(meter, wait_s, now))


def limiter_metrics(client: LedgerClient) -> Iterator[Metric]:
    """Yield the state of the connection to the ledger for Prometheus."""
    text = "1 while the limiter's ledger is asked, 0 while it is not."
    yield gauge("oriel_gateway_limiter_up", text, "", client.up)
    yield gauge("oriel_gateway_limiter_replicas", "Gateways that share the limits.", "", client.replicas)
    text = "What of every limit is left for gateways that ask, because others have fallen silent; 1 is all."
    yield gauge("oriel_gateway_limiter_rest", text, "", client.rest)
    yield counter("oriel_gateway_limiter_batches", "Batches of asks sent.", "", client.batches)
    text = "Batches that came late or not at all."
    yield counter("oriel_gateway_limiter_batches_late", text, "", client.late_batches)
