"""One address of a pool: what is known about it, and its connections over HTTP/1.1."""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from copy import copy
from enum import StrEnum
from math import inf
from time import monotonic

from oriel_gateway.pools.http_probe import CONNECTED, INDEX, MAX_INDEX_BYTES, UNREACHABLE, HttpProbe, states_in
from oriel_policies.documents import Pool
from oriel_policies.upstreams.ejection import SUSPECT_S, Ejection, Record
from oriel_policies.upstreams.picking import PeakEwma
from oriel_wire.discovery.discovery import Address
from oriel_wire.engine.upstream import Endpoint
from oriel_wire.h1.response import ResponseMemo

_READY = {200: True, 204: True, 400: False, 404: False, 503: False}  # Triton answers 400, other servers 404 or 503

_OF_MODELS = "/v2/health/ready"
_MODELS_MISSING = 400  # the answer there while a model is not ready; a server that stops gives another one
_OF_SERVICES = "/health/ready"
INDEX_EVERY_S = 0.25
MAX_RECORDS = 64
FLAPS, FLAPS_WITHIN_S = 3, 60.0  # a server that is lost so often in this time comes and goes


class Reach(StrEnum):
    """The latest finding about an endpoint: from a probe, or from an attempt to connect."""

    UNKNOWN = "unknown"  # the endpoint is used nevertheless, because a pool may have no probe
    READY = "ready"
    NOT_READY = "not_ready"  # its readiness probe failed, or Kubernetes listed it as not ready
    UNREACHABLE = "unreachable"  # it does not accept connections


class EndpointState:
    """The state of one address in its pool, whatever its protocol. Its connections are the endpoint's other half.

    outstanding: requests under way.
    record: the health record of all its answers.
    records: the same by model, for up to `MAX_RECORDS` of them; with one model its record is `record` itself.
    withheld_until: models whose calls go to other endpoints, and until when.
    trial: answers that are missing until the endpoint is trusted again after an ejection; 0 if it is trusted.
    doubted_s: the time until which the endpoint is suspected to be dying.
    leaving: True once the discovery no longer names the address.
    pod: the UID of the Kubernetes pod; "" if it is not known.
    lost_attempts: attempts to connect in a row that were given up.
    waiting: calls that wait inside it, of whichever gateway, by the latest report of an engine.
    """

    outstanding: int
    heard: bool
    connect_s: float  # the longest time that a connection took

    def __init__(self, address: Address, pool: Pool) -> None:
        self.address = address
        self.cost = PeakEwma()
        self.record = Record()
        self.records: dict[str, Record] = {}
        self.ejection = Ejection()
        self.withheld_until: dict[str, float] = {}
        # Calls that are held for a server which is ready have to wait for its first probe.
        self.reach = Reach.UNREACHABLE if pool.scaling is not None and pool.probe else Reach.UNKNOWN
        self.trial = 0
        self.leaving = False
        self.pod = ""
        self.lost_attempts = self.waiting = 0
        self.probing = False
        self.doubted_s = 0.0
        self.probe_due_s = 0.0
        self.probe_misses = 0
        self.lost_s: deque[float] = deque(maxlen=16)  # when it could not be used any more, the latest times
        self.probed_s = 0.0  # when the probe under way began
        self._index_due_s = 0.0  # when the index of its models may be read again

    def record_of(self, model: str) -> Record:
        """Return the record of a model's answers, a new one if there is none; the oldest is dropped if they are too
        many.
        """
        records = self.records
        if model not in records:
            if len(records) == 1:
                records[next(iter(records))] = copy(self.record)
            elif len(records) >= MAX_RECORDS:
                del records[next(iter(records))]
            records[model] = Record() if records else self.record
        return records[model]

    def withheld(self, now: float) -> dict[str, float]:
        """Return the models whose calls go to other endpoints now, and until when."""
        return {model: until_s for model, until_s in self.withheld_until.items() if until_s > now}

    def reads_index(self) -> bool:
        """Return whether a server that is not ready is asked for the states of its models, now and not just before."""
        now = monotonic()
        due = self.reach is Reach.READY or now >= self._index_due_s
        if due:
            self._index_due_s = now + INDEX_EVERY_S
        return due

    def reach_by(self, states: Collection[str]) -> Reach:
        """Return the finding about a server that says it is not ready, by the states of its models.

        One model that cannot be loaded makes such a server not ready for ever, and its other models serve. While it
        loads the first ones, their calls wait for all of them.
        """
        begins = "LOADING" in states and self.reach is not Reach.READY
        return Reach.READY if "READY" in states and not begins else Reach.NOT_READY

    @property
    def state(self) -> str:
        """The state for people: `ejected:<cause>`, or the reach."""
        cause = self.ejection.cause
        return f"ejected:{cause.value}" if cause is not None else self.reach.value


class HttpEndpoint(Endpoint, EndpointState):
    """An upstream address with its connections. prober: separate connections for probes. meter: those for metrics."""

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
            *address, connect_timeout_s=pool.connect_timeout_s, max_response_bytes=MAX_INDEX_BYTES, memo=self.memo
        )
        self.meter = self._meter(pool)

    def probe(
        self, timeout_s: float, path: str, done: Callable[[Reach | None], None], *, attempt_s: float = 0.0
    ) -> None:
        """Probe the endpoint at `path`, "" if a connection is enough.

        done: called once with the result; None means no usable answer. attempt_s: see `HttpProbe`.
        """

        def probed(status: int | None) -> None:
            if status == _MODELS_MISSING and path == _OF_MODELS and self.reads_index():
                index = HttpProbe(
                    self.prober,
                    INDEX,
                    timeout_s,
                    lambda _: done(self.reach_by(states_in(index.body))),
                )
            else:
                done(_reach(status, path))

        HttpProbe(self.prober, path, timeout_s, probed, attempt_s=attempt_s)

    def _meter(self, pool: Pool) -> Endpoint:
        if not pool.metrics_port:
            return self.prober
        return Endpoint(self.host, pool.metrics_port, max_response_bytes=MAX_INDEX_BYTES, memo=self.memo)

    def adopt(self, pool: Pool) -> None:
        """Adopt the new bounds of the pool."""
        if self.meter.port != (pool.metrics_port or self.port):
            self.meter.close_stale(inf)
            self.meter = self._meter(pool)
        self.connect_timeout_s = self.prober.connect_timeout_s = pool.connect_timeout_s
        self.max_idle_s = pool.idle_timeout_s
        self.max_response_bytes = pool.max_response_bytes

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        HttpProbe(self.prober, f"/v2/models/{model}/ready", timeout_s, lambda status: done(_READY.get(status or 0)))

    def tidy(self, now: float) -> None:
        self.close_stale(now)
        self.prober.close_stale(now)
        self.meter.close_stale(now)

    async def close(self) -> None:
        await Endpoint.close(self)
        await self.prober.close()
        await self.meter.close()


def patience_s(these: Iterable[EndpointState]) -> float:
    """Return how long to wait for a connection while other endpoints are usable: well beyond what any of these ever
    took.
    """
    return max(SUSPECT_S, 8.0 * max((member.connect_s for member in these), default=0.0))


def _reach(status: int | None, path: str) -> Reach | None:
    if status is None:
        return None
    if status == UNREACHABLE:
        return Reach.UNREACHABLE
    # a service of another make, which is up and does not know Oriel's path
    foreign = path == _OF_SERVICES and 400 <= status < 500
    return Reach.READY if status == CONNECTED or 200 <= status < 300 or foreign else Reach.NOT_READY
