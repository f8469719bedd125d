"""Computes what use costs: prices per class of device, amounts in 10^-9 units of a currency, in integers only.

Amounts are rounded once, at the end: an export multiplies the sums of a period, not each call.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NANO = 10**9
_HOUR_NS = 3600 * NANO
_GIB = 1 << 30
_MILLION = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """The prices of one class from a day on, in 10^-9 units of `currency`.

    tier: the tier whose use has this price; "" for every tier without a price of its own.
    device_class: "" for use without a device: bytes, tokens and CPU time. valid_from: a day, as "2026-11-01".
    """

    name: str
    device_class: str
    currency: str
    valid_from: str
    device_hour: int = 0
    cpu_core_hour: int = 0
    gib_out: int = 0
    million_tokens_in: int = 0
    million_tokens_out: int = 0
    tier: str = ""


@dataclass(frozen=True, slots=True)
class Amounts:
    """The amounts to pay, by resource, in 10^-9 units of the currency."""

    device: int = 0
    cpu: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0

    @property
    def total(self) -> int:
        return self.device + self.cpu + self.bytes_out + self.tokens_in + self.tokens_out


def price_at(prices: Iterable[Price], device_class: str, day: str, tier: str = "") -> Price | None:
    """Return the price of a class on a day: the last one that is valid then, of those for the tier if there are any.
    Use without a device has the price of the class "", or else that of "cpu".
    """
    known = [price for price in prices if price.valid_from <= day and price.tier in ("", tier)]
    for wanted in (device_class,) if device_class else ("", "cpu"):
        found = [price for price in known if price.device_class == wanted]
        if found:
            return max(found, key=lambda price: (price.tier, price.valid_from))
    return None


def amounts(
    price: Price, *, device_ns: int = 0, cpu_ns: int = 0, bytes_out: int = 0, tokens_in: int = 0, tokens_out: int = 0
) -> Amounts:
    """Return what this use costs, each resource rounded to the nearest 10^-9."""
    return Amounts(
        _rounded(device_ns * price.device_hour, _HOUR_NS),
        _rounded(cpu_ns * price.cpu_core_hour, _HOUR_NS),
        _rounded(bytes_out * price.gib_out, _GIB),
        _rounded(tokens_in * price.million_tokens_in, _MILLION),
        _rounded(tokens_out * price.million_tokens_out, _MILLION),
    )


def decimal_text(nano: int) -> str:
    """Return an amount in units of its currency, with nine decimals."""
    sign, nano = ("-", -nano) if nano < 0 else ("", nano)
    return f"{sign}{nano // NANO}.{nano % NANO:09d}"


def _rounded(product: int, divisor: int) -> int:
    return (2 * product + divisor) // (2 * divisor)
