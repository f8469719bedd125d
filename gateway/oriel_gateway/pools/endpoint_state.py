"""One address of a pool: what is known about it, and its connections over HTTP/1.1."""

from collections.abc import Callable, Iterable
from enum import StrEnum

from oriel_gateway.pools.http_probe import HttpProbe
from oriel_policies.documents import Pool
from oriel_policies.ejection import SUSPECT_S, Ejection, Record
from oriel_policies.picking import PeakEwma
from oriel_wire.engine.discovery import Address
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.h1_response import ResponseMemo

_READY = {200: True, 204: True, 400: False, 404: False, 503: False}  # Triton answers 400, other servers 404 or 503


class Reach(StrEnum):
    """The latest finding about an endpoint: from a probe, or from an attempt to connect."""

    UNKNOWN = "unknown"  # the endpoint is used nevertheless, because a pool may have no probe
    READY = "ready"
    NOT_READY = "not_ready"  # its readiness probe failed, or Kubernetes listed it as not ready
    UNREACHABLE = "unreachable"  # it does not accept connections


class EndpointState:
    """The state of one address in its pool, whatever its protocol. Its connections are the endpoint's other half.

    outstanding: requests under way.
    trial: answers that are missing until the endpoint is trusted again after an ejection; 0 if it is trusted.
    doubted_s: the time until which the endpoint is suspected to be dying.
    leaving: whether the discovery does not name the address any more.
    pod: the UID of the Kubernetes pod; "" if it is not known.
    lost_attempts: attempts to connect in a row that were given up.
    """

    outstanding: int
    heard: bool
    connect_s: float  # the longest time that a connection took

    def __init__(self, address: Address, pool: Pool) -> None:
        self.address = address
        self.cost = PeakEwma()
        self.record = Record()
        self.ejection = Ejection()
        # Calls that are held for a server which is ready have to wait for its first probe.
        self.reach = Reach.UNREACHABLE if pool.scaling is not None and pool.probe else Reach.UNKNOWN
        self.trial = 0
        self.leaving = False
        self.pod = ""
        self.lost_attempts = 0
        self.probing = False
        self.doubted_s = 0.0
        self.probe_due_s = 0.0
        self.probe_misses = 0
        self.probed_s = 0.0  # when the probe under way began

    @property
    def state(self) -> str:
        """The state for people: `ejected:<cause>`, or the reach."""
        cause = self.ejection.cause
        return f"ejected:{cause.value}" if cause is not None else self.reach.value


class HttpEndpoint(Endpoint, EndpointState):
    """An upstream address with its connections. prober: separate connections for probes."""

    def __init__(self, address: Address, pool: Pool, memo: ResponseMemo | None = None) -> None:
        Endpoint.__init__(
            self,
            *address,
            connect_timeout_s=pool.connect_timeout_s,
            max_idle_s=pool.idle_timeout_s,
            max_response_bytes=pool.max_response_bytes,
            memo=memo,
        )
        EndpointState.__init__(self, address, pool)
        self.prober = Endpoint(
            *address, connect_timeout_s=pool.connect_timeout_s, max_response_bytes=64 * 1024, memo=self.memo
        )

    def adopt(self, pool: Pool) -> None:
        """Adopt the new bounds of the pool."""
        self.connect_timeout_s = self.prober.connect_timeout_s = pool.connect_timeout_s
        self.max_idle_s = pool.idle_timeout_s
        self.max_response_bytes = pool.max_response_bytes

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        HttpProbe(self.prober, f"/v2/models/{model}/ready", timeout_s, lambda status: done(_READY.get(status or 0)))

    def tidy(self, now: float) -> None:
        self.close_stale(now)
        self.prober.close_stale(now)

    async def close(self) -> None:
        await Endpoint.close(self)
        await self.prober.close()


def patience_s(these: Iterable[EndpointState]) -> float:
    """Return how long to wait for a connection while other endpoints are usable: well beyond what any of these ever
    took.
    """
    return max(SUSPECT_S, 8.0 * max((member.connect_s for member in these), default=0.0))
