"""The spending of tenants on their budgets: counted with the other use of a batch of calls, checked by the limiter.

A call is admitted while something is left (`limits`). Its use is known when it has ended, and is charged with its
batch, at least once a second: a budget is exceeded by what is used until then, and by the calls under way.
"""

import logging
from collections.abc import Callable, Container, Iterable
from time import monotonic
from typing import Any, NamedTuple

from oriel_gateway.limits import Limiter
from oriel_gateway.limits.error_text import shown
from oriel_policies.bounds.calendar import Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Bound
from oriel_policies.documents import Snapshot, Tenant
from oriel_policies.metering.budgets import Use, spent
from oriel_wire.usage.lines import UsageLine

__all__ = ["MAX_SHOWN", "Fill", "Spending"]

_log = logging.getLogger(__name__)
MAX_SHOWN = 50  # budgets, and token limits, in metrics: those of which the largest share is spent
MAX_KNOWN = 500  # tenants among which these are looked for


class Fill(NamedTuple):
    """How much of one budget, or of the burst of one token limit, is spent: a share of it, which may be above 1."""

    tenant: str
    budget: str
    ratio: float
    warn: float = 1.0
    stop: bool = True


class Spending:
    """Single writer: the gateway's loop. snapshot: the documents in force."""

    def __init__(self, limiter: Limiter, snapshot: Snapshot) -> None:
        self._limiter = limiter
        self.snapshot = snapshot
        # the tenants that have spent the most, by the largest share of one of their budgets
        self._fullest: dict[str, float] = {}
        self._most_tokens: dict[str, float] = {}  # the same of token limits
        self._reported: dict[tuple[str, str], int] = {}  # 1: a warning was logged, 2: that it is spent

    def add(self, tenant: Tenant, use: Use, day: str) -> None:
        """Charge what a tenant has used to its budgets. day: on which it was used, as "2026-11-24"."""
        tenant = self.snapshot.tenants.get(tenant.name, tenant)  # its call may be older than the documents
        self._charge(tenant, use, day, (Period.DAY, Period.MONTH))
        self._report(tenant)

    def read_ledger(self, lines: Iterable[UsageLine], day: str, known: Container[tuple[str, str]] = ()) -> None:
        """Charge what the usage ledger says of this month.

        day: today. known: the budgets, as (tenant, name), of which the limiter knows already what was spent.
        """
        for line in lines:
            if line.kind != "seen" or line.minute[:7] != day[:7]:
                continue
            tenant = self.snapshot.tenants.get(line.tenant)
            if tenant is None or not tenant.budgets:
                continue
            use = Use(
                tier=line.tier,
                device_ns={line.device_class: line.device_ns},
                cpu_ns=line.cpu_ns,
                bytes_out=line.bytes_out,
                tokens_in=line.tokens_in,
                tokens_out=line.tokens_out,
            )
            periods = (Period.DAY, Period.MONTH) if line.minute[:10] == day else (Period.MONTH,)
            self._charge(tenant, use, line.minute[:10], periods, known)
            self._report(tenant)

    def of(self, tenant: Tenant) -> list[dict[str, Any]]:
        """Return the budgets of a tenant, as `GET /v1/usage` shows them."""
        return [shown(*bound) for bound in self._bounds(tenant)]

    def fills(self) -> list[Fill]:
        """Return the fullest budgets, the fullest first."""
        return self._most(self._fullest, self._fills)

    def used_tokens(self, tenant: Tenant) -> None:
        """Note that a tenant has used tokens, which may be limited."""
        tenant = self.snapshot.tenants.get(tenant.name, tenant)
        if found := self._tokens(tenant):
            _note(self._most_tokens, tenant.name, max(each.ratio for each in found))

    def tokens(self) -> list[Fill]:
        """Return the token limits of which the most is used, the fullest first."""
        return self._most(self._most_tokens, self._tokens)

    def _most(self, known: dict[str, float], read: Callable[[Tenant], list[Fill]]) -> list[Fill]:
        """Return the values of `read` for the known tenants, the fullest first; forget tenants without a value."""
        found: list[Fill] = []
        for name in list(known):
            tenant = self.snapshot.tenants.get(name)
            fills = [] if tenant is None else read(tenant)
            if not fills:
                del known[name]
                continue
            known[name] = max(fill.ratio for fill in fills)
            found += fills
        return sorted(found, key=lambda fill: -fill.ratio)[:MAX_SHOWN]

    def _tokens(self, tenant: Tenant) -> list[Fill]:
        now = monotonic()
        return [
            Fill(tenant.name, bound.name, 1.0 - left / bound.limit)
            for allowance in tenant.allowances
            if allowance.counts_tokens
            for bound, left, _ in self._limiter.remaining(tenant.name, allowance, now)
            if bound.counts is Counts.TOKENS
        ]

    def _charge(
        self, tenant: Tenant, use: Use, day: str, periods: tuple[Period, ...], known: Container[tuple[str, str]] = ()
    ) -> None:
        prices = self.snapshot.prices.values()
        units = {
            budget.name: spent(budget.unit, use, prices, day)
            for budget in tenant.budgets
            if budget.period in periods and (tenant.name, budget.name) not in known
        }
        self._limiter.spend(tenant, units, monotonic())

    def _bounds(self, tenant: Tenant) -> list[tuple[Bound, float, float]]:
        now = monotonic()
        return [
            bound
            for allowance in tenant.allowances
            if allowance.budgets
            for bound in self._limiter.remaining(tenant.name, allowance, now)
        ]

    def _fills(self, tenant: Tenant) -> list[Fill]:
        return [
            Fill(tenant.name, bound.name, 1.0 - left / bound.limit, bound.budget.warn, bound.budget.stop)
            for bound, left, _ in self._bounds(tenant)
            if bound.budget is not None
        ]

    def _report(self, tenant: Tenant) -> None:
        """Log once in a period that a warning is due, and that a budget is spent."""
        fills = self._fills(tenant)
        if not fills:
            return
        _note(self._fullest, tenant.name, max(fill.ratio for fill in fills))
        for fill in fills:
            key = (fill.tenant, fill.budget)
            level = 2 if fill.ratio >= 1.0 else 1 if fill.ratio >= fill.warn else 0
            if level > self._reported.get(key, 0):
                what = "is spent" if level == 2 else f"is spent to {fill.ratio:.0%}"
                refused = ": its calls are refused" if level == 2 and fill.stop else ""
                _log.warning("tenant %s: %s %s%s", fill.tenant, fill.budget, what, refused)
            if level:
                self._reported[key] = level
            else:
                self._reported.pop(key, None)


def _note(shares: dict[str, float], tenant: str, share: float) -> None:
    """Note the share that a tenant has used of something; of too many tenants the one with the smallest goes."""
    shares[tenant] = share
    if len(shares) > MAX_KNOWN:
        del shares[min(shares, key=shares.__getitem__)]
