"""Names servers in trouble and a limiter that is away, for console, `oriel top` and `/decisions`.

A server is in trouble if it is ejected, gets no calls for some of its models, or comes and goes.
"""

from itertools import islice
from time import monotonic
from typing import Final

from oriel_gateway.core import Gateway
from oriel_gateway.limits.shared import SharedLimiter
from oriel_gateway.pools.endpoint_state import FLAPS, FLAPS_WITHIN_S, EndpointState

MOST: Final = 6  # servers that are named


def troubles(gateway: Gateway) -> list[str]:
    """Return one sentence for each trouble; of servers the first MOST, and how many there are beyond them."""
    found = []
    now = monotonic()
    if isinstance(gateway.limiter, SharedLimiter):
        client = gateway.limiter.ledger_client
        if not client.up:
            found.append("Redis does not answer: each gateway admits its share of the limits")
        elif client.doubtful(now):
            found.append("Redis was away just now: calls wait for it only briefly")
    gates = [*gateway.pools.values(), *gateway.left_pools]
    servers = [
        f"{gate.name}: {member.address[0]}:{member.address[1]} {what}"
        for gate in gates
        for these in (gate.endpoints, gate.grpc)
        for member in these
        if (what := _trouble(member, now))
    ]
    found += islice(servers, MOST)
    if len(servers) > MOST:
        found.append(f"{len(servers) - MOST} more servers are ejected, get no calls for a model, or come and go")
    return found


def _trouble(member: EndpointState, now: float) -> str:
    cause = member.ejection.cause
    lost = [at for at in member.lost_s if now - at < FLAPS_WITHIN_S]
    flaps = f"was lost {len(lost)} times in the last minute" if len(lost) >= FLAPS else ""
    withheld = member.withheld(now)
    models = f"gets no calls for {len(withheld)} of its models, as {next(iter(withheld))!r}" if withheld else ""
    return " and ".join(filter(None, (f"is ejected ({cause.value})" if cause is not None else "", flaps, models)))
