"""`oriel doctor`: runs the checks and prints findings with their remedies; exit code 1 if there is something to do."""

import argparse
import asyncio
import json
import os
from pathlib import Path

from oriel_cli.doctor import cluster, machine, services
from oriel_cli.doctor.findings import MAX_SKEW_S, Finding

KEY_VARIABLE = "ORIEL_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policies", metavar="DIR|URL", help="documents of the gateway; their endpoints are probed too"
    )
    parser.add_argument(
        "--services", type=Path, action="append", default=[], metavar="DIR", help="folder of services; repeatable"
    )
    parser.add_argument(
        "--model-repository",
        action="append",
        default=[],
        metavar="DIR|URL",
        help="model repository, here or at s3://, gs:// or az://; repeatable",
    )
    parser.add_argument("--limiter", metavar="URL", help="redis:// or rediss:// (default: ORIEL_LIMITER)")
    parser.add_argument("--limiter-ca", type=Path, metavar="FILE", help="who signs for a rediss:// limiter, PEM")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of the gateway, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM")
    parser.add_argument(
        "--cluster",
        nargs="?",
        const="oriel",
        metavar="NAMESPACE",
        help="check the installation in this namespace (oriel) of the cluster that kubectl reaches, and nothing here",
    )
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Check what the flags name. The key of ORIEL_KEY is looked up, never printed."""
    if args.cluster:
        found = cluster.examine(args.cluster)
    else:
        documents, found = services.read(args.policies) if args.policies else (None, [])
        found = list(dict.fromkeys([*found, *asyncio.run(examine(args, documents))]))  # two parts may say the same
    failed = any(each.status == "fail" for each in found)
    if args.json:
        listed = [
            {"check": each.check, "status": each.status, "what": each.what, "fix": each.fix or None} for each in found
        ]
        print(json.dumps({"healthy": not failed, "findings": listed}))
        return int(failed)
    width = max(len(each.check) for each in found)
    for each in found:
        print(f"{each.status:<4}  {each.check:<{width}}  {_printable(each.what)}")
        if each.fix:
            print(f"{'':<{width + 6}}  -> {_printable(each.fix)}")
    counts = {status: sum(each.status == status for each in found) for status in ("fail", "warn")}
    print(f"\n{counts['fail']} to fix, {counts['warn']} to look at" if any(counts.values()) else "\nall well")
    return int(failed)


async def examine(args: argparse.Namespace, documents: "services.Documents | None") -> list[Finding]:
    """Run the checks and return all findings in their order."""
    found = [*machine.packages(), *machine.state(), *machine.files()]
    found += machine.certificates(args.tls_cert, args.tls_key)
    clocks: dict[str, float] = {}
    if documents is not None:
        about_documents, snapshot = services.documents(documents, args.policies)
        found += about_documents
        if snapshot is not None:
            found += services.keys(snapshot, os.environ.get(KEY_VARIABLE, ""))
            reached, ahead = await services.endpoints(snapshot)
            found += reached
            clocks |= ahead
    shared, ahead = await services.redis(args.limiter or os.environ.get("ORIEL_LIMITER", ""), args.limiter_ca)
    found += shared
    clocks |= ahead
    for each in args.model_repository:
        found += await services.repository(each if "://" in each else Path(each))
    for folder in args.services:
        found += services.services(folder)
    found += await machine.ports()
    return [*found, *machine.clock(clocks, MAX_SKEW_S)]


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in text)
