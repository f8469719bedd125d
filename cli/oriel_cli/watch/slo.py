"""`oriel slo`: whether the promises of tiers are kept, how fast their error budgets are used up, and what is left."""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from oriel_cli import state
from oriel_cli.admin import TOKEN, address, document
from oriel_cli.table import columns

LISTED = 20  # tenants and targets in the table; --json has up to MOST
MOST = 1000
WINDOWS = ("5m", "1h", "30d")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", default="", metavar="NAME", help="only the calls of this tenant, by target")
    parser.add_argument("--json", action="store_true", help="print what the gateway answers as one line of JSON")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--admin-port", type=int, metavar="N", help="which gateway of this machine, by its admin port")
    where.add_argument(
        "--admin",
        metavar="URL",
        help=f"admin port of another gateway, http://HOST:PORT; its token comes from {TOKEN}",
    )


def run(args: argparse.Namespace) -> int:
    host, port = address(args.admin) if args.admin else ("127.0.0.1", state.admin_port(args.admin_port))
    report = asyncio.run(fetch(host, port, args.tenant, MOST if args.json else LISTED))
    if args.json:
        print(json.dumps(report))
        return 0
    for line in table(report, tenant=args.tenant):
        print(line)
    return 0


async def fetch(host: str, port: int, tenant: str, limit: int) -> dict[str, Any]:
    """Return what `GET /slo` answers. Raises CommandFailed."""
    return await document(host, port, f"/slo?limit={limit}&tenant={quote(tenant, safe='')}")


def table(report: Mapping[str, Any], *, tenant: str = "") -> list[str]:
    """Return the lines of the table, of at most 80 characters."""
    lines: list[str] = []
    if not tenant:
        head = ("tier", "target", "goal", *WINDOWS, "burn 1h", "budget")
        rows = [
            (
                _cut(tier["tier"], 10),
                f"{tier['target_ms']:g} ms",
                f"{tier['objective'] * 100:g} %",
                *(_share(tier["attainment"][window]) for window in WINDOWS),
                _burn(tier["burn"]["1h"]),
                _left(tier["budget_left"]),
            )
            for tier in report["tiers"]
        ]
        lines += columns(head, rows, right=range(1, len(head)))
        lines += [line for tier in report["tiers"] for line in _causes(tier["tier"], tier["causes"])]
        if report["targets"]:
            lines.append("")
    targets: Sequence[Mapping[str, Any]] = report["targets"][:LISTED]
    if targets:
        names = ("tenant", "target", "tier", *WINDOWS[1:], "bad", "mostly")
        lines += columns(names, [_target_row(each) for each in targets], right=range(3, 6))
    elif tenant:
        lines.append(f"no call of tenant {tenant!r} has been counted in the last 30 days")
    more = report["more"] + len(report["targets"]) - len(targets)
    if more:
        lines.append(f"and {more} more (--json)")
    if report.get("gateways", 1) > 1:
        lines.append(f"(the calls of all gateways, {report['gateways']} at present)")
    if not report["kept"]:
        lines.append("(this gateway keeps its counts in memory: a restart forgets them)")
    return lines


def _target_row(figures: Mapping[str, Any]) -> Sequence[object]:
    return (
        _cut(figures["tenant"], 10),
        _cut(figures["target"], 16),
        _cut(figures["tier"], 8),
        *(_share(figures["attainment"][window]) for window in WINDOWS[1:]),
        _count(figures["bad"]["30d"]),
        next(iter(figures["causes"]), "-"),
    )


def _causes(tier: str, causes: Mapping[str, int]) -> list[str]:
    if not causes:
        return []
    named = ", ".join(f"{cause} {count}" for cause, count in list(causes.items())[:4])
    return [f"  {_cut(tier, 12)}, last hour: lost to {named}"]


def _left(budget: float | None) -> str:
    return "spent" if budget is not None and budget <= 0.0 else _share(budget)


def _share(share: float | None) -> str:
    if share is None:
        return "-"
    # Never rounded up to a whole that it is not: 99.996 % of calls on time is not all of them.
    percent = share * 100.0
    return "100 %" if percent == 100.0 else f"{min(percent, 99.99):.2f} %"


def _burn(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}" if rate < 1000 else f"{rate:.0f}"


def _count(count: int) -> str:
    for factor, unit in ((1_000_000, "M"), (1_000, "k")):
        if count >= 10 * factor:
            return f"{count // factor}{unit}"
    return str(count)


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else name[: most - 2] + ".."
