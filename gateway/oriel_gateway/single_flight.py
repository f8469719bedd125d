"""Routes marked deterministic: equal calls are made once, and their answer is kept for a while.

Equal is what has the same method, line, body and header fields as the upstream gets them, of the same tenant unless the
route is `cache_shared`. What says who asks and not what for (`NOT_ASKED_FOR`) is not sent by a call that is made for
all. Calls of different bands do not wait for one another: an urgent one would inherit the other's place in the queue.

Theory of operation. The first call founds a flight and starts a `FlightCall`, which belongs to nobody; all callers wait
as its members (state JOINED), each with its own deadline and free to leave. When nobody is left, it is given up. Its
answer, if it is a 200 that may be shared, is kept; the oldest member takes the whole call over with its permit and its
times, as if it had made it, and the others get the same bytes with their own ids.

An error is for the founder alone. The oldest of the rest then leads once more and the others follow it: all at once
they would be what the flight was to keep from a server that has just failed. If that fails as well, each goes on its
own: in line they would only pass their deadlines. A good answer that is not for all (streams, large ones, cookies) will
not be next time either, so the rest go on their own at once. nginx (`proxy_cache_lock`) and Varnish (waiting lists,
hit-for-miss) do much the same.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from time import monotonic

from oriel_gateway.attempts import note_answer
from oriel_gateway.call import Call
from oriel_gateway.call_state import ANSWERING, COLLECT, DONE, JOINED, SENDING
from oriel_gateway.cors import dressed
from oriel_gateway.detached import DetachedCall
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.heads import head_lines
from oriel_gateway.routing_state import KEPT_BYTES, KeptAnswer
from oriel_policies.flights import Flight
from oriel_wire.h1_response import ResponseHead

__all__ = ["NOT_ASKED_FOR", "VARYING", "FlightCall", "answer_from", "answer_key", "join", "wants_its_own"]

NOT_ASKED_FOR = ("user-agent",)
VARYING = frozenset(  # what a shared answer may vary by: fields that reach the upstream as the key has them
    {"accept", "accept-encoding", "accept-language", "content-encoding", "content-type", "user-agent"}
    | {"inference-header-content-length"}
)
_NOT_IN_KEY = frozenset({"content-length", *NOT_ASKED_FOR})
_NOT_SENT = tuple(f"{name}:".encode() for name in ("content-length", *NOT_ASKED_FOR))
_SMALL = 64 * 1024
_TURN = 64  # members that are told in one turn of the loop, with answers of as many bytes at most:
_TURN_BYTES = 1024 * 1024
_OURS = (b"age:", b"x-oriel-cache:", b"x-oriel-route:")
_NOT_FOR_OTHERS = frozenset({"no-store", "no-cache", "private"})


def answer_key(call: Call, body: bytes) -> bytes | None:
    """What makes two calls equal; None when the client wants an answer of its own (`Cache-Control`)."""
    head, target = call.head, call.target
    if wants_its_own(head.get("cache-control")):
        return None
    owner = "" if target.plan.cache_shared else call.tenant.name
    if target.kind == "service":
        # A body may name models: who may not use them gets no answer that was given while somebody might. And a
        # service may answer each tier in its own way.
        tier = call.tenant.tier.name if owner else ""
        owner = "\1".join((owner, tier, *call.tenant.models))
    # As sent, each name's values in their order; the order of the names means nothing to anybody.
    sent = sorted((f for f in head.sent_on() if f[0] not in _NOT_IN_KEY), key=lambda field: field[0])
    fields = [f"{name}:{value}" for name, value in sent]
    known = "\0".join((owner, target.plan.name, target.pool, target.line.decode("ascii"), *fields))
    digest = blake2b(known.encode("latin-1"), digest_size=32)
    digest.update(b"\0\0")
    digest.update(body)
    return digest.digest()


def wants_its_own(cache_control: str | None) -> bool:
    """Whether a client asks for an answer that is nobody else's."""
    return cache_control is not None and not _NOT_FOR_OTHERS.isdisjoint(_words(cache_control))


