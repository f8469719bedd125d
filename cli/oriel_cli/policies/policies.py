"""`oriel policies check|schema|explain`: checks policy documents and explains what they do to a call."""

import argparse
import json
import sys

import msgspec

from oriel_cli.policies import explain
from oriel_cli.table import columns
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.documents.schema import DocumentTable
from oriel_policies.errors import BadDocument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compile a set of documents; name every mistake as file: path: reason")
    check.add_argument(
        "folder",
        metavar="DIR|URL",
        help="folder of *.toml, *.ndjson and key sets (*.json), here or at s3://, gs:// or az://",
    )
    check.add_argument("--json", action="store_true", help="for machines")
    actions.add_parser("schema", help="print the JSON Schema of a document, for editors")
    explain.add_arguments(actions.add_parser("explain", help="say what would apply to a call, and why"))


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        print(json.dumps(_schema(), indent=2))
        return 0
    if args.action == "explain":
        return explain.run(args)
    files = explain.read(args.folder)
    try:
        snapshot = compile_documents(files)
    except BadDocument as bad:
        return _mistakes((bad, *bad.others), as_json=args.json)
    if args.json:
        counts = {"tenants": len(snapshot.tenants), "routes": len(snapshot.routes), "pools": len(snapshot.pools)}
        print(json.dumps({"good": True, **counts, "mistakes": []}))
    else:
        print("\n".join(_summary(snapshot)))
    return 0


def _mistakes(mistakes: tuple[BadDocument, ...], *, as_json: bool) -> int:
    if as_json:
        listed = [{"file": bad.file, "path": bad.path, "reason": bad.reason} for bad in mistakes]
        print(json.dumps({"good": False, "mistakes": listed}))
        return 1
    for bad in mistakes:
        print(" ".join(str(bad).split()), file=sys.stderr)
    return 1


def _schema() -> dict[str, object]:
    (schema,), components = msgspec.json.schema_components((DocumentTable,), ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Oriel policy document",
        **schema,
        "$defs": components,
    }


def _summary(snapshot: Snapshot) -> list[str]:
    tenants = snapshot.tenants
    counts: dict[str, int] = {}
    for tenant in tenants.values():
        counts[tenant.tier.name] = counts.get(tenant.tier.name, 0) + 1
    rows = [
        (
            tier.name,
            tier.band,
            f"{tier.target_s * 1000:.0f}",
            f"{tier.give_up_s * 1000:.0f}",
            counts.get(tier.name, 0),
        )
        for tier in sorted(snapshot.tiers.values(), key=lambda tier: tier.band)
    ]
    return [
        f"good: {len(tenants)} tenants, {len(snapshot.routes)} routes, {len(snapshot.pools)} pools",
        "",
        *columns(("tier", "band", "target ms", "give up ms", "tenants"), rows, right={1, 2, 3, 4}),
        *_hints(snapshot),
    ]


def _hints(snapshot: Snapshot) -> list[str]:
    """Return a sentence for each price that leaves the device time of servers that report it without a price."""
    prices = snapshot.prices.values()
    classed = {price.currency for price in prices if price.device_class and price.device_hour}
    return [
        f"prices.{price.name}: device_hour without a class is only for servers that do not report their device time; "
        'add class = "cpu" if it is meant for those that do'
        for price in prices
        if price.device_hour and not price.device_class and price.currency not in classed
    ]
