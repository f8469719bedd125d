"""`oriel simulate scale`: compares ways of scaling a pool in virtual time, on synthetic or recorded loads."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_cli.policies import explain
from oriel_cli.table import columns
from oriel_policies.scaling import PoolScaling, TierScaling, Window
from oriel_tools.load.arrivals import trace_offsets
from oriel_tools.simulate.cluster import Cluster
from oriel_tools.simulate.contestants import (
    UTILISATION,
    ByConcurrency,
    ByDeadline,
    ByProcessor,
    ByRate,
    Contestant,
)
from oriel_tools.simulate.hindsight import hindsight
from oriel_tools.simulate.loads import MAX_CALLS, SYNTHETIC, Load, recorded, synthetic

BEST = "best in hindsight"
BOUND = "lower bound"
GOAL = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A tier of the simulated calls.

    share: the part of all calls that are of this tier.
    """

    name: str
    target_s: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a policy. attainment: share of calls in time, by tier, without those that still wait at the end.
    mean_replicas: ready and starting ones. times_best: its replica-seconds, in those of the best in hindsight.
    changes: of direction."""

    load: str
    policy: str
    attainment: dict[str, float]
    replica_seconds: float
    mean_replicas: float
    times_best: float
    changes: int


def add_arguments(scale: argparse.ArgumentParser) -> None:
    """The flags of `simulate scale`."""
    scale.add_argument(
        "--load",
        action="append",
        choices=sorted(SYNTHETIC),
        help="a synthetic load, may be repeated (default: all)",
    )
    scale.add_argument(
        "--trace",
        metavar="FILE",
        help="a recorded load instead: 'seconds' or 'seconds,tier' a line; or a gateway's access log",
    )
    scale.add_argument(
        "--tier",
        action="append",
        metavar="NAME:TARGET_S[:SHARE]",
        help="most urgent first, may be repeated (default: gold:0.5:1)",
    )
    scale.add_argument("--service-ms", type=float, default=100.0, metavar="MS", help="of a call (%(default)s)")
    scale.add_argument("--start-s", type=float, default=20.0, metavar="S", help="of a replica (%(default)s)")
    scale.add_argument("--minimum", type=int, default=1, metavar="N", help="of replicas (%(default)s)")
    scale.add_argument("--maximum", type=int, default=100, metavar="N", help="of replicas (%(default)s)")
    scale.add_argument(
        "--spare", type=int, default=0, metavar="N", help="replicas beyond the load's need (%(default)s)"
    )
    scale.add_argument("--policies", metavar="DIR|URL", help="documents: the bounds of their --pool instead of these")
    scale.add_argument("--pool", metavar="NAME", help="a pool of --policies with a scaling table")
    scale.add_argument(
        "--begins",
        default="2026-01-05T00:00",
        metavar="TIME",
        help="when the load begins, in UTC, for the pool's schedule (%(default)s, a Monday)",
    )
    scale.add_argument("--rate", type=float, default=1.0, metavar="X", help="times the synthetic loads' rate")
    scale.add_argument("--gateways", type=int, default=1, metavar="N", help="that share the calls (%(default)s)")
    scale.add_argument("--seed", type=int, default=1, metavar="N", help="of the synthetic loads (%(default)s)")
    scale.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Simulate every load with every policy and print what they reached."""
    if not 0 <= args.minimum <= args.maximum <= 1000 or args.maximum < 1 or not 1 <= args.gateways <= 64:
        raise CommandFailed("0 <= --minimum <= --maximum <= 1000, --gateways is 1 to 64")
    if not 1.0 <= args.service_ms <= 600_000.0 or not 1.0 <= args.start_s <= 3600.0 or not 0.01 <= args.rate <= 100.0:
        raise CommandFailed("--service-ms is 1 to 600000, --start-s 1 to 3600, --rate 0.01 to 100")
    tiers = [_tier(text) for text in args.tier or ["gold:0.5:1"]]
    if len({tier.name for tier in tiers}) < len(tiers):
        raise CommandFailed("two tiers have the same name")
    pool, schedule, weights = _pool(args)
    begins_s = begins(args.begins)
    results = []
    for load in _loads(args, tiers):
        compared = compare(
            load,
            tiers,
            pool,
            service_s=args.service_ms / 1e3,
            gateways=args.gateways,
            weights=weights,
            schedule=schedule,
            begins_s=begins_s - load.measured_from,
        )
        results.append(compared)
        if not args.json:
            print("\n".join([*_lines(load, results[-1], tiers), ""]))
    if args.json:
        print(json.dumps([asdict(result) for each in results for result in each]))
    return 0


