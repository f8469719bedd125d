"""Six days of a pool that scales, in virtual time: Oriel's rules beside Knative's and a rate rule.

    [--days zero ramp ...] [--seeds 1 2 3]

One model of 100 ms in a pool of 0 to 6 replicas that take 10 to 20 s to start (5 s of node, 5 to 15 s of process);
three tiers of equal shares. Every rule stands behind the same gateway: its queue, tiers, holds and permits are the real
ones (`oriel simulate serve`). In the day `models` a second model of 20 ms takes over, in `failure` replicas are lost.
A HorizontalPodAutoscaler looks every 15 s; the second at which it does differs by seed. Knative decides every 2 s.

    gold in time    answers within 500 ms, of all calls of gold (bound: Knative's)
    lost            calls that were not answered: 503, 504 (bound: Knative's)
    replica-s       seconds of all replicas from the order of each to its end (bound: 0.75 times Knative's)

Exit status 1 if one of Oriel's bounds was missed on a day.
"""

import argparse
import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from math import ceil
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from oriel_cli.table import columns
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.scaling.records import PoolRecord
from oriel_tools.load.scenario import Phase, Scenario, Stream, checked
from oriel_tools.simulate.autoscaled import PERIOD_S, Keda, Planned, Rule
from oriel_tools.simulate.profile import Profile, Size
from oriel_tools.simulate.serve import simulate
from oriel_tools.simulate.virtual import Servers

TIERS = {"gold": (500, 5000), "silver": (2000, 8000), "bronze": (10_000, 30_000)}
MOST = 6
START_S = (10.0, 20.0)
GOAL = 0.75  # of the replica-seconds of Knative's rule
TABLE = (
    f"minimum = 0\nmaximum = {MOST}\nspare = 1\ncall_ms = 100\n"
    "start_ms = 20000\nkeep_alive_ms = 60000\nhold_ms = 60000\n"
)


def phases(*stretches: tuple[float, float, float]) -> list[Phase]:
    """Return phases from seconds, calls per second at the beginning and at the end."""
    return [
        Phase(
            name=str(number),
            seconds=seconds,
            rates=dict.fromkeys(TIERS, first / 3),
            arrivals="poisson" if first == last else "ramp",
            ramp_factor=last / first if first else 1.0,
        )
        for number, (seconds, first, last) in enumerate(stretches)
    ]


ZERO = ((60, 0, 0), (20, 15, 15), (70, 0, 0), (150, 2, 40), (60, 40, 40), (60, 0, 0))
DAYS: dict[str, Sequence[tuple[float, float, float]]] = {
    "zero": ZERO,
    "ramp": ((120, 2, 2), (300, 2, 50), (120, 50, 50), (60, 0, 0)),
    "bursts": ((120, 4, 4), (30, 30, 30), (120, 4, 4), (30, 30, 30), (120, 4, 4), (30, 30, 30), (120, 4, 4)),
    "diurnal": ((120, 1, 1), (400, 1, 40), (200, 40, 40), (400, 40, 1), (120, 1, 1)),
    "models": ((60, 0, 0), (200, 20, 20), (200, 20, 20)),
    "failure": ((60, 2, 2), (60, 2, 30), (300, 30, 30)),
}
CRASHES = {"failure": (180, 240, 241)}


def documents() -> Snapshot:
    """Return the documents of the tiers, one tenant of each, and the pool `p`."""
    tiers = "".join(
        f"[tiers.{name}]\nband = {band}\ntarget_ms = {target}\ngive_up_ms = {give_up}\n"
        f'[tenants.{name}]\ntier = "{name}"\nmodels = ["*"]\n'
        f'keys = [{{ sha256 = "{sha256(name.encode()).hexdigest()}" }}]\n'
        for band, (name, (target, give_up)) in enumerate(TIERS.items())
    )
    pool = f'[pools.p]\ndiscover = "dns:127.0.0.1:1"\nmax_inflight = 64\n[pools.p.scaling]\n{TABLE}'
    return compile_documents({"all.toml": f'{tiers}{pool}[[routes]]\nmodel = "*"\npool = "p"\n'.encode()})


