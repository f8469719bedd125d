"""`oriel usage export|reconcile`: what tenants used, with prices; and whether nothing is missing."""

import argparse
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns
from oriel_cli.usage import formats
from oriel_cli.usage.grouping import KEYS, billed_twice, group, hours, keys_of
from oriel_cli.usage.reading import Usage, moment, read
from oriel_policies.documents.prices import price
from oriel_policies.documents.schema import PriceTable
from oriel_policies.errors import BadDocument
from oriel_policies.metering.prices import Price
from oriel_policies.metering.reconcile import TOLERANCE

MAX_PRICES_BYTES = 16 << 20
FORMATS = ("csv", "ndjson", "parquet", "focus", "cloudevents")


class _Priced(msgspec.Struct):
    prices: dict[str, PriceTable] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="print what was used, by tenant and target")
    _period(export)
    export.add_argument(
        "--by", default="tenant,target", metavar="KEYS", help=f"default %(default)s; of {', '.join(KEYS)}"
    )
    export.add_argument("--format", choices=FORMATS, default="csv", help="default %(default)s")
    export.add_argument("--prices", metavar="FILE|DIR", help="a document, or a folder of them, with [prices.NAME]")
    export.add_argument(
        "--idle", choices=("show", "spread"), help="also show the idle time of devices, or spread it by use"
    )
    export.add_argument("--account", default="oriel", metavar="NAME", help="focus: the billing account (oriel)")
    export.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    check = actions.add_parser("reconcile", help="compare what was charged with the time of each device")
    _period(check)
    check.add_argument("--json", action="store_true", help="for machines")


