"""Writes groups of use as CSV, NDJSON, Parquet and FOCUS, and single lines as CloudEvents."""

import csv
import io
import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from oriel_cli.errors import CommandFailed
from oriel_cli.usage.grouping import IDLE, UNBILLED, Group
from oriel_policies.metering.prices import Amounts, Price, decimal_text
from oriel_wire.usage import COUNTERS, UsageLine

# The 21 columns that FOCUS 1.2 demands of every data set; FOCUS_MORE are conditional or recommended ones.
FOCUS = (
    "BilledCost",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "BillingPeriodEnd",
    "BillingPeriodStart",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargePeriodEnd",
    "ChargePeriodStart",
    "ContractedCost",
    "EffectiveCost",
    "InvoiceIssuerName",
    "ListCost",
    "PricingQuantity",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "ServiceCategory",
    "ServiceName",
)
FOCUS_MORE = (
    "BillingAccountType",
    "ChargeFrequency",
    "ConsumedQuantity",
    "ConsumedUnit",
    "PricingCategory",
    "ServiceSubcategory",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "SubAccountType",
)
NAME = "Oriel"
_METERS = (
    ("device", "device_ns", "Hours", 3600 * 10**9, "device time"),
    ("cpu", "cpu_ns", "Hours", 3600 * 10**9, "CPU time"),
    ("bytes_out", "bytes_out", "GiB", 1 << 30, "bytes sent"),
    ("tokens_in", "tokens_in", "Tokens", 1, "tokens read"),
    ("tokens_out", "tokens_out", "Tokens", 1, "tokens written"),
)


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


def write_csv(rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> str:
    """Return rows as CSV (RFC 4180) with a heading."""
    names = list(columns) or list(rows[0] if rows else ("tenant", *COUNTERS))
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


def write_parquet(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows to a Parquet file. Raises CommandFailed without pyarrow."""
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise CommandFailed("parquet needs pyarrow: pip install 'oriel-serving[parquet]'") from error
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def cloudevents(lines: Sequence[tuple[str, UsageLine]]) -> Iterator[dict[str, Any]]:
    """Yield one CloudEvent 1.0 per line of use; its id is the line's identity, so that a receiver drops repeats."""
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
            **{name: getattr(line, name) for name in COUNTERS},
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
            raise CommandFailed(f"class {each.device_class!r} has no price on {each.day}: add one to --prices")
        price, paid = priced
        for name, counter, unit, size, described in _METERS:
            used, cost = each.sums[counter], getattr(paid, name)
            if used and (cost or name == "device"):
                yield _charge(each, price, paid, name, cost, used / size, unit, described, account)


def _charge(
    group: Group,
    price: Price,
    paid: Amounts,
    name: str,
    cost: int,
    quantity: float,
    unit: str,
    described: str,
    account: str,
) -> dict[str, Any]:
    tenant = group.keys.get("tenant", "")
    target = group.keys.get("target", "")
    day = datetime.fromisoformat(group.day).replace(tzinfo=UTC)
    month = day.replace(day=1)
    following = (month + timedelta(days=32)).replace(day=1)
    amount = decimal_text(cost)
    sku = f"{group.device_class or 'none'}/{name}"
    nobody = tenant in (IDLE, UNBILLED)
    return {
        "BilledCost": amount,
        "BillingAccountId": account,
        "BillingAccountName": account,
        "BillingCurrency": price.currency,
        "BillingPeriodEnd": _time(following),
        "BillingPeriodStart": _time(month),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"{described} of {target or 'all models and services'}, class {group.device_class or '-'}",
        "ChargePeriodEnd": _time(day + timedelta(days=1)),
        "ChargePeriodStart": _time(day),
        "ContractedCost": amount,
        "EffectiveCost": amount,
        "InvoiceIssuerName": NAME,
        "ListCost": amount,
        "PricingQuantity": f"{quantity:.12g}",
        "PricingUnit": unit,
        "ProviderName": NAME,
        "PublisherName": NAME,
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Oriel inference",
        "BillingAccountType": "Platform",
        "ChargeFrequency": "Usage-Based",
        "ConsumedQuantity": f"{quantity:.12g}",
        "ConsumedUnit": unit,
        "PricingCategory": "Standard",
        "ServiceSubcategory": "Other (AI and Machine Learning)",
        "SkuId": group.device_class,
        "SkuPriceId": f"{price.name}/{sku}",
        "SubAccountId": tenant,
        "SubAccountName": tenant,
        "SubAccountType": "Tenant",
        "x_target": target,
        "x_tier": group.keys.get("tier", ""),
        "x_requests": group.sums["requests"],
        "x_rows": group.sums["rows"],
        "x_estimated": group.estimated,
        "x_unbilled": nobody,
    }


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
