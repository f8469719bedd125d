"""Checks `[prices.NAME]`: what the use of a class of device costs."""

import re
from decimal import Decimal, InvalidOperation

from oriel_policies.documents.schema import PriceTable
from oriel_policies.errors import BadDocument
from oriel_policies.metering.prices import NANO, Price

_CLASS = re.compile(r"(?:[a-z0-9][a-z0-9_-]{0,31})?\Z")
_CURRENCY = re.compile(r"[A-Z]{3}\Z")
_MOST = 10**9


def price(file: str, path: str, name: str, table: object) -> Price:
    """Check one table of prices. Raises BadDocument."""
    assert isinstance(table, PriceTable)
    if not _CLASS.match(table.device_class):
        raise BadDocument(file, f"{path}.class", "must be at most 32 characters of a-z, 0-9, - and _")
    if not _CURRENCY.match(table.currency):
        raise BadDocument(file, f"{path}.currency", "must be the three capital letters of ISO 4217, such as EUR")
    return Price(
        name=name,
        device_class=table.device_class,
        currency=table.currency,
        valid_from=table.valid_from.isoformat(),
        device_hour=_nano(file, f"{path}.device_hour", table.device_hour),
        cpu_core_hour=_nano(file, f"{path}.cpu_core_hour", table.cpu_core_hour),
        gib_out=_nano(file, f"{path}.gib_out", table.gib_out),
        million_tokens_in=_nano(file, f"{path}.million_tokens_in", table.million_tokens_in),
        tier=table.tier,
        million_tokens_out=_nano(file, f"{path}.million_tokens_out", table.million_tokens_out),
    )


def _nano(file: str, path: str, amount: float | str) -> int:
    """Return an amount in 10^-9 units. A text is exact, as "0.000000125"."""
    try:
        nano = Decimal(str(amount)) * NANO
    except InvalidOperation as error:
        raise BadDocument(file, path, f"{str(amount)[:40]!r} is not an amount") from error
    if not nano.is_finite() or not 0 <= nano <= _MOST * NANO or nano != nano.to_integral_value():
        raise BadDocument(file, path, f"must be from 0 to {_MOST} with at most nine decimals")
    return int(nano)
