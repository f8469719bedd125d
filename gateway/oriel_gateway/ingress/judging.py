"""The one order in which every request is judged, whatever protocol it came by: HTTP/1.1, HTTP/2, gRPC or gRPC-Web.

    own pages -> identify -> target -> choices -> overload -> deadline, size, time -> limits -> hold -> open

A protocol supplies a view of its request, a `View`, calls `judge` with it, and `turn_away` with what that raises. A
rule about requests is written here once, in `judge`. A view says what its protocol alone can say: how a client names
what it wants, how its answer is written, and what the bytes of a sender cost who is not known.

The first three steps have the same result for all heads of one shape with the same credentials, as long as the same
documents are in force; a view that has `known` from an equal head skips them. A gRPC call names its model in its
message, so `judge` is called with its metadata, and again when the message is here.
"""

from abc import ABC, abstractmethod
from math import inf
from time import monotonic
from typing import Final

from oriel_gateway.call.call import GatewayCall, Request
from oriel_gateway.call.contracts import Client, Side
from oriel_gateway.call.heads import Known
from oriel_gateway.clock import deadline_of, requested_until
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Refused
from oriel_gateway.http_status import STATUS
from oriel_gateway.identity.keys import still_valid
from oriel_gateway.limits import Grant
from oriel_gateway.observe.record import refused_record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.overload import too_busy
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target, chosen
from oriel_gateway.shared.model_list import ACCEPT_JSON, ModelList
from oriel_gateway.shared.special import attach
from oriel_policies.documents import ApiKey, Tenant
from oriel_wire.observe.semantics import NOWHERE

__all__ = ["NO_MARK", "View", "judge", "turn_away"]

NO_MARK: Final = Mark("", "", "", "")
_LISTS: Final = ("list", "entry")


class View(Request, ABC):
    """A request on its way to become a call: the view of it that its protocol supplies, and what is known of it so far.

    mark: the ids of the request, `NO_MARK` before it was read. tenant: the sender by the tier that serves the request,
    None while the sender is not known. target: None while it is not known. side: the one of the call that it becomes.
    now_s: monotonic seconds at which it is judged. timeout_ms, timeout_s: the time that its client allows, in the words
    of HTTP and of gRPC. size_bytes: bytes of its body, 0 if that is not known. whole: its body is here. streams: more
    messages follow, so that its size does not tell how long it takes. grant: the grant of the limits for its
    beginning. later: its refusal is written in a later turn of the loop, when there is time for it.
    """

    protocol = "http"
    __slots__ = (
        *("gateway", "grant", "known", "later", "now_s", "side", "size_bytes"),
        *("streams", "target", "tenant", "timeout_ms", "timeout_s", "whole"),
    )

    def __init__(self, gateway: Gateway, client: Client | None, mark: Mark, received_s: float, side: Side) -> None:
        self.client = client
        self.head = None
        self.mark = mark
        self.received_s = received_s
        self.gateway = gateway
        self.side = side
        self.tenant: Tenant | None = None
        self.target: Target | None = None
        self.known: Known | None = None
        self.now_s = received_s
        self.timeout_ms: str | None = None
        self.timeout_s: float | None = None
        self.size_bytes = 0
        self.grant: Grant | None = None
        self.later = self.streams = self.whole = False

    @property
    def method(self) -> str:
        """The method that is asked for, "" if it is not known."""
        return ""

    @property
    def served_at(self) -> tuple[str, int]:
        """The address and the port of the listener, for spans of gRPC."""
        return NOWHERE

    @abstractmethod
    def answers_itself(self) -> bool:
        """Return whether the gateway has a page of its own for the request; then it is answered. Raises Refused."""

    @abstractmethod
    def identify(self) -> ApiKey:
        """Return the sender's key, and keep the parsed head for further equal heads if it can be. Raises Refused."""

    @abstractmethod
    def find(self, key: ApiKey) -> Target | None:
        """Return the requested target, and remember it for equal requests; None if its name is in a message that has
        not come. Raises Refused.
        """

    @abstractmethod
    def header(self, name: str) -> str | None:
        """Return the first value of the header field with this lower-case name."""

    @abstractmethod
    def crowds(self, tenant: Tenant) -> bool:
        """Return whether the loop has no time for a request of this tenant."""

    @abstractmethod
    def fits(self, gate: PoolGate, target: Target) -> None:
        """Check the form and the size of the request for its pool. Raises Refused."""

    @abstractmethod
    def count_unknown(self, *, at_fault: bool) -> None:
        """Count a refused request whose sender is not known. at_fault: the refusal is the sender's fault."""

    @abstractmethod
    def answer_refusal(self, refused: Refused, mark: Mark, status: int) -> None:
        """Write the whole answer of a request that does not become a call."""

    def until(self, tenant: Tenant) -> float:
        """Return the deadline: that of the tier, or an earlier one that the client asks for. Raises Refused."""
        deadline = deadline_of(tenant, self.received_s, self.timeout_ms)
        return deadline if self.timeout_s is None else min(deadline, self.received_s + self.timeout_s)


