"""Names the likely cause of late and missed calls: a target that is slower than usual, or a tenant that fills the
queue.

Pure. It reads the calls of the last minute that `Recent` keeps. A cause is named only if one in seven of the latest bad
calls, and no fewer than FEW, have it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Final

from oriel_gateway.admin.console.recent import WINDOW_S, Recent
from oriel_gateway.admin.console.reports import Report

FEW: Final = 8
SHARE: Final = 0.15
MOST_CALLS: Final = 0.5  # share of all calls that one tenant has to exceed


def suspects(recent: Recent, now: float, reports: Mapping[str, Report], usual: Callable[[str], float]) -> Iterator[str]:
    """Yield a sentence for each likely cause, at most two, with what has changed.

    now: monotonic seconds. reports: the latest reports by target. usual: returns a tenant's usual calls a second.
    """
    lost = [
        (each.judged.cause, each.target.route if each.target is not None else "", each.judged.excess_s)
        for each in recent.bad
        if each.judged is not None and now - each.ended_s < WINDOW_S
    ]
    enough = max(FEW, SHARE * len(lost))
    slow = Counter((cause, route) for cause, route, _ in lost if cause in ("logic", "model", "upstream"))
    # A model comes before the services that call it.
    found = sorted((route.startswith("model:"), count, cause, route) for (cause, route), count in slow.items())
    for _, count, cause, route in [each for each in found if each[1] >= enough][-1:]:
        over_s = median(excess_s for *place, excess_s in lost if place == [cause, route])
        report = reports.get(route)
        change = f"; version {report.version} has taken the place of {report.was}" if report and report.was else ""
        yield (
            f"{route} is slow: {count} of the latest {len(lost)} late or missed calls lost their time in {cause}, "
            f"{over_s:.2g} s more than usual{change}"
        )
    if sum(cause == "queue" for cause, *_ in lost) >= enough:
        name, busiest = max(recent.tenants.items(), key=lambda item: item[1].calls)
        if MOST_CALLS < (share := busiest.calls / sum(each.calls for each in recent.tenants.values())) < 1.0:
            rate, before = busiest.calls / max(1.0, recent.covers_s(now)), usual(name)
            yield (
                f"calls wait in the queue, and {share:.0%} of all calls are of tenant {name}: {rate:.2g} a second, "
                f"{before:.2g} in the hour before"
            )
