"""Makes equal calls of a route marked deterministic once, and keeps their answer for a while.

Two calls are equal that have the same method, line, body and header fields as the upstream gets them, of the same
tenant unless the route is `cache_shared`. Headers that describe the client and not the request (`ABOUT_THE_CLIENT`) are
not sent by a call that is made for all. Calls of different bands do not wait for one another: an urgent one would
inherit the other's place in the queue.

Theory of operation. The first call founds a flight, for which one call is made that belongs to nobody; all callers wait
as its members (state JOINED), each with its own deadline and free to leave. When nobody is left, it is given up. Its
answer, if it is a 200 that may be shared, is kept; the oldest member takes the whole call over with its permit and its
times, as if it had made it, and the others get the same bytes with their own ids.

An error is for the founder alone. The oldest of the rest then leads once more and the others follow it: all at once
they would be what the flight was to keep from a server that has just failed. If that fails as well, each goes on alone,
because in line they would only pass their deadlines. A good answer that is not for all (streams, large ones, cookies)
will not be next time either, so the rest go on their own at once. nginx (`proxy_cache_lock`) and Varnish (waiting
lists, hit-for-miss) do much the same.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from time import monotonic
from typing import Any

from oriel_gateway.call.attempts import note_answer
from oriel_gateway.call.call import GatewayCall, Request
from oriel_gateway.call.contracts import ANSWERING, COLLECT, DONE, JOINED, Call
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.shared.state import KEPT_BYTES, KeptAnswer, RoutingState

ABOUT_THE_CLIENT = ("user-agent",)
VARYING = frozenset(  # fields that a shared answer may vary by: they reach the upstream exactly as the key has them
    {"accept", "accept-encoding", "accept-language", "content-encoding", "content-type", "user-agent"}
    | {"inference-header-content-length"}
)
_NOT_IN_KEY = frozenset({"content-length", *ABOUT_THE_CLIENT})
_NOT_SENT = tuple(f"{name}:".encode() for name in ("content-length", *ABOUT_THE_CLIENT))
_TURN = 64  # the most members that are answered in one turn of the loop, with answers of at most as many bytes:
_TURN_BYTES = 1024 * 1024
_OURS = (b"age:", b"x-oriel-cache:", b"x-oriel-route:")
_NOT_FOR_OTHERS = frozenset({"no-store", "no-cache", "private"})
# Hash of equal calls, band, pool: the name of a pool may have stood for two, one after the other.
Place = tuple[bytes, int, PoolGate]


def answer_key(call: Call, body: bytes) -> bytes | None:
    """Return the hash that equal calls share; None when the client wants an answer of its own (`Cache-Control`)."""
    head, target = call.head, call.target
    if wants_its_own(head.get("cache-control")):
        return None
    owner = "" if target.plan.cache_shared else call.tenant.name
    if target.kind == "service":
        # A body may name models, so a tenant that may not use them must not get an answer that was given while another
        # one might. And a service may answer each tier in its own way.
        tier = call.tenant.tier.name if owner else ""
        owner = "\1".join((owner, tier, *call.tenant.models))
    # The fields as they are sent, each name's values in their order. The order of the names has no meaning.
    sent = sorted((f for f in head.sent_on() if f[0] not in _NOT_IN_KEY), key=lambda field: field[0])
    fields = [f"{name}:{value}" for name, value in sent]
    known = "\0".join((owner, target.plan.name, target.pool, target.line.decode("ascii"), *fields))
    digest = blake2b(known.encode("latin-1"), digest_size=32)
    digest.update(b"\0\0")
    digest.update(body)
    return digest.digest()


def wants_its_own(cache_control: str | None) -> bool:
    """Return whether a client asks for an answer that is nobody else's."""
    return cache_control is not None and not _NOT_FOR_OTHERS.isdisjoint(_words(cache_control))


def answer_from(call: Call, answer: KeptAnswer, how: str, age_s: float) -> None:
    """Answer a call that was not sent. how: "hit" or "joined"."""
    now = monotonic()
    client, mark = call.client, call.mark
    assert client is not None
    lines = [*answer.lines]
    if (grant := call.grant) is not None:
        grant.move(len(answer.body), now)
        lines += grant.lines(now).encode("ascii").split(b"\r\n")[:-1]
    if how == "hit":
        lines.append(b"age: %d" % age_s)
    lines += operator_lines(call)
    waited_s = now - call.queued_s if call.queued_s else 0.0
    lines += (
        f"x-oriel-cache: {how}".encode(),
        f"x-request-id: {mark.request_id}".encode("latin-1"),
        f"traceresponse: {mark.traceresponse()}".encode(),
        f"server-timing: gateway-queue;dur=0.000, gateway-cache;dur={waited_s * 1e3:.3f}".encode(),
    )
    close = client.write_kept(lines, answer.body)
    call.bytes_out = len(answer.body)
    call.end_unsent(200)
    client.answered(close=close)


