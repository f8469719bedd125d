"""`oriel models check REPOSITORY`: the folders that would serve here, and what to do about the others.

Runs here, without a server, and loads one model after the other as a server would, the code of Python models included.
"""

import argparse
import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns, printable

Actions = Any  # argparse gives its class no public name


def add_action(actions: Actions) -> None:
    """Add the command to those of `oriel models`."""
    text = "say for each folder of a model repository if it loads, what differs from Triton, and what to do if not"
    made: argparse.ArgumentParser = actions.add_parser("check", help=text, description=f"{text}.")
    made.add_argument(
        "repositories",
        nargs="+",
        metavar="DIR|URL",
        help="folder of models, or the same in an object store, which is fetched into a temporary folder",
    )
    made.add_argument(
        "--no-open", action="store_true", help="judge the files alone: no engine opens them and no model's code runs"
    )
    made.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from oriel_inference.repository_check import check_repositories

    # The table has the reasons; warnings about the repository itself still go to stderr.
    for room in ("models", "repository"):
        logging.getLogger(f"oriel_inference.{room}").addHandler(logging.NullHandler())
    with TemporaryDirectory(prefix="oriel-check-") as scratch:
        where = [each if "://" in each else Path(each) for each in args.repositories]
        found = asyncio.run(check_repositories(where, Path(scratch), opens=not args.no_open))
    lines = [{**asdict(each), "verdict": _verdict(each.versions, each.notes)} for each in found]
    if args.json:
        print(json.dumps(lines))
    elif not lines:
        print("no models")
    else:
        rows = [
            [each["model"], each["verdict"], each["runs_on"] or "-", "; ".join(map(printable, each["notes"]))]
            for each in lines
        ]
        print("\n".join(columns(("MODEL", "VERDICT", "RUNS ON", "DIFFERENCES, OR WHY NOT AND WHAT TO DO"), rows)))
    if refused := sum(each["verdict"] == "refused" for each in lines):
        raise CommandFailed(f"{refused} of {len(lines)} models would not serve here: see docs/from-triton.md")
    return 0


def _verdict(versions: Sequence[int], notes: Sequence[str]) -> str:
    if not versions:
        return "refused"
    return "loads with differences" if notes else "loads"
