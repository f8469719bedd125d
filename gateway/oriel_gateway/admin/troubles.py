"""Names what is wrong around the gateway, for console, `oriel top` and `/decisions`.

These are servers in trouble, a limiter that is away, a usage ledger that cannot be written, a certificate that ends.
A server is in trouble if it is ejected, gets no calls for some of its models, or comes and goes.
"""

from itertools import islice
from time import gmtime, monotonic, strftime, time
from typing import Final

from oriel_gateway.core import Gateway
from oriel_gateway.limits.shared import SharedLimiter
from oriel_gateway.limits.worker_link import WorkerLink
from oriel_gateway.pools.endpoint_state import FLAPS, FLAPS_WITHIN_S, EndpointState
from oriel_wire.engine.tls import Certificates
from oriel_wire.usage.lines import LedgerCounts

MOST: Final = 6  # servers that are named
ENDS_SOON_S: Final = 3 * 24 * 3600.0  # as the page for the certificate


def troubles(
    gateway: Gateway, certificates: Certificates | None = None, usage: LedgerCounts | None = None
) -> list[str]:
    """Return one sentence for each trouble; of servers the first MOST, and how many there are beyond them.

    certificates: those of the public ports. usage: counts of the gateway's usage ledger.
    """
    found = []
    now = monotonic()
    if certificates is not None and (left_s := certificates.expires_at - time()) < ENDS_SOON_S:
        ends = "expired at" if left_s <= 0.0 else "expires at"
        at = strftime("%Y-%m-%d %H:%M UTC", gmtime(certificates.expires_at))
        found.append(f"the certificate of the public ports {ends} {at}: from then on callers cannot connect")
    if usage is not None and usage.write_error:
        found.append(f"the usage ledger cannot be written, its lines wait in memory: {usage.write_error}")
    if isinstance(gateway.limiter, SharedLimiter):
        client = gateway.limiter.ledger_client
        ledger = "the parent of the workers" if isinstance(gateway.limiter.ledger, WorkerLink) else "Redis"
        if not client.up:
            found.append(f"{ledger} does not answer: each gateway admits its share of the limits")
        elif client.doubtful(now):
            found.append(f"{ledger} answers again after it was away or slow: nothing to do unless this comes back")
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
