"""Writes groups of use as CSV, NDJSON, Parquet and FOCUS, and single lines as CloudEvents."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from oriel_cli.errors import CommandFailed
from oriel_cli.usage.grouping import IDLE, UNBILLED, Group, counted, outermost
from oriel_policies.metering.prices import Price, decimal_text
from oriel_wire.usage.lines import COUNTERS, UsageLine

NAME = "Oriel"
NO_CLASS = "none"  # the SKU of use that needs no device


class _Meter(NamedTuple):
    """A priced quantity.

    name: the price's field.
    counter: the counter of usage.
    size: the count that makes one unit.
    """

    name: str
    counter: str
    unit: str
    size: int
    described: str


_METERS = (
    _Meter("device", "device_ns", "Hours", 3600 * 10**9, "device time"),
    _Meter("cpu", "cpu_ns", "Hours", 3600 * 10**9, "CPU time"),
    _Meter("bytes_out", "bytes_out", "GiB", 1 << 30, "bytes sent"),
    _Meter("tokens_in", "tokens_in", "Tokens", 1, "tokens read"),
    _Meter("tokens_out", "tokens_out", "Tokens", 1, "tokens written"),
)


def columns(by: Sequence[str], *, priced: bool) -> list[str]:
    """Return the columns of `records` that are grouped by these keys."""
    names = [*by, "class", "day", *COUNTERS, "estimated", *(("amount", "currency") if priced else ())]
    return list(dict.fromkeys(names))


def records(groups: Sequence[Group], prices: Sequence[Price]) -> Iterator[dict[str, Any]]:
    """Yield one record per group: its keys, its counters and, with prices, the amount."""
    for each in groups:
        record: dict[str, Any] = dict(each.keys)
        record.setdefault("class", each.device_class)
        record.setdefault("day", each.day)
        record |= each.sums
        record["estimated"] = each.estimated
        if prices:
            priced = each.priced(prices)
            record["amount"] = decimal_text(priced[1].total) if priced else ""
            record["currency"] = priced[0].currency if priced else ""
        yield record


def write_csv(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """Return rows as CSV (RFC 4180) with a heading."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        # A spreadsheet would run a text that begins like a formula.
        writer.writerow({k: f"'{v}" if isinstance(v, str) and v[:1] in "=+@\t" and v else v for k, v in row.items()})
    return text.getvalue()


