"""The limiter of one process: it is exact, and its quotas survive a restart."""

from collections.abc import Callable, Container
from time import time

from oriel_gateway.limits.metered import MAX_ACCOUNTS, Limiter
from oriel_gateway.limits.meters import Meter, QuotaMeter, RateMeter, SlotMeter
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_policies.bounds.calendar import CalendarClock
from oriel_policies.bounds.limits import Bound, Window
from oriel_policies.documents import Allowance

MAX_WINDOWS = 500_000


class EmbeddedLimiter(Limiter):
    """Limits calls by meters in this process.

    file: the file of quota counters; None keeps them in memory only.
    wall: the wall clock, in epoch seconds.
    max_windows: windows of forgotten quotas that are kept in memory.
    """

    def __init__(
        self,
        *,
        file: QuotaFile | None = None,
        wall: Callable[[], float] = time,
        max_accounts: int = MAX_ACCOUNTS,
        max_windows: int = MAX_WINDOWS,
    ) -> None:
        super().__init__(max_accounts=max_accounts)
        self._clock = CalendarClock(wall)
        self._file = file
        self._max_windows = max_windows
        # windows of quotas and budgets whose meters were dropped, if no file keeps them
        self._windows: dict[tuple[str, str], Window] = {}

    def _meter(self, tenant: str, bound: Bound) -> Meter:
        if bound.slots:
            return SlotMeter(bound)
        if bound.period is None:
            return RateMeter(bound)
        if self._file is None:
            window = self._windows.pop((tenant, bound.name), None) or Window()
            return QuotaMeter(bound, tenant, window, self._clock, _forget)
        return QuotaMeter(bound, tenant, self._file.window(tenant, bound), self._clock, self._file.changed)

    def _drop(self, tenant: str, meter: Meter) -> None:
        if not isinstance(meter, QuotaMeter):
            return
        if self._file is not None:
            self._file.keep(tenant, meter.bound, meter.window)
        elif len(self._windows) < self._max_windows:
            self._windows[tenant, meter.bound.name] = meter.window

    @property
    def remembered(self) -> Container[tuple[str, str]]:
        """The budgets, as (tenant, name), that it knew at its start; the usage ledger has the others."""
        return () if self._file is None else self._file.budgets

    def left(self, tenant: str, allowance: Allowance, now: float) -> list[tuple[Bound, float, float]]:
        """See `Limiter.left`. The file's counters of a tenant count before its first call."""
        if self._file is not None and (tenant, allowance.name) not in self._accounts:
            self._account(tenant, allowance, now)
        return super().left(tenant, allowance, now)

    async def close(self) -> None:
        if self._file is not None:
            await self._file.close()


def _forget(meter: QuotaMeter) -> None:
    """Mark the meter as saved: without a file there is nothing to save."""
    meter.saved = True