def answer_from(call: Call, answer: KeptAnswer, how: str, age_s: float) -> None:
    """Answer a call that was not made: how is "hit" or "joined"."""
    now = monotonic()
    client, mark = call.client, call.mark
    assert client is not None
    close = client.must_close
    lines = [*answer.lines, b"content-length: %d" % len(answer.body)]
    if client.cors:
        lines = dressed(lines, client.cors)
    if (grant := call.grant) is not None:
        grant.move(len(answer.body), now)
        lines.append(grant.lines(now).encode("ascii")[:-2])
    if close:
        lines.append(b"connection: close")
    if not any(line[:5].lower() == b"date:" for line in lines):
        lines.append(client.server.date)
    if how == "hit":
        lines.append(b"age: %d" % age_s)
    assert call.extras is not None
    lines += call.extras.operator_lines(call)
    waited_s = now - call.queued_s if call.queued_s else 0.0
    lines.append(
        f"x-oriel-cache: {how}\r\nx-request-id: {mark.request_id}\r\ntraceresponse: {mark.traceresponse()}\r\n"
        f"server-timing: gateway-queue;dur=0.000, gateway-cache;dur={waited_s * 1e3:.3f}\r\n\r\n".encode("latin-1")
    )
    head = b"\r\n".join(lines)
    if len(answer.body) <= _SMALL:
        client.transport.write(head + answer.body)
    else:
        client.transport.writelines((head, answer.body))  # uncopied: it may be for many
    call.bytes_out = len(answer.body)
    call.end_unsent(200)
    client.answered(close=close)


def join(call: Call, key: bytes, body: bytes, *, again: bool = False) -> Flight[Call]:
    """Become a member of the flight for `key`, and start its work if there is none; again: after one that failed."""
    gateway = call.gateway
    routing = gateway.routing
    place = (key, call.tenant.tier.band, call.gate)  # two pools in turn may have had one name
    call.state = JOINED
    call.queued_s = call.queued_s or monotonic()
    flight, founded = routing.flights.join(place, call)
    if founded:
        work = FlightCall(call, flight, key, again)
        routing.flight_calls[place] = work
        work.whole(body)
    else:
        routing.flight_calls[place].last_until(call.deadline)
    return flight


