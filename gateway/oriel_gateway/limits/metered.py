"""A limiter made of meters: every allowance that fits a call has an account, and every bound of it a meter.

The subclass that makes the meters decides if they count in this process or in a shared ledger.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from time import monotonic
from typing import NamedTuple

from oriel_gateway.errors import Refused
from oriel_gateway.limits.error_text import refusal
from oriel_gateway.limits.grants import Grant, Terms
from oriel_gateway.limits.meters import ASK, Meter
from oriel_gateway.routing.targets import Target
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import Amounts, Bound, bounds, bounds_of
from oriel_policies.bounds.tokens import USUAL_TOKENS
from oriel_policies.documents import Allowance, Limit, Tenant
from oriel_policies.metering.budgets import Budget
from oriel_policies.waiting.admission import Charges

MAX_ACCOUNTS = 200_000
_CHECKED = 4  # once there are many accounts, this many old ones are checked for each new one
_MANY = 10_000
_ONE: Amounts = (1, 0, 0, 0, 1)
# the terms of a stream's further message: its answer has no headers that could show them
_FURTHER = Terms("", bytes=False, settles=True)


@dataclass(frozen=True, slots=True)
class _Plan:
    """The facts that follow from the numbers of an allowance. Thousands of tenants share them.

    even: True if every bound counts any call as 1. later: the bounds that no call has to be admitted by at
    its head: of tokens, and budgets that stop nothing.
    """

    bounds: tuple[Bound, ...]
    later: tuple[Bound, ...]
    terms: Terms
    token_terms: Terms
    compute: bool
    even: bool


@dataclass(slots=True, eq=False, repr=False)
class _Account:
    """One tenant's account of an allowance. Its meters outlive a reload of the documents, so that it forgives nothing.

    meters: the meters that count every call at its head. later: the others; see `_Plan`.
    retired: meters whose bounds the documents do not have now; the next documents may have them again.
    """

    allowance: Allowance
    plan: _Plan
    meters: tuple[Meter, ...]
    later: tuple[Meter, ...]
    retired: tuple[Meter, ...]

    def all_meters(self) -> tuple[Meter, ...]:
        """Return every meter, also those that count nothing now."""
        return (*self.meters, *self.later, *self.retired)


@lru_cache(maxsize=4096)
def _plan(name: str, limits: tuple[Limit, ...], budgets: tuple[Budget, ...]) -> _Plan:
    every = bounds_of(name, limits, budgets)
    found = tuple(bound for bound in every if _at_head(bound))
    later = tuple(bound for bound in every if not _at_head(bound))
    return _Plan(
        found,
        later,
        Terms.of(found),
        Terms.of([bound for bound in later if bound.counts is Counts.TOKENS]),
        any(bound.counts is Counts.COMPUTE_US for bound in found),
        all(bound.counts is Counts.REQUESTS for bound in found),
    )


def _at_head(bound: Bound) -> bool:
    return bound.counts is not Counts.TOKENS and (bound.budget is None or bound.budget.stop)


@lru_cache(maxsize=4096)
def _together(all_terms: tuple[Terms, ...]) -> Terms:
    """Return the terms of a call that several allowances count."""
    return Terms(
        ", ".join([terms.policies for terms in all_terms if terms.policies]),
        bytes=any(terms.bytes for terms in all_terms),
        settles=any(terms.settles for terms in all_terms),
    )


class _Acquired(NamedTuple):
    """The result of asking meters for a call. counted: the meters that have counted it. undecided: the meters whose
    ledger has to be asked. over: the meters that refuse it, with the seconds to wait; then none has counted it.
    """

    counted: list[Meter]
    undecided: list[Meter]
    over: list[tuple[float, Meter]]


def _acquired(meters: Sequence[Meter], amounts: Amounts, now: float) -> _Acquired:
    """Acquire a call's units from all meters, or from none."""
    found = _Acquired([], [], [])
    for meter in meters:
        wait_s = meter.acquire(amounts[meter.bound.counts], now)
        if wait_s == 0.0:
            found.counted.append(meter)
        elif wait_s == ASK:
            found.undecided.append(meter)
        else:
            found.over.append((wait_s, meter))
    if found.over:
        for meter in found.counted:
            meter.undo(amounts[meter.bound.counts], now)
    return found


def _refusal(over: Sequence[tuple[float, Meter]], now: float) -> Refused:
    """Return the refusal by the longest wait: after a shorter one the call would be refused again."""
    wait_s, meter = max(over, key=itemgetter(0))
    return refusal(meter, wait_s, now)


