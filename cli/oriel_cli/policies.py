"""`oriel policies check DIR`: would a gateway take these documents?"""

import argparse
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.errors import BadDocument

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="compile a folder of documents; if one is bad, say file, path and reason")
    check.add_argument("folder", type=Path, metavar="DIR", help="folder of *.toml documents")


def run(args: argparse.Namespace) -> int:
    try:
        files = {path.name: path.read_bytes() for path in sorted(args.folder.glob("*.toml"))}
    except OSError as refused:
        raise CommandFailed(f"the documents cannot be read: {refused.strerror}") from refused
    if not files:
        raise CommandFailed(f"there are no *.toml documents in '{args.folder}'")
    try:
        snapshot = compile_documents(files)
    except BadDocument as bad:
        raise CommandFailed(str(bad)) from bad
    print("\n".join(_summary(snapshot)))
    return 0


def _summary(snapshot: Snapshot) -> list[str]:
    tenants = snapshot.tenants
    rows = [
        (
            tier.name,
            tier.band,
            f"{tier.target_s * 1000:.0f}",
            f"{tier.give_up_s * 1000:.0f}",
            sum(tenant.tier == tier for tenant in tenants.values()),
        )
        for tier in sorted(snapshot.tiers.values(), key=lambda tier: tier.band)
    ]
    return [
        f"good: {len(tenants)} tenants, {len(snapshot.routes)} routes, {len(snapshot.pools)} pools",
        "",
        *columns(("tier", "band", "target ms", "give up ms", "tenants"), rows, right={1, 2, 3, 4}),
    ]
