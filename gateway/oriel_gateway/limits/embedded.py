"""The limiter of one process: it is exact, and its quotas survive a restart."""

from collections.abc import Callable, Container
from time import time

from oriel_gateway.limits.metered import MAX_ACCOUNTS, Limiter
from oriel_gateway.limits.meters import Meter, QuotaMeter, RateMeter, SlotMeter
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.bounds.limits import Bound
from oriel_policies.documents import Allowance


class EmbeddedLimiter(Limiter):
    """Limits calls by meters in this process.

    file: the file of quota counters; None keeps them in memory only.
    wall: the wall clock, in epoch seconds.
    """

    def __init__(
        self,
        *,
        file: QuotaFile | None = None,
        wall: Callable[[], float] = time,
        max_accounts: int = MAX_ACCOUNTS,
    ) -> None:
        super().__init__(max_accounts=max_accounts)
        self._clock = CalendarClock(wall)
        self._file = file or QuotaFile(None)

    def _meter(self, tenant: str, bound: Bound) -> Meter:
        if bound.slots:
            return SlotMeter(bound)
        if bound.period is None:
            return RateMeter(bound)
        return QuotaMeter(bound, tenant, self._file.window(tenant, bound), self._clock, self._file.changed)

    def _drop(self, tenant: str, meter: Meter) -> None:
        if isinstance(meter, QuotaMeter):
            self._file.keep(tenant, meter.bound, meter.window)

    @property
    def remembered(self) -> Container[tuple[str, str]]:
        """The budgets, as (tenant, name), that it knew at its start; the usage ledger has the others."""
        return self._file.budgets

    def remaining(self, tenant: str, allowance: Allowance, now: float) -> list[tuple[Bound, float, float]]:
        """See `Limiter.remaining`. The file's counters of a tenant count before its first call."""
        if (tenant, allowance.name) not in self._accounts:
            self._account(tenant, allowance, now)
        return super().remaining(tenant, allowance, now)

    async def close(self) -> None:
        await self._file.close()