def judge(view: View) -> GatewayCall | None:
    """Judge a request, and begin its call. None: the gateway has answered, or a message is awaited. Raises Refused."""
    gateway, known = view.gateway, view.known
    if known is not None and known.snapshot is gateway.snapshot:
        key, found = known.key, known.target
        if key.expires_at is not None:
            still_valid(key)
        if view.mark.kept:
            gateway.marks.judge(view.mark, key)
    else:
        if view.tenant is None:
            if view.answers_itself():
                return None
            key = view.identify()
            view.tenant = key.tenant
            if view.mark.kept or key.delegated:
                gateway.marks.judge(view.mark, key)
        else:
            key = view.identify()
        sought = view.find(key)
        if sought is None:  # the message says it, and has not come yet
            if gateway.overload.behind and view.crowds(key.tenant):
                raise too_busy()
            return None
        found = sought
    target = found
    if found.choices is not None:
        view.tenant = found.tenant
        target = chosen(found, view.header, view.mark.own)
    view.target = target
    view.tenant = tenant = target.tenant
    if gateway.overload.behind and view.crowds(tenant):
        raise _overloaded(view, target)
    deadline = view.received_s + tenant.tier.give_up_s
    if view.timeout_ms is not None or view.timeout_s is not None:
        deadline = view.until(tenant)
    gate = gateway.pools[target.pool]
    if known is None or target.names or view.size_bytes > gate.pool.max_body_bytes:
        view.fits(gate, target)
    # A call that has further pools (`fallback`) is judged when its body is complete.
    if 0.0 < (left_s := deadline - view.now_s) < gate.slow_s and not (target.fallbacks or view.streams):
        gate.judge_request(target, tenant, view.size_bytes, left_s)
    grant = view.grant
    if grant is None and target.allowances:
        grant = gateway.limiter.acquire(tenant, target, view.size_bytes, view.now_s)
    if gate.slow_s == inf and not (target.fallbacks or view.whole):
        deadline = _held(view, gate, deadline, grant)
    call = GatewayCall(gateway, view, view.side, gate, target, deadline)
    if grant is not None:
        call.limited(grant)
    if target.names and target.names in _LISTS:
        call.lines, call.receiver = ACCEPT_JSON + gateway.targets.tenant_lines(tenant), ModelList()
    if target.special:
        attach(call, gateway.routing, streaming=view.streams)
    return call


def _overloaded(view: View, target: Target) -> Refused:
    """Return the refusal of a request for which the loop has no time: that of its tenant's limits if it is over them.

    It counts against rates as if it had been served, so that a flood is its sender's own doing.
    """
    if target.allowances:
        try:
            grant = view.gateway.limiter.acquire(target.tenant, target, 0, view.now_s)
        except Refused as limited:
            return limited
        if grant is not None:
            grant.settle(0, False, view.now_s)
    return too_busy()


def _held(view: View, gate: PoolGate, deadline: float, grant: Grant | None) -> float:
    """Return the deadline of a request whose pool has no server; see `PoolGate.hold_until`. Raises Refused."""
    assert view.tenant is not None
    requested_s = requested_until(view.received_s, view.timeout_ms, view.timeout_s)
    try:
        until = gate.hold_until(gate.endpoints, view.tenant, view.received_s, requested_s)
    except Refused:
        if grant is not None:
            grant.settle(0, False, monotonic())
        raise
    # Its body has to come within the usual time; the hold begins when it is here (`Call.park`).
    return deadline if until is None else min(deadline, until)


def turn_away(view: View, refused: Refused, status: int = 0) -> None:
    """Answer a request that does not become a call. status: the HTTP status, if it is not that of the refusal's
    outcome.
    """
    mark, tenant = view.mark, view.tenant
    if mark is NO_MARK:
        mark = view.gateway.marks.of(None, None, None)
    status = status or STATUS[refused.outcome]
    record = refused_record(mark, view.method, view.received_s, tenant, view.target, refused.outcome)
    record.protocol = view.protocol
    view.gateway.records.turned_away(refused, record, status, view.served_at)
    if tenant is None:
        view.count_unknown(at_fault=status < 500)
    view.answer_refusal(refused, mark, status)
