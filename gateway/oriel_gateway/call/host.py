"""The attributes of the gateway that its calls use."""

from mypy_extensions import mypyc_attr

from oriel_gateway.clock import DeadlineClock
from oriel_gateway.identity.callers import Callers
from oriel_gateway.limits import Limiter
from oriel_gateway.observe.records import Records
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.scaling import ScaledPools
from oriel_gateway.routing.target_cache import TargetCache
from oriel_policies.documents import Snapshot
from oriel_wire.engine.large_messages import LargeMessages


@mypyc_attr(allow_interpreted_subclasses=True)
class Host:
    """The part of a gateway that its calls use; `core.Gateway` fills it.

    top_band: the most urgent band of any tier.
    draining: True once clients should open no new connections, because the gateway is about to stop.
    refusing: True once calls that cannot be sent at once are refused, because they would still wait when the gateway
    ends.
    """

    snapshot: Snapshot
    clock: DeadlineClock
    callers: Callers
    records: Records
    targets: TargetCache
    limiter: Limiter
    bodies: LargeMessages
    pools: dict[str, PoolGate]
    scaled: ScaledPools
    top_band: int
    draining: bool
    refusing: bool
