"""The gateway, as far as its calls know it."""

from typing import Protocol

from oriel_gateway.clock import DeadlineClock
from oriel_gateway.identity.tickets import Tickets
from oriel_gateway.limits import Limiter
from oriel_gateway.observe.records import Records
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.target_cache import TargetCache
from oriel_policies.documents import Snapshot, Tenant
from oriel_wire.engine.large_messages import LargeMessages


class Host(Protocol):
    """The gateway that a call came to.

    top_band: the most urgent band of any tier. draining: no new connections are welcome. refusing: what cannot be sent
    at once is refused, because it would still wait when the gateway ends.
    """

    snapshot: Snapshot
    clock: DeadlineClock
    tickets: Tickets | None
    records: Records
    targets: TargetCache
    limiter: Limiter
    bodies: LargeMessages
    pools: dict[str, PoolGate]
    top_band: int
    draining: bool
    refusing: bool

    def deadline(self, tenant: Tenant, received_s: float, timeout_ms: str | None) -> float:
        """Return the absolute deadline: the tier's, or an earlier one that the client asked for."""

    def requested_until(self, received_s: float, timeout_ms: str | None, timeout_s: float | None = None) -> float:
        """Return the deadline that a client asked for; infinite if it asked for none."""