def _period(parser: argparse.ArgumentParser) -> None:
    now = datetime.now(UTC)
    first = now.replace(day=1).strftime("%Y-%m-%d")
    later = (now + timedelta(minutes=1)).strftime("%Y-%m-%dT%H:%M")
    parser.add_argument("--from", dest="begin", default=first, metavar="TIME", help="UTC; default: this month's first")
    parser.add_argument("--to", dest="end", default=later, metavar="TIME", help="UTC, not included; default: now")
    parser.add_argument("--state", metavar="DIR|URL", help="a state folder (default: yours), or the --usage-store")
    parser.add_argument("--open", action="store_true", help="also read minutes that are not over")


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit code: 1 if the check failed. Raises CommandFailed."""
    usage = _read(args)
    for line in _notes(usage):
        print(line, file=sys.stderr)
    return _export(args, usage) if args.action == "export" else _reconcile(args, usage)


def _read(args: argparse.Namespace) -> Usage:
    where = args.state
    if where is None:
        from oriel_cli.state import state_folder

        where = str(state_folder())
    begin, end = moment(args.begin), moment(args.end)
    if begin >= end:
        raise CommandFailed(f"--from {begin} has to be before --to {end}, which is not included (both in UTC)")
    return read(where, begin, end, with_open=args.open)


def _notes(usage: Usage) -> list[str]:
    notes = []
    if usage.repeats:
        notes.append(f"{usage.repeats} repeated lines were left out")
    if usage.gaps:
        more = ", ..." if len(usage.gaps) > 5 else ""
        notes.append(f"{len(usage.gaps)} segments are missing: {', '.join(usage.gaps[:5])}{more}")
    if usage.unread:
        notes.append(f"{usage.unread} lines cannot be read and are missing: export with the version that wrote them")
    if usage.later:
        notes.append(f"{', '.join(usage.later)} is of a later version of Oriel and not in here: export with that one")
    if usage.crashes:
        lost_s = usage.lost_ns / 1e9
        notes.append(
            f"{usage.crashes} servers crashed: what they used after their last writes (one a second) is missing; "
            f"{lost_s:.1f} s passed from then until others started"
        )
    return notes


def _export(args: argparse.Namespace, usage: Usage) -> int:
    prices = read_prices(Path(args.prices)) if args.prices else []
    if args.format == "cloudevents":
        return _write(args, formats.write_ndjson(list(formats.cloudevents(usage.lines))))
    by = keys_of(args.by)
    groups = group(
        [line for _, line in usage.lines], by, idle=args.idle or "", by_tier=any(price.tier for price in prices)
    )
    if args.format == "focus":
        if not prices:
            raise CommandFailed("--format focus needs --prices FILE|DIR, with a [prices.NAME] for each class of device")
        rows = list(formats.focus(groups, prices, account=args.account))
        return _write(args, formats.write_csv(rows, formats.focus_columns(prices)))
    rows, names = list(formats.records(groups, prices)), formats.columns(by, priced=bool(prices))
    if args.format == "parquet":
        if args.out is None:
            raise CommandFailed("parquet needs --out FILE")
        formats.write_parquet(rows, names, args.out)
        return 0
    return _write(args, formats.write_csv(rows, names) if args.format == "csv" else formats.write_ndjson(rows))


def _write(args: argparse.Namespace, text: str) -> int:
    if args.out is None:
        sys.stdout.write(text)
        return 0
    try:
        args.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{args.out} cannot be written: {error.strerror}") from error
    return 0


def _reconcile(args: argparse.Namespace, usage: Usage) -> int:
    found = hours(usage.lines)
    bad = [at for at, hour in found.items() if not hour.good]
    twice = billed_twice([line for _, line in usage.lines])
    rows = [
        {
            "hour": at[2],
            "instance": at[0],
            "device": at[1],
            "tenants_s": hour.tenants_ns / 1e9,
            "unbilled_s": hour.unbilled_ns / 1e9,
            "idle_s": hour.idle_ns / 1e9,
            "wall_s": hour.wall_ns / 1e9,
            "difference": hour.ratio,
            "good": hour.good,
        }
        for at, hour in sorted(found.items(), key=lambda each: (each[0][2], each[0]))
    ]
    if args.json:
        named = [dict(zip(("tenant", "target", "estimated_ns"), each, strict=True)) for each in twice]
        checked = {"good": not bad and not twice, "gaps": usage.gaps, "crashes": usage.crashes}
        print(json.dumps({**checked, "billed_twice": named, "hours": rows}))
    else:
        heading = ("hour", "instance", "device", "tenants s", "unbilled s", "idle s", "wall s", "difference")
        cells = [
            (
                *(row["hour"], row["instance"], row["device"]),
                *(f"{row[name]:.3f}" for name in ("tenants_s", "unbilled_s", "idle_s", "wall_s")),
                f"{row['difference']:.4%}",
            )
            for row in rows
        ]
        print("\n".join(columns(heading, cells, right=range(3, 8))))
        worst = max((hour.ratio for hour in found.values()), default=0.0)
        verdict = "good" if not bad else f"{len(bad)} of them are off by more than {TOLERANCE:.0%}"
        print(f"\n{len(found)} device hours, largest difference {worst:.4%} of the busy time: {verdict}")
        for tenant, target, ns in twice:
            what = f"model {target}" if target else "its services"
            print(
                f"billed twice: {ns / 1e9:.3f} s of {what} were estimated for tenant {tenant} by a gateway, beside "
                "what servers recorded: leave estimates out of the bill, and run gateways and servers of one version"
            )
    return 1 if bad or twice else 0


def read_prices(path: Path) -> list[Price]:
    """Read the prices of a document, or of all documents of a folder. Raises CommandFailed."""
    files = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    found: list[Price] = []
    try:
        for file in files:
            if file.stat().st_size > MAX_PRICES_BYTES:
                raise CommandFailed(f"{file} is larger than {MAX_PRICES_BYTES >> 20} MiB")
            tables = msgspec.toml.decode(file.read_bytes(), type=_Priced).prices
            found += [price(file.name, f"prices.{name}", name, table) for name, table in tables.items()]
    except (OSError, msgspec.DecodeError, msgspec.ValidationError, BadDocument) as error:
        raise CommandFailed(f"the prices cannot be read: {error}") from error
    if not found:
        raise CommandFailed(f"{path} has no [prices.NAME]")
    return found