class FlightCall(DetachedCall):
    """The one call that is made for all members of a flight."""

    def __init__(self, founder: Call, flight: Flight[Call], key: bytes, again: bool) -> None:
        gateway = founder.gateway
        super().__init__(
            gateway,
            founder.gate,
            founder.head,
            founder.tenant,
            founder.target,
            founder.mark,
            founder.received_s,
            founder.deadline,
            head_lines(founder.head, gateway.tenant_lines(founder.tenant), _NOT_SENT),
        )
        self.stick = founder.stick
        self.founder = founder
        self._flight = flight
        self._key = key
        self._again = again
        self._head: ResponseHead | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    def last_until(self, deadline: float) -> None:
        """A member waits longer than all before it."""
        if deadline > self.deadline:
            self.deadline = deadline
            self.watch_until(deadline)

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        if complete:
            self._connection = None
        self.response_s = now = monotonic()
        status, endpoint = head.status, self._endpoint
        took_s = now - self.sent_s
        if status >= 400 and complete and endpoint is not None and self._elsewhere(endpoint, head, data, now):
            note_answer(self._gate.endpoints, endpoint, head, now, took_s)
            return
        if self._hedge is not None:
            self._settle(self._hedge)
        if not _shareable(head):
            self._give_away(head, data, complete)
            return
        self.state = ANSWERING
        self.status = head.status
        self._head = head
        self._take(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        if complete:
            self._connection = None
        self._take(data, complete)

    def refuse(self, refused: Refused) -> None:
        if self.state == DONE:
            return
        self._end(refused.outcome)
        members = self._land()
        if members and members[0] is self.founder:
            founder = members.pop(0)
            founder.inherit(self)
            founder.refuse(refused)
        self._go_on(members)

    def client_left(self) -> None:
        """Nobody is left who wants the answer, or the gateway closes."""
        super().client_left()
        for member in self._land():
            member.client_left()

    def _take(self, data: bytes, complete: bool) -> None:
        head = self._head
        assert head is not None
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > KEPT_BYTES:
            self._give_away(head, b"".join(self._body), complete)
        elif complete:
            self._share(head, b"".join(self._body))

    def _share(self, head: ResponseHead, body: bytes) -> None:
        plan, routing = self.target.plan, self._gateway.routing
        answer = KeptAnswer(
            lines=tuple(line for line in head.forward if not line.lower().startswith(_OURS)),
            body=body,
        )
        if plan.cache_s:
            owner = "" if plan.cache_shared else self.tenant.name
            routing.cache.put(self._key, owner, answer, answer.size_bytes, self.response_s, plan.cache_s)
        members = self._land()
        self._hand_over(members[0], head, body, True)

        def joined(member: Call) -> None:
            routing.answered_from(plan.name, "joined")
            answer_from(member, answer, "joined", 0.0)

        _in_turns(members[1:], joined, most=max(1, _TURN_BYTES // answer.size_bytes))

    def _give_away(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """An answer for one: the founder, or for a good one the oldest member that is left."""
        members = self._land()
        taker, good = members[0], head.status < 400
        if taker is self.founder or good:
            self._hand_over(taker, head, data, complete)
            del members[0]
        else:
            if self._endpoint is not None:
                note_answer(self._gate.endpoints, self._endpoint, head, self.response_s, self.response_s - self.sent_s)
            self._end(Outcome.CLIENT_LEFT)
        if good:
            _in_turns(members, _alone)
        else:
            self._go_on(members)

    def _go_on(self, members: list[Call]) -> None:
        """After a failure: the oldest leads and the others follow, or each alone if it was led again already."""
        key = self._key

        def follow(member: Call) -> None:
            assert member.extras is not None
            member.extras.fly(member, key, member.body(), again=True)

        _in_turns(members, _alone if self._again or len(members) < 2 else follow)

    def _land(self) -> list[Call]:
        routing = self._gateway.routing
        if routing.flight_calls.get(self._flight.key) is self:
            del routing.flight_calls[self._flight.key]
        return routing.flights.land(self._flight)

    def _hand_over(self, member: Call, head: ResponseHead, data: bytes, complete: bool) -> None:
        """`member` is from now on the one that has the permit and reads the answer."""
        self.unwatch()
        self._gateway.routing.detached.pop(self, None)
        self._gate.calls -= 1
        self._gate.release(self._held_bytes)  # if it had to queue
        self.state = DONE
        member.state = SENDING
        member.queued_s, member.permit_s, member.sent_s = self.queued_s, self.permit_s, self.sent_s
        member.inherit(self)
        member._tries = self._tries
        member._ticket, self._ticket = self._ticket, None
        member._endpoint, self._endpoint = self._endpoint, None
        member._connection, self._connection = self._connection, None
        if member._connection is not None:
            member._connection.sink = member
        member._pending = None
        self._gateway.routing.answered_from(self.target.plan.name, "miss")
        head = head.copy()
        head.forward = [line for line in head.forward if not line.lower().startswith(_OURS)]
        head.forward.append(b"x-oriel-cache: miss")
        member.response(head, data, complete)


def _alone(member: Call) -> None:
    """It queues for itself, as it would have without the flight."""
    member.state = COLLECT
    member.enter()


def _in_turns(members: list[Call], do: Callable[[Call], None], *, most: int = _TURN) -> None:
    """To every member that still waits, some in each turn of the loop: there may be thousands."""
    most = min(most, _TURN)
    for member in members[:most]:
        if member.state == JOINED:
            do(member)
    if rest := members[most:]:
        asyncio.get_running_loop().call_soon(partial(_in_turns, rest, do, most=most))


def _shareable(head: ResponseHead) -> bool:
    """Whether an answer is a whole 200 that is meant for everybody who asks the same."""
    if head.status != 200 or (head.content_length or 0) > KEPT_BYTES:
        return False
    if head.content_length is None and not head.chunked:
        return False  # it ends with its connection, and nobody knows whether it was whole
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