def _pool(args: argparse.Namespace) -> tuple[PoolScaling, Sequence[Window], Mapping[str, float]]:
    """Return the pool, its schedule and the weights of its tiers: from the documents if they are named, else from the
    flags.
    """
    if not args.policies and not args.pool:
        if not 0 <= args.spare <= args.maximum:
            raise CommandFailed("--spare is 0 to --maximum")
        found = PoolScaling(minimum=args.minimum, maximum=args.maximum, spare=args.spare, start_s=args.start_s)
        return found, (), {}
    if not args.policies or not args.pool:
        raise CommandFailed("--policies and --pool go together")
    pool = explain.snapshot_of(args.policies).pools.get(args.pool)
    if pool is None or pool.scaling is None:
        raise CommandFailed(f"--pool: the documents have no pool {args.pool[:64]!r} with a scaling table")
    table = pool.scaling
    found = PoolScaling(
        minimum=table.minimum,
        maximum=min(1000, table.maximum),
        spare=table.spare,
        start_s=table.start_s,
        miss_share=table.miss_share,
        keep_alive_s=table.keep_alive_s,
    )
    return found, table.schedule, table.weights


def begins(text: str) -> float:
    """Return the time of `--begins` in epoch seconds. Raises CommandFailed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or not 1971 <= moment.year < 3000:
        raise CommandFailed(f"--begins is a time in UTC such as 2026-01-05T07:30, not {text[:64]!r}")
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def compare(
    load: Load,
    tiers: Sequence[Tier],
    pool: PoolScaling,
    *,
    service_s: float,
    gateways: int,
    weights: Mapping[str, float] | None = None,
    schedule: Sequence[Window] = (),
    begins_s: float = 0.0,
) -> list[Result]:
    """Compare the policies on a load, beside the best in hindsight and a bound that no schedule can beat.

    All begin with the pool's minimum. A load with a warm-up begins with enough for its first rate, because every policy
    has settled before it is measured. The bound is the time that replicas are busy with the calls that have to be in
    time. The best is the schedule of `hindsight`, or a policy's that serves as many calls for less.
    weights, schedule: of the pool, for our own policy. begins_s: what the wall clock shows at second 0.
    """
    settled = ceil(load.first_rate * service_s / UTILISATION) if load.measured_from else 0
    initial = max(pool.minimum, min(pool.maximum, settled))
    weights = weights or {}
    scaling = {
        tier.name: TierScaling(band=band, target_s=tier.target_s, weight=weights.get(tier.name, 1.0))
        for band, tier in enumerate(tiers)
    }

    def begin(gateways: int) -> Cluster:
        return Cluster(
            load.calls,
            [tier.target_s for tier in tiers],
            [tier.name for tier in tiers],
            service_s=service_s,
            start_s=pool.start_s,
            replicas=initial,
            measured_from=load.measured_from,
            gateways=gateways,
        )

    best = hindsight(begin(0), load.seconds, minimum=pool.minimum, maximum=pool.maximum, miss_share=1.0 - GOAL)
    ended: list[tuple[str, Cluster, list[int]]] = []
    own = ByDeadline(pool, scaling, schedule, begins_s)
    contestants: list[Contestant] = [own, ByRate(pool), ByConcurrency(pool), ByProcessor(pool)]
    for contestant in contestants:
        cluster = begin(gateways if isinstance(contestant, ByDeadline) else 0)
        numbers = []
        for number in range(1, load.seconds + 1):
            cluster.advance(float(number))
            contestant.second(cluster, number)
            if number >= load.measured_from:
                numbers.append(cluster.replicas)
        ended.append((contestant.name, cluster, numbers))
    as_good = [cluster.replica_s for _, cluster, _ in ended if sum(cluster.met) >= sum(best.met)]
    best.replica_s = min([best.replica_s, *as_good])
    least = Result(
        load=load.name,
        policy=BOUND,
        attainment=dict.fromkeys(best.names, GOAL),
        replica_seconds=GOAL * sum(best.offered) * service_s,
        mean_replicas=GOAL * sum(best.offered) * service_s / (load.seconds - load.measured_from),
        times_best=GOAL * sum(best.offered) * service_s / best.replica_s if best.replica_s else 1.0,
        changes=0,
    )
    reached = [(BEST, best, []), *ended]
    return [*(_result(load, name, cluster, best, numbers) for name, cluster, numbers in reached), least]


def _result(load: Load, policy: str, cluster: Cluster, best: Cluster, numbers: Sequence[int]) -> Result:
    return Result(
        load=load.name,
        policy=policy,
        attainment={
            name: cluster.met[index] / max(1, cluster.offered[index] - len(cluster.waiting[index]))
            for index, name in enumerate(cluster.names)
        },
        replica_seconds=cluster.replica_s,
        mean_replicas=cluster.replica_s / (load.seconds - load.measured_from),
        times_best=cluster.replica_s / best.replica_s if best.replica_s else 1.0,
        changes=changes_of_direction(numbers),
    )


def changes_of_direction(numbers: Sequence[int]) -> int:
    """Count how often a rise follows a fall, or a fall follows a rise."""
    changes, before, rising = 0, -1, None
    for number in numbers:
        if before >= 0 and number != before:
            changes += rising is not None and rising is not (number > before)
            rising = number > before
        before = number
    return changes


def _tier(text: str) -> Tier:
    name, _, rest = text.partition(":")
    target, _, share = rest.partition(":")
    try:
        tier = Tier(name=name, target_s=float(target), share=float(share or 1.0))
    except ValueError:
        raise CommandFailed(f"--tier takes NAME:TARGET_S[:SHARE], not {text[:64]!r}") from None
    if not name or not 0.001 <= tier.target_s <= 86_400.0 or not 0.0 < tier.share <= 1e6:
        raise CommandFailed("--tier: a name, a target of 0.001 to 86400 s and a share above 0")
    return tier


def _loads(args: argparse.Namespace, tiers: Sequence[Tier]) -> Iterator[Load]:
    if args.trace:
        if args.load:
            raise CommandFailed("give either --load or --trace")
        yield _recorded(args.trace, tiers)
        return
    shares = [tier.share for tier in tiers]
    for name in args.load or SYNTHETIC:
        shape, seconds = SYNTHETIC[name]
        if args.rate * seconds * max(shape(float(second)) for second in range(seconds)) > MAX_CALLS:
            raise CommandFailed(f"--rate: {name} would have more than {MAX_CALLS} calls")
        yield synthetic(name, shares, rate=args.rate, seed=args.seed)


def _recorded(path: str, tiers: Sequence[Tier]) -> Load:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        offsets = [trace_offsets(iter(lines), tier.name) for tier in tiers]
    except (OSError, UnicodeDecodeError) as refused:
        raise CommandFailed(f"{path}: cannot be read ({refused})") from refused
    except ValueError as wrong:
        raise CommandFailed(f"{path}: {wrong}") from wrong
    if not any(offsets):
        raise CommandFailed(f"{path}: no call of {', '.join(tier.name for tier in tiers)}")
    if max(each[-1] for each in offsets if each) > 86_400 * 7:
        raise CommandFailed(f"{path}: a recorded load is at most a week long")
    return recorded(Path(path).name, offsets)


def _lines(load: Load, results: Sequence[Result], tiers: Sequence[Tier]) -> list[str]:
    heading = ["policy", *[f"{tier.name} in time" for tier in tiers]]
    heading += ["replica-seconds", "mean", "x best", "changes of direction"]
    rows = []
    for result in results:
        shares = [f"{result.attainment[tier.name]:.2%}" for tier in tiers]
        changes = "" if result.policy in (BEST, BOUND) else str(result.changes)
        figures = [f"{result.replica_seconds:.0f}", f"{result.mean_replicas:.1f}", f"{result.times_best:.2f}", changes]
        rows.append([result.policy, *shares, *figures])
    title = f"{load.name}: {len(load.calls)} calls in {load.seconds} s, measured from {load.measured_from:g} s"
    return [title, *columns(heading, rows, right=range(1, len(heading)))]
