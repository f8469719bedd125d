"""`oriel simulate serve`: what a load would get from some replicas, in virtual time."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oriel_cli.errors import CommandFailed
from oriel_cli.policies import explain
from oriel_cli.usage.command import read_prices
from oriel_policies.documents import Snapshot
from oriel_policies.metering.prices import Price, price_at
from oriel_tools.load.command import scenario_of, write
from oriel_tools.load.report import as_document
from oriel_tools.load.scenario import Scenario
from oriel_tools.simulate.page import as_page
from oriel_tools.simulate.profile import Profile, read
from oriel_tools.simulate.requests import request_of
from oriel_tools.simulate.used import as_text, used
from oriel_tools.simulate.virtual import Servers, VirtualLoad, tenant_of
from oriel_wire.distribution import installed_version

MAX_CALLS = 5_000_000
MAX_REPLICAS = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate serve`."""
    parser.add_argument(
        "scenario", nargs="?", type=Path, help="the file of an `oriel load`: streams and phases (docs/load.md)"
    )
    one = parser.add_argument_group("one stream, one phase, without a file")
    one.add_argument("--url", help="of the model (default: the model of the profile, if there is one)")
    one.add_argument("--rate", type=float, help="arrivals per second")
    one.add_argument("--seconds", type=float, help="how long (10)")
    one.add_argument("--arrivals", choices=("poisson", "bursty", "ramp", "uniform"), help="arrival process (poisson)")
    one.add_argument(
        "--trace", metavar="FILE", help="replay what `oriel load --record` or a gateway's access log wrote"
    )
    one.add_argument("--rows", type=int, help="of each request (1)")
    one.add_argument("--key", help="whose calls these are, with --policies")
    one.add_argument("--tier", help="a label for the report")
    one.add_argument("--target-ms", type=float, help="an answer is in time within this (with --policies: the tier's)")
    one.add_argument("--deadline-ms", type=float, help="sent with each request")
    servers = parser.add_argument_group("servers")
    servers.add_argument(
        "--profile",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="how long a model's batches take, as `oriel simulate profile` writes it; once for each model",
    )
    servers.add_argument("--replicas", type=int, default=1, metavar="N", help="equal servers (%(default)s)")
    servers.add_argument(
        "--cores", type=int, default=0, metavar="N", help="batches at once per server (default: all models' instances)"
    )
    servers.add_argument("--policies", metavar="DIR|URL", help="policy documents: the calls pass a gateway with these")
    servers.add_argument(
        "--scale",
        metavar="POOL",
        help="replicas follow the scaling table of this pool of --policies, from --replicas on, or from its minimum if "
        "that is more",
    )
    servers.add_argument(
        "--begins",
        default="2026-01-05T00:00",
        metavar="TIME",
        help="when the load begins, in UTC, for the schedule of --scale (%(default)s, a Monday)",
    )
    servers.add_argument("--prices", metavar="FILE|DIR", help="a document, or a folder of them, with [prices.NAME]")
    both = parser.add_argument_group("always")
    both.add_argument("--seed", type=int, help="of the arrivals and the times of batches (1)")
    both.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots there")
    both.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Simulate the load and print what it got."""
    if not (0 if args.scale else 1) <= args.replicas <= MAX_REPLICAS or not 0 <= args.cores <= 4096:
        raise CommandFailed(f"--replicas must be 1 to {MAX_REPLICAS}, --cores from 0 to 4096")
    if args.html is not None and not args.html.parent.is_dir():
        raise CommandFailed(f"{args.html}: there is no such folder")
    profiles = _profiles(args.profile)
    if args.scenario is None and args.url is None:  # with a file, its streams have their own
        if len(profiles) > 1:
            raise CommandFailed("several profiles: give a scenario file, or --url http://host/v2/models/NAME/infer")
        args.url = f"http://simulated/v2/models/{next(iter(profiles))}/infer"
    scenario = scenario_of(args)
    snapshot = None if args.policies is None else explain.snapshot_of(args.policies)
    if args.scale is not None:
        pool = None if snapshot is None else snapshot.pools.get(args.scale)
        if pool is None or pool.scaling is None:
            raise CommandFailed(f"--scale: --policies has no pool {args.scale[:64]!r} with a scaling table")
    document = simulate(
        scenario,
        profiles,
        Servers(replicas=args.replicas, cores=args.cores, scale=args.scale or "", begins_s=begins(args.begins)),
        snapshot=snapshot,
        prices=read_prices(Path(args.prices)) if args.prices else [],
    )
    print(json.dumps(document) if args.json else "\n".join(as_text(document)))
    if args.html is not None:
        write(args.html, as_page(document))
    return 0


def begins(text: str) -> float:
    """Return the time of `--begins` in epoch seconds. Raises CommandFailed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or not 1971 <= moment.year < 3000:
        raise CommandFailed(f"--begins must be a time in UTC such as 2026-01-05T07:30, not {text[:64]!r}")
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def simulate(
    scenario: Scenario,
    profiles: dict[str, Profile],
    servers: Servers,
    *,
    snapshot: Snapshot | None = None,
    prices: Sequence[Price] = (),
) -> dict[str, Any]:
    """Return the document of `oriel load` for a simulated load, with `simulation` beside it. Raises CommandFailed.

    profiles: profiles of the models, by name. servers: their number is at least the minimum of the pool that they
    follow. snapshot: policy documents, if calls pass a gateway. prices: documents, of which today's prices apply.
    """
    requests = [request_of(stream) for stream in scenario.stream]
    for stream, request in zip(scenario.stream, requests, strict=True):
        profile = profiles.get(request.model)
        if profile is None:
            known = ", ".join(sorted(profiles))
            raise CommandFailed(
                f"stream {stream.name!r}: there is no profile of model {request.model!r}, only of {known}"
            )
        if request.rows > max(1, profile.max_rows):
            raise CommandFailed(f"stream {stream.name!r}: {request.rows} rows are more than the model's max_rows")
        if snapshot is not None and stream.target_ms is None:
            stream.target_ms = tenant_of(snapshot, stream.name, stream.key).tier.target_s * 1e3
    _bounded(scenario)
    if snapshot is not None and servers.scale and (table := snapshot.pools[servers.scale].scaling) is not None:
        servers = replace(servers, replicas=max(servers.replicas, table.minimum))
    load = VirtualLoad(scenario, requests, profiles, servers, snapshot)
    document = as_document(scenario, load.run(), version=installed_version())
    today = datetime.now(UTC).date().isoformat()
    applying = {name: price_at(prices, name, today) for name in {each.device_class for each in profiles.values()}}
    return {
        **document,
        "simulation": used(load.use, profiles, document, applying, through_gateway=snapshot is not None),
    }


def _bounded(scenario: Scenario) -> None:
    calls = 0.0
    for phase in scenario.phase:
        rate = phase.rate if phase.rate is not None else sum(phase.rates.values())
        calls += phase.seconds * (rate or 0.0) * (max(1.0, phase.ramp_factor) if phase.arrivals == "ramp" else 1.0)
    if calls > MAX_CALLS:
        raise CommandFailed(f"the load has about {calls:.0f} calls, at most {MAX_CALLS} are simulated")


def _profiles(paths: Sequence[Path]) -> dict[str, Profile]:
    found: dict[str, Profile] = {}
    for path in paths:
        profile = read(path)
        if profile.model in found:
            raise CommandFailed(f"{path}: there is another profile of model {profile.model!r}")
        found[profile.model] = profile
    return found
