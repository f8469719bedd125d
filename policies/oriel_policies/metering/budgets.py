"""Budgets: how much of something a tenant may use in a day or a month, and how much of it some use is. Pure.

A budget of money counts what its use costs by the prices of the documents, in 10^-9 units of the currency; the others
count nanoseconds or tokens. A use is priced by the class of the device that it was on; the rest of it, which needed no
device, by the price without a class.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from oriel_policies.bounds.calendar import Period
from oriel_policies.metering.prices import NANO, Price, amounts, decimal_text, price_at

UNITS = ("cpu_seconds", "device_seconds", "tokens")  # or the name of a currency
_PREFIX = "budget-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One budget of one tenant.

    unit: one of UNITS, or a currency such as "EUR". amount: the amount in whole units of `scale`. warn: the share of it
    that is reported as a warning. stop: True if calls are refused once it is spent.
    """

    unit: str
    amount: int
    period: Period
    warn: float = 0.8
    stop: bool = True

    @property
    def name(self) -> str:
        """Its name, unique within a tenant."""
        return f"{_PREFIX}{self.unit}-{self.period}"

    @property
    def scale(self) -> int:
        """How many counted units make 1 of `unit`, such as 1 EUR."""
        return scale_of(self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Units that were used in one tier. device_ns: nanoseconds by the class of the device, "" where it is not known."""

    tier: str = ""
    device_ns: Mapping[str, int] = field(default_factory=dict)
    cpu_ns: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0


def is_budget(bound: str) -> bool:
    """Return whether a bound of this name is a budget."""
    return bound.startswith(_PREFIX)


def scale_of(unit: str) -> int:
    """Return how many counted units make 1 of `unit`, such as 1 EUR."""
    return 1 if unit == "tokens" else NANO


def spent(unit: str, use: Use, prices: Iterable[Price], day: str) -> int:
    """Return how much of a budget in `unit` this use is. day: on which it was used, as "2026-11-24"."""
    if unit == "tokens":
        return use.tokens_in + use.tokens_out
    if unit == "device_seconds":
        return sum(use.device_ns.values())
    if unit == "cpu_seconds":
        return use.cpu_ns
    own = [price for price in prices if price.currency == unit]
    total = 0
    for device_class, device_ns in use.device_ns.items():
        if device_ns and (price := price_at(own, device_class, day, use.tier)) is not None:
            total += amounts(price, device_ns=device_ns).total
    if (price := price_at(own, "", day, use.tier)) is not None:
        total += amounts(
            price,
            cpu_ns=use.cpu_ns,
            bytes_out=use.bytes_out,
            tokens_in=use.tokens_in,
            tokens_out=use.tokens_out,
        ).total
    return total


def costs(uses: Sequence[Use], prices: Iterable[Price], day: str) -> dict[str, str]:
    """Return what these uses cost together in each currency of the prices, exactly, as {"EUR": "0.012500000"}."""
    known = list(prices)
    currencies = sorted({price.currency for price in known})
    return {each: decimal_text(sum([spent(each, use, known, day) for use in uses])) for each in currencies}