class ByConcurrency(Rule):
    """Knative's autoscaler (KPA): 0.7 calls at once per replica, as a mean of 60 s, or of 6 s in panic.

    Panic begins when the short window wants twice the ready replicas and lasts a minute beyond that; in it the number
    never falls. It decides every 2 s, falls to half at most, and to none after 30 s without a call in a minute.
    """

    def __init__(self, snapshot: Snapshot, pool: str, *, looks_at: int) -> None:
        self._calls: deque[float] = deque(maxlen=60)
        self._panic_until = -1
        self._most = self._idle_since = self._wanted = 0

    def __call__(self, record: PoolRecord, second: int, replicas: int, ready: int) -> int:
        self._calls.append(record.held + record.in_flight)
        if replicas and second % 2:
            return self._wanted
        calls, there = list(self._calls), max(1, ready)
        stable, urgent = fmean(calls) / 0.7, ceil(fmean(calls[-6:]) / 0.7 - 1e-9)
        wanted = max(ceil(stable - 1e-9), ready // 2)
        if urgent >= 2 * there:
            self._most = self._most if second <= self._panic_until else 0
            self._panic_until = second + 60
        if second <= self._panic_until:
            self._most = wanted = max(self._most, ready, urgent, wanted)
        if stable > 0.0:
            self._idle_since = second
        self._wanted = min(MOST, max(1, wanted)) if second - self._idle_since < 30 and (replicas or stable) else 0
        return self._wanted


class ByRate(Rule):
    """KEDA on the rate of a minute, for replicas that are 70 % busy, with the autoscaler's default window of 300 s."""

    def __init__(self, snapshot: Snapshot, pool: str, *, looks_at: int) -> None:
        self._keda = Keda(minimum=0, maximum=MOST, settle_s=300.0, looks_at=looks_at)

    def __call__(self, record: PoolRecord, second: int, replicas: int, ready: int) -> int:
        rate = sum([sum(tier.arrivals) for tier in record.tiers.values()]) / 60
        return self._keda.replicas(rate > 0.0, rate * 0.1 / 0.7, replicas, second)


RULES: dict[str, Callable[..., Rule]] = {
    "oriel": Planned,
    "knative": ByConcurrency,
    "rate / 0.7": ByRate,
}


class Figures(NamedTuple):
    """The figures of one day under one rule.

    calls: their number. gold: the share of gold in time. lost: calls without an answer. replica_s: replica-seconds.
    """

    calls: float
    gold: float
    lost: float
    replica_s: float


def simulated(day: str, rule: Callable[..., Rule], seed: int) -> Figures:
    """Return the figures of one day under one rule."""
    profiles = {
        name: Profile(model=name, max_rows=0, sizes=[Size(rows=1, mean_ms=ms)], overhead_ms=2.0)
        for name, ms in (("m", 100.0), ("n", 20.0))
    }
    made = phases(*DAYS[day])
    streams = [Stream(name=tier, tier=tier, key=tier, url="http://x/v2/models/m/infer") for tier in TIERS]
    if day == "models":
        streams += [Stream(name=f"{tier}-n", tier=tier, key=tier, url="http://x/v2/models/n/infer") for tier in TIERS]
        made[1].rates = {**dict.fromkeys(TIERS, 20 / 3), **{f"{tier}-n": 20 / 3 for tier in TIERS}}
        made[2].rates = {**dict.fromkeys(TIERS, 5 / 3), **{f"{tier}-n": 80 / 3 for tier in TIERS}}
    else:
        del profiles["n"]
    scenario = checked(Scenario(stream=streams, phase=made, seed=seed), Path())
    servers = Servers(
        replicas=0,
        cores=1,
        scale="p",
        rule=partial(rule, looks_at=7 * seed % PERIOD_S),
        start_s=START_S,
        crashes=CRASHES.get(day, ()),
    )
    found = simulate(scenario, profiles, servers, snapshot=documents())
    every = [phase["tiers"] for phase in found["phases"]]
    tiers = [each for phase in every for each in phase.values()]
    gold = sum([phase["gold"]["scheduled"] for phase in every])
    calls = sum([each["scheduled"] for each in tiers])
    return Figures(
        calls=calls,
        gold=sum([(phase["gold"]["attainment"] or 0.0) * phase["gold"]["scheduled"] for phase in every]) / gold,
        lost=calls - sum([each["good"] for each in tiers]),
        replica_s=found["simulation"]["replica_seconds"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", nargs="+", choices=DAYS, default=list(DAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    args = parser.parse_args()
    rows, missed = [], False
    for day in args.days:
        means = {
            name: Figures(*map(fmean, zip(*[simulated(day, rule, seed) for seed in args.seeds], strict=True)))
            for name, rule in RULES.items()
        }
        peer = means["knative"]
        for name, each in means.items():
            kept = each.gold >= peer.gold, each.lost <= peer.lost, each.replica_s <= GOAL * peer.replica_s
            missed = missed or name == "oriel" and not all(kept)
            figures = f"{each.calls:.0f}", f"{each.gold:.2%}", f"{each.lost:.0f}", f"{each.replica_s:.0f}"
            verdict = ", ".join(["met" if one else "MISSED" for one in kept]) if name == "oriel" else ""
            rows.append((day, name, *figures, f"{each.replica_s / peer.replica_s:.2f}", verdict))
    heading = ("day", "rule", "calls", "gold in time", "lost", "replica-s", "x Knative", "gold, lost, replica-s")
    print("\n".join(columns(heading, rows, right=range(2, 7))))
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