class Limiter(ABC):
    """Counts calls against the allowances of their tenants, by accounts of meters. Single writer: the loop.

    asks: True if its meters may have to ask a ledger.
    used_before: returns what a tenant has used of a budget in its period before there was a meter for it: a new budget
    begins with it.
    """

    asks = False

    def __init__(self, *, max_accounts: int = MAX_ACCOUNTS) -> None:
        self._max_accounts = max_accounts
        self.used_before: Callable[[str, Budget], int] = lambda tenant, budget: 0
        self._accounts: OrderedDict[tuple[str, str], _Account] = OrderedDict()  # the oldest first
        self._charges = Charges()
        self._answers = Charges(default_s=USUAL_TOKENS)  # expected tokens of answers

    @property
    def accounts(self) -> int:
        """The number of accounts that are remembered."""
        return len(self._accounts)

    def acquire(self, tenant: Tenant, target: Target, size_bytes: int, now: float) -> Grant | None:
        """Count a call at the monotonic time `now`. Returns None if there is nothing to settle.

        size_bytes: the announced size of the body; 0 if it was not announced.
        Raises Refused RATE_LIMITED, CONCURRENCY_LIMITED or QUOTA_EXCEEDED with the true wait; then no allowance has
        counted anything.
        """
        allowances = target.allowances
        if not allowances:
            return None
        name, first = tenant.name, allowances[0]
        account = self._accounts.get((name, first.name))
        if account is None or account.allowance is not first:
            account = self._account(name, first, now)
        plan = account.plan
        if plan.even and len(allowances) == 1 and not self.asks:
            # The same as below, but faster, for the most frequent kind of limits.
            meters, counted = account.meters, 0
            for meter in meters:
                if (wait_s := meter.acquire(1, now)) > 0.0:
                    if len(meters) == 1:
                        raise refusal(meter, wait_s, now)
                    break
                counted += 1
            else:
                return Grant(self.learn, meters, _ONE, plan.terms, name, target.route, now)
            for meter in meters[:counted]:
                meter.undo(1, now)
        accounts = [self._account(name, allowance, now) for allowance in allowances]
        amounts = self._amounts(accounts, target, name, size_bytes)
        found = _acquired([meter for each in accounts for meter in each.meters], amounts, now)
        if found.over:
            raise _refusal(found.over, now)
        terms = _together(tuple([each.plan.terms for each in accounts]))
        grant = Grant(self.learn, found.counted, amounts, terms, name, target.route, now)
        if found.undecided:
            self._ask(grant, found.undecided, amounts, now)
        return grant

    def reserve_tokens(self, grant: Grant, tenant: Tenant, target: Target, units: int, now: float) -> None:
        """Reserve tokens for a call that `acquire` has counted, when its body is known.

        The grant may not be ready afterwards. Raises Refused TOKENS_LIMITED with the true wait; the grant stays as it
        was.
        """
        accounts = [self._account(tenant.name, allowance, now) for allowance in target.allowances]
        meters = [meter for each in accounts for meter in each.later if meter.bound.counts is Counts.TOKENS]
        found = _acquired(meters, (0, 0, 0, units, 0), now)
        if found.over:
            raise _refusal(found.over, now)
        terms = _together((grant.terms, *[each.plan.token_terms for each in accounts]))
        amounts = grant.add_tokens(found.counted, units, terms)
        if found.undecided:
            self._ask(grant, found.undecided, amounts, now)

    def spend(self, tenant: Tenant, units: Mapping[str, int], now: float) -> None:
        """Count units that a tenant has used, even beyond its budgets. units: maps a budget's name to the amount."""
        for allowance in tenant.allowances:
            if not allowance.budgets:
                continue
            account = self._account(tenant.name, allowance, now)
            for meter in (*account.meters, *account.later):
                if used := units.get(meter.bound.name):
                    meter.charge(used, now)

    def usual_tokens(self, tenant: Tenant, target: Target) -> float:
        """Return the tokens of an answer to this tenant on this target, by its earlier ones."""
        return self._answers.estimate(target.route, tenant.name)

    def learn_tokens(self, tenant: Tenant, target: Target, answer: int) -> None:
        """Note how many tokens an answer had."""
        self._answers.learn(target.route, tenant.name, float(answer))

    def acquire_further(
        self, tenant: Tenant, target: Target, size_bytes: int, now: float, held: Container[Meter]
    ) -> Grant | float:
        """Count a further message of a stream: one more request, perhaps of another model.

        held: the meters of which the stream has a slot.
        Returns the seconds until the message would be within its rates, if nothing was counted; or a grant. The waiter
        of a grant that is not ready is called later. A ready one goes to `StreamGrant.add_message` and is not settled.
        Raises Refused CONCURRENCY_LIMITED or QUOTA_EXCEEDED.
        """
        accounts = [self._account(tenant.name, allowance, now) for allowance in target.allowances]
        amounts = self._amounts(accounts, target, tenant.name, size_bytes)
        meters = [each for account in accounts for each in account.meters if not (each.bound.slots and each in held)]
        found = _acquired(meters, amounts, now)
        if final := [each for each in found.over if each[1].bound.rate is None]:
            raise _refusal(final, now)
        if found.over:
            return max(wait_s for wait_s, _ in found.over)
        grant = Grant(self.learn, found.counted, amounts, _FURTHER, tenant.name, target.route, now)
        if found.undecided:
            self._ask(grant, found.undecided, amounts, now)
        return grant

    def _amounts(self, accounts: Sequence[_Account], target: Target, tenant: str, size_bytes: int) -> Amounts:
        """Return the amounts to count for a call when only its head is known. Computing time, if a limit counts it, is
        estimated from earlier calls.
        """
        compute_us = 0
        if any(each.plan.compute for each in accounts):
            compute_us = max(1, int(self._charges.estimate(target.route, tenant) * 1e6))
        return 1, size_bytes, compute_us, 0, 1

    def remaining(self, tenant: str, allowance: Allowance, now: float) -> list[tuple[Bound, float, float]]:
        """Return each bound of an allowance with the units left, and the seconds until there are more, for people to
        read. A limit that nobody has used yet is whole.
        """
        account = self._accounts.get((tenant, allowance.name))
        if account is None:
            return [(bound, float(bound.limit), 0.0) for bound in bounds(allowance)]
        return [(meter.bound, *meter.remaining(now)) for meter in (*account.meters, *account.later)]

    def learn(self, route: str, tenant: str, cost_us: int) -> None:
        """Note that a call of a tenant with a quota of computing cost this much."""
        self._charges.learn(route, tenant, cost_us * 1e-6)

    @abstractmethod
    async def close(self) -> None:
        """Save or give back what is held, within a bounded time."""

    @abstractmethod
    def _meter(self, tenant: str, bound: Bound) -> Meter:
        """Build a meter for a tenant and a bound."""

    def _ask(self, grant: Grant, meters: Sequence[Meter], amounts: Amounts, now: float) -> None:
        raise AssertionError("meters of one process have no ledger to ask")

    def _account(self, tenant: str, allowance: Allowance, now: float) -> _Account:
        key = (tenant, allowance.name)
        known = self._accounts.get(key)
        if known is not None and known.allowance is allowance:
            return known
        old = {} if known is None else {meter.bound.name: meter for meter in known.all_meters()}
        plan = _plan(allowance.name, allowance.limits, allowance.budgets)

        def meter_of(bound: Bound) -> Meter:
            meter = old.pop(bound.name, None)
            if meter is None:
                meter = self._meter(tenant, bound)
                if bound.budget is not None and (used := self.used_before(tenant, bound.budget)):
                    meter.at_least(used, monotonic())
            meter.bound = bound
            return meter

        meters, later = tuple(map(meter_of, plan.bounds)), tuple(map(meter_of, plan.later))
        if known is None and len(self._accounts) >= min(_MANY, self._max_accounts):
            self._make_room(now)
        account = self._accounts[key] = _Account(allowance, plan, meters, later, tuple(old.values()))
        return account

    def _make_room(self, now: float) -> None:
        """Drop the oldest accounts that owe nothing. At the maximum number of accounts, drop the oldest whatever it
        owes.
        """
        accounts = self._accounts
        for _ in range(min(_CHECKED, len(accounts))):
            key, account = accounts.popitem(last=False)
            if not all(meter.droppable(now) for meter in account.all_meters()):
                accounts[key] = account
        if len(accounts) >= self._max_accounts:
            (tenant, _), account = accounts.popitem(last=False)
            for meter in account.all_meters():
                self._drop(tenant, meter)

    @abstractmethod
    def _drop(self, tenant: str, meter: Meter) -> None:
        """Note that a meter which owes something is dropped for lack of room."""