def operator_lines(call: Call) -> list[bytes]:
    """Return the answer's header lines about route and side, for callers with the scope `operator`."""
    target = call.target
    if not (target.side or target.spills) or "operator" not in call.tenant.scopes:
        return []
    which = f"fallback={target.pool}" if target.spills else f"side={target.side}"
    return [f"x-oriel-route: {target.plan.name}; {which}".encode("ascii", "replace")]


class Member:
    """A call that waits in a flight."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.flight: Flight | None = None


def join(member: Member, routing: RoutingState, key: bytes, body: bytes, *, again: bool = False) -> None:
    """Join the flight for `key`, and start its work if there is none. again: True after a flight that failed."""
    call = member.call
    place = (key, call.tenant.tier.band, call.gate)
    call.state = JOINED
    call.queued_s = call.queued_s or monotonic()
    flight: Flight | None = routing.flights.get(place)
    if flight is not None:
        flight.join(member)
    else:
        flight = routing.flights[place] = Flight(member, routing, place, again)
        flight.start(body)


class Flight:
    """Makes the one call for all its members, and receives its answer.

    The call is not counted as a request and not traced: its members are. It comes from no address: they may be several.
    It is open until it lands or the last member has left; then the next call founds another one. members: oldest first.
    """

    def __init__(self, founder: Member, routing: RoutingState, place: Place, again: bool) -> None:
        first = founder.call
        self.members = {founder: None}
        founder.flight = self
        self._founder = founder
        self._routing = routing
        self._place = place
        self._again = again
        self._head: Any | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        request = Request(None, first.head, first.mark, first.received_s)
        self._call = call = GatewayCall(first.gateway, request, first.side, first.gate, first.target, first.deadline)
        call.lines = first.side.lines_for_others(first, _NOT_SENT)
        call.receiver = self
        call.stick = first.stick
        routing.detached[self] = None

    def start(self, body: bytes) -> None:
        """Ask for a permit."""
        self._call.whole(body)

    def join(self, member: Member) -> None:
        """Take a member, which may wait for longer than all before it."""
        self.members[member] = None
        member.flight = self
        call, deadline = self._call, member.call.deadline
        if deadline > call.deadline:
            call.deadline = deadline
            call.watch_until(deadline)

    def leave(self, member: Member) -> None:
        """A member that is over leaves, unless the flight has landed. Nobody waits for the call after the last one."""
        if member in self.members:
            del self.members[member]
            if not self.members:
                self.cancel()

    def cost_of_leaving(self, member: Member, now: float) -> tuple[bool, float]:
        """Return whether the call was sent, and the seconds that `member` has to pay when it leaves now.

        The last one to leave pays for the work, and the founder for work that failed; else leaving would make it free.
        """
        call = self._call
        if not call.sent_s:
            return False, 0.0
        pays = self._founder is member if call.state == DONE else len(self.members) == 1
        return True, (now - call.permit_s) / call.gate.streams.at_servers if pays else 0.0

    def cancel(self) -> None:
        """Drop the call, because no caller wants the answer any more or the gateway closes."""
        members = self._land()
        self._call.client_left()
        for member in members:
            member.call.client_left()

    def response(self, call: Call, head: Any, data: bytes, complete: bool) -> bool:
        call.response_s = now = monotonic()
        endpoint, took_s = call.endpoint, now - call.sent_s
        if head.status >= 400 and complete and endpoint is not None and self._call.elsewhere(endpoint, head, data, now):
            note_answer(call.endpoints, endpoint, head, now, took_s, call.target.sought)
            return True
        self._call.no_copy()
        if not _shareable(head):
            self._give_away(head, data, complete)
        else:
            call.state = ANSWERING
            call.status = head.status
            self._head = head
            self._take(head, data, complete)
        return True

    def response_data(self, call: Call, data: bytes, complete: bool) -> bool:
        assert self._head is not None
        self._take(self._head, data, complete)
        return True

    def refused(self, call: Call, refused: Refused) -> bool:
        call.finish(refused.outcome)
        members = self._land()
        if members and members[0] is self._founder:
            founder = members.pop(0).call
            founder.ahead, founder.endpoint, founder.tried = call.ahead, call.endpoint, call.tried
            founder.refuse(refused)
        self._go_on(members)
        return True

    def finished(self, call: Call) -> None:
        self._routing.detached.pop(self, None)

    def _take(self, head: Any, data: bytes, complete: bool) -> None:
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > KEPT_BYTES:
            self._give_away(head, b"".join(self._body), complete)
        elif complete:
            self._share(head, b"".join(self._body))

    def _share(self, head: Any, body: bytes) -> None:
        call, routing = self._call, self._routing
        plan = call.target.plan
        answer = KeptAnswer(
            lines=tuple(line for line in head.forward if not line.lower().startswith(_OURS)),
            body=body,
        )
        if plan.cache_s:
            owner = "" if plan.cache_shared else call.tenant.name
            routing.cache.put(self._place[0], owner, answer, answer.size_bytes, call.response_s, plan.cache_s)
        members = self._land()
        self._hand_over(members[0].call, head, body, True)

        def joined(member: Member) -> None:
            routing.answered_from(plan.name, "joined")
            answer_from(member.call, answer, "joined", 0.0)

        _in_turns(members[1:], joined, most=max(1, _TURN_BYTES // answer.size_bytes))

    def _give_away(self, head: Any, data: bytes, complete: bool) -> None:
        """Give an answer to one caller: the founder, or a good one to the oldest member that is left."""
        call = self._call
        members = self._land()
        taker, good = members[0], head.status < 400
        if taker is self._founder or good:
            self._hand_over(taker.call, head, data, complete)
            del members[0]
        else:
            if call.endpoint is not None:
                took_s = call.response_s - call.sent_s
                note_answer(call.endpoints, call.endpoint, head, call.response_s, took_s, call.target.sought)
            call.finish(Outcome.CALLER_LEFT)
        if good:
            _in_turns(members, _alone)
        else:
            self._go_on(members)

    def _go_on(self, members: list[Member]) -> None:
        """Go on after a failure: the oldest leads and the others follow, or all go alone if that was tried."""

        def follow(member: Member) -> None:
            join(member, self._routing, self._place[0], member.call.body(), again=True)

        _in_turns(members, _alone if self._again or len(members) < 2 else follow)

    def _land(self) -> list[Member]:
        """Close the flight; return the members, each of them once."""
        flights = self._routing.flights
        if flights.get(self._place) is self:
            del flights[self._place]
        members = list(self.members)
        self.members.clear()
        return members

    def _hand_over(self, taker: Call, head: Any, data: bytes, complete: bool) -> None:
        """Give the work to `taker`, which from now on has the permit and reads the answer."""
        self._routing.detached.pop(self, None)
        taker.take_over(self._call)
        self._routing.answered_from(self._call.target.plan.name, "miss")
        head = head.copy()
        head.forward = [line for line in head.forward if not line.lower().startswith(_OURS)]
        head.forward.append(b"x-oriel-cache: miss")
        taker.response(head, data, complete)


def _alone(member: Member) -> None:
    """Let a call queue by itself, as it would have done without the flight."""
    member.call.state = COLLECT
    member.call.acquire_permit()


def _in_turns(members: list[Member], do: Callable[[Member], None], *, most: int = _TURN) -> None:
    """Call `do` for every member that still waits, some in each turn of the loop: there may be thousands."""
    most = min(most, _TURN)
    for member in members[:most]:
        if member.call.state == JOINED:
            do(member)
    if rest := members[most:]:
        asyncio.get_running_loop().call_soon(partial(_in_turns, rest, do, most=most))


def _shareable(head: Any) -> bool:
    """Return whether an answer is a whole 200 that is meant for everybody who asks the same."""
    if head.status != 200 or (head.content_length or 0) > KEPT_BYTES:
        return False
    if head.content_length is None and not head.chunked:
        return False  # the body ends with its connection, so it is unknown whether it is whole
    for field in head.fields:
        name = field.name
        if name == "set-cookie":
            return False
        if name == "cache-control" and not _NOT_FOR_OTHERS.isdisjoint(_words(field.value)):
            return False
        if name == "vary" and not _words(field.value) <= VARYING:
            return False
        if name == "content-type" and field.value.lower().startswith("text/event-stream"):
            return False
    return True


def _words(value: str) -> set[str]:
    return {word.strip().lower() for word in value.split(",")}