def write_ndjson(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as JSON, one per line."""
    return "".join([json.dumps(row, ensure_ascii=False) + "\n" for row in rows])


def write_parquet(rows: Sequence[dict[str, Any]], names: Sequence[str], path: Path) -> None:
    """Write rows to a Parquet file: counters as 64-bit integers, amounts as decimals, null where no price applies.

    Raises CommandFailed without pyarrow, or if the file cannot be written.
    """
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise CommandFailed("parquet needs pyarrow: pip install 'oriel-serving[parquet]'") from error
    kinds = {name: pyarrow.int64() for name in COUNTERS}
    kinds |= {"estimated": pyarrow.bool_(), "amount": pyarrow.decimal128(38, 9)}
    schema = pyarrow.schema([(name, kinds.get(name, pyarrow.string())) for name in names])
    table = pyarrow.Table.from_pylist(
        [
            row | {"amount": Decimal(row["amount"]) if row["amount"] else None, "currency": row["currency"] or None}
            if "amount" in row
            else row
            for row in rows
        ],
        schema=schema,
    )
    try:
        parquet.write_table(table, path)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error}") from error


def cloudevents(lines: Sequence[tuple[str, UsageLine]]) -> Iterator[dict[str, Any]]:
    """Yield one CloudEvent 1.0 per line of use; its id is the line's identity, so that a receiver drops repeats."""
    outer = outermost(line for _, line in lines)
    for identity, line in lines:
        if line.kind != "use":
            continue
        data: dict[str, Any] = {
            "tier": line.tier,
            "target": line.target,
            "version": line.version,
            "class": line.device_class,
            "unit": line.unit,
            "minute": line.minute,
            **counted(line, outer),
        }
        if line.why:
            data["why"] = line.why
        if line.estimated:
            data["estimated"] = True
        yield {
            "specversion": "1.0",
            "id": identity,
            "source": f"/oriel/{identity.partition('-')[0]}",
            "type": "oriel.usage.v1",
            "subject": line.tenant or UNBILLED,
            "time": f"{line.minute}:00Z",
            "datacontenttype": "application/json",
            "data": data,
        }


def focus(groups: Sequence[Group], prices: Sequence[Price], *, account: str) -> Iterator[dict[str, Any]]:
    """Yield rows of FOCUS 1.2: one per group and resource that has a price and was used. Raises CommandFailed for use
    without a price.
    """
    for each in groups:
        priced = each.priced(prices)
        if priced is None:
            named = each.device_class
            what = f"class {named!r}" if named else "use without a device (CPU time, bytes, tokens)"
            table = f"[prices.NAME] with class = {named or 'cpu'!r}"
            raise CommandFailed(f"{what} has no price on {each.day}: add {table} to --prices")
        price, paid = priced
        for meter in _METERS:
            cost = getattr(paid, meter.name)
            if each.sums[meter.counter] and (cost or meter.name == "device"):
                yield _charge(each, price, meter, cost, account)


def focus_columns(prices: Sequence[Price]) -> list[str]:
    """Return the columns of `focus`: the 21 that FOCUS 1.2 demands, some that it has beside them, and our own."""
    return list(_charge(Group({}, "", "2026-01-01"), prices[0], _METERS[0], 0, ""))


def _charge(group: Group, price: Price, meter: _Meter, cost: int, account: str) -> dict[str, Any]:
    tenant = group.keys.get("tenant", "")
    target = group.keys.get("target", "")
    day = datetime.fromisoformat(group.day).replace(tzinfo=UTC)
    month = day.replace(day=1)
    following = (month + timedelta(days=32)).replace(day=1)
    amount, quantity = decimal_text(cost), _quantity(group.sums[meter.counter], meter.size)
    sku = group.device_class or NO_CLASS
    nobody = tenant in (IDLE, UNBILLED)
    # A charge that is no sub account's has none.
    account_of = "" if nobody else tenant
    idle = "idle " if tenant == IDLE else ""
    return {
        "BilledCost": amount,
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": price.currency,
        "BillingPeriodEnd": _time(following),
        "BillingPeriodStart": _time(month),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"{idle}{meter.described} of {target or 'all models and services'}, class {sku}",
        "ChargePeriodEnd": _time(day + timedelta(days=1)),
        "ChargePeriodStart": _time(day),
        "ContractedCost": amount,
        "EffectiveCost": amount,
        "InvoiceIssuerName": NAME,
        "ListCost": amount,
        "PricingQuantity": quantity,
        "PricingUnit": meter.unit,
        "ProviderName": NAME,
        "PublisherName": NAME,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Oriel inference",
        "BillingAccountType": "Platform",
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": quantity,
        "ConsumedUnit": meter.unit,
        "PricingCategory": "Standard",
        "ServiceSubcategory": "Other (AI and Machine Learning)",
        "SkuId": sku,
        "SkuPriceId": f"{price.name}/{sku}/{meter.name}",
        "SubAccountId": account_of,
        "SubAccountName": account_of,
        "SubAccountType": "Tenant" if account_of else "",
        "x_tenant": tenant,
        "x_target": target,
        "x_tier": group.keys.get("tier", ""),
        "x_requests": group.sums["requests"],
        "x_rows": group.sums["rows"],
        "x_estimated": group.estimated,
        "x_unbilled": nobody,
    }


def _quantity(used: int, size: int) -> str:
    """Return a quantity without an exponent, which FOCUS would write in a form of its own."""
    return f"{Decimal(used) / size:.15f}".rstrip("0").rstrip(".")


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
