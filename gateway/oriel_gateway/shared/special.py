"""Extras of HTTP calls of special routes: flights, shadow copies, sticky keys, bodies that name a model or a tier.

A plain call has none. `Call` calls the hooks of `contracts.RouteHooks` and nothing else; they may end the call.
"""

from time import monotonic
from typing import Any, Final

import msgspec

from oriel_gateway.call.contracts import COLLECT, LIMITED, Call
from oriel_gateway.call.engine_body import asking_for_usage
from oriel_gateway.call.fallback import leave_late_pool
from oriel_gateway.clock import deadline_of
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_body, without_state
from oriel_gateway.limits.error_text import token_headers
from oriel_gateway.pools.sequences import Stick
from oriel_gateway.routing.targets import Target, bounds_tokens
from oriel_gateway.shared.answer_tokens import AnswerTokens
from oriel_gateway.shared.hidden_usage import WithoutUsage
from oriel_gateway.shared.sequence_steps import find_sequence
from oriel_gateway.shared.shadow import Fingerprint, send_copy, share_of_copies
from oriel_gateway.shared.single_flight import Member, answer_from, answer_key, join, operator_lines
from oriel_gateway.shared.state import REPLAY_BYTES, RoutingState
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.tokens import MAX_NAME, prompt_tokens, reserved, wanted
from oriel_policies.upstreams.assignment import unit
from oriel_policies.upstreams.prefixes import beginnings
from oriel_wire.context import with_tokens

TIER_BYTES: Final = 4 * 1024 * 1024  # largest body that is read for its `service_tier`
_STREAMING: Final = frozenset({"chat.completions", "completions"})  # services that are asked for a stream's usage
_SERVICE_TIER: Final = b'"service_tier"'
# msgspec.defstruct and not a class statement: this module is compiled, and a Struct makes its classes by itself.
_decode_body = msgspec.json.Decoder(msgspec.defstruct("Asked", [("service_tier", str | None, None)])).decode


def attach(call: Call, routing: RoutingState, *, streaming: bool = False) -> None:
    """Give a call of a special target its extras. A stream has none but its side of a split and a sticky key, unless
    it may be of sequences.
    """
    target = call.target
    if not streaming or target.plan.sequences:
        call.extras = Extras(routing)
    elif target.side:
        routing.took_side(target.plan.name, target.side)
    sticky = target.plan.sticky
    if sticky not in ("", "stream") and (key := call.head.get(sticky)):
        call.stick = Stick(key)


def service_tier(call: Call) -> str:
    """Return the `service_tier` in a body of the OpenAI API, if it is `flex` or `priority`; else "".

    A body that is larger or no JSON is not judged here.
    """
    if call.bytes_in > TIER_BYTES or _SERVICE_TIER not in (body := call.body()):
        return ""
    try:
        decoded: Any = _decode_body(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return str(decoded.service_tier) if decoded.service_tier in ("flex", "priority") else ""


def changed(call: Call, target: Target) -> bool:
    """Let the call go on by the tier of `target`; True: other limits count it now. Raises Refused."""
    gateway, grant, now = call.gateway, call.grant, monotonic()
    same = call.target.allowances == target.allowances
    call.target, call.tenant, call.lines = target, target.tenant, None
    call.deadline = deadline_of(call.tenant, call.received_s, call.head.timeout)
    call.watch_until(call.deadline)
    if same:
        return False
    call.grant = None
    if grant is not None:
        if call.head.chunked:
            grant.move(-call.bytes_in, now)
        grant.undo(now)
    if target.allowances:
        grant = gateway.limiter.acquire(call.tenant, target, call.head.content_length or 0, now)
        if grant is not None:
            call.limited(grant)
    return True


class _OwnTier:
    """Waits for the limits of a higher tier that a call asked for: without room there, its own tier serves it."""

    __slots__ = ("_call", "_own")

    def __init__(self, call: Call, own: Target) -> None:
        self._call, self._own = call, own

    def granted(self) -> None:
        """Go on by the higher tier."""
        self._call.granted()

    def refuse(self, refused: Refused) -> None:
        """Go on by the call's own tier."""
        call = self._call
        assert isinstance(call.extras, Extras)
        call.extras.served_as = "default"
        try:
            changed(call, self._own)
        except Refused as also:
            call.refuse(also)
            return
        call.state = COLLECT
        call.request_complete()


def _plain(head: Any) -> bool:
    return (head.get("content-encoding") or "identity").strip().lower() == "identity"


def reserve_tokens(call: Call) -> tuple[AnswerTokens, str]:
    """Reserve the tokens that a call may use at most, if they are limited, and count those that it uses. Raises
    Refused.

    Returns with them the model that the body names, "" if it was not read.
    """
    gateway, grant, target, now = call.gateway, call.grant, call.target, monotonic()
    if bounds_tokens(call.tenant, target.allowances) and not _plain(call.head):  # reading the head costs time
        raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body without a content encoding: its tokens are counted")
    prompt = prompt_tokens(call.bytes_in)
    if grant is None or not any(each.counts_tokens for each in target.allowances):
        return AnswerTokens(prompt), ""
    usual = gateway.limiter.usual_tokens(call.tenant, target)
    wants = wanted(call.body())
    units = reserved(target.name, prompt, wants, usual)
    gateway.limiter.reserve_tokens(grant, call.tenant, target, units, now)
    tokens = AnswerTokens(prompt)
    grant.tokens = tokens.total
    if not grant.ready:
        if call.head.chunked:  # its bytes are counted again when it goes on
            grant.move(-call.bytes_in, now)
        call.limited(grant)
        call.state, call.limited_s = LIMITED, now
    return tokens, wants.model


def token_lines(call: Call, now: float) -> list[bytes]:
    """Return the header lines about the token limit of which the least is left."""
    grant = call.grant
    meters = () if grant is None else [each for each in grant.meters if each.bound.counts is Counts.TOKENS]
    if not meters:
        return []
    left, full_s, bound = min([(*meter.remaining(now), meter.bound) for meter in meters], key=lambda each: each[0])
    return [f"{name}: {value}".encode() for name, value in token_headers(bound, left, full_s)]


class Extras:
    """Hooks of one call; its single writer is that call. See `contracts.RouteHooks`."""

    def __init__(self, routing: RoutingState) -> None:
        self._routing = routing
        self.model = ""
        self.served_as = ""  # the `service_tier` that serves a call that asked for one
        self._member: Member | None = None  # the call's membership in a single flight
        self._copied: bytes | None = None  # the body, for a shadow
        self._seen: Fingerprint | None = None
        self._tokens: AnswerTokens | None = None
        self._prefixes: tuple[bytes, ...] = ()  # of its prompt, see `prefixes.beginnings`
        self._filter: WithoutUsage | None = None  # of a stream whose client has not asked for its usage

    def before_queue(self, call: Call) -> bool:
        """The request is here as a whole. False: the call is answered, waits for an equal one or for its limits."""
        if call.target.by_service_tier and not self.served_as and (word := service_tier(call)):
            try:
                if self._change_tier(call, word):
                    call.request_complete()  # judge again, now with the limits of the other tier
                    return False
            except Refused as refused:
                call.refuse(refused)
                return False
        target, routing = call.target, self._routing
        if target.stateless or target.plan.sequences or target.names in ("json", "form"):
            try:
                if target.plan.sequences and call.stick is None:
                    find_sequence(call)
                if target.names:
                    self.model = judge_body(call.head, target.names, call.body(), call.tenant)[:MAX_NAME]
                if target.stateless:
                    sent = without_state(call.body(), judged=bool(target.names))
                    call.replace_body(sent, len(sent))
            except Refused as refused:
                call.refuse(refused)
                return False
        if target.tokens and self._tokens is None:
            try:
                self._tokens, named = reserve_tokens(call)
                self.model = self.model or named
            except Refused as refused:
                call.refuse(refused)
                return False
            if call.state == LIMITED:
                return False
        if target.plan.engines and target.tokens:
            self._prefixes = beginnings(call.tenant.name, call.body())
        if target.plan.engines and target.name in _STREAMING and (asks := asking_for_usage(call.body())) is not None:
            call.replace_body(asks, len(asks))
            self._filter = WithoutUsage()
        plan, size, copies = target.plan, call.bytes_in, share_of_copies(call)
        if size > REPLAY_BYTES or not (target.keepable or copies):
            return not (target.fallbacks and leave_late_pool(call))
        body = call.body()
        if copies and unit(call.mark.own) < copies:
            self._copied = body  # the call keeps its own body on the budget: the copy takes no room from other calls
        if target.fallbacks:
            return not leave_late_pool(call)
        if not target.keepable or (key := answer_key(call, body)) is None:
            return True
        found = routing.cache.get(key, monotonic()) if plan.cache_s else None
        if self._tokens is not None:
            self._tokens.none()  # unless the answer is made for this call
        if found is not None:
            routing.answered_from(plan.name, "hit")
            answer_from(call, found[0], "hit", found[1])
            return False
        if not call.reserve_bytes():
            return True  # there are no bytes to wait with: let the queue decide
        if not call.endpoints.usable:
            try:
                call.hold()
            except Refused as refused:
                call.refuse(refused)
                return False
        self._member = Member(call)
        join(self._member, routing, key, body)
        return False

    def pick(self, call: Call, now: float) -> Any:
        """Return the endpoint that the call is sent to."""
        if self._prefixes and call.gate.pool.engine:
            return call.endpoints.pick_cached(self._prefixes, call.gate.admission.inflight, now, call.target.sought)
        return call.endpoints.pick(now, (), call.target.sought)

    def _change_tier(self, call: Call, word: str) -> bool:
        """Let the call go on by the tier that its body asks for, or by its own; see `changed`. Raises Refused."""
        self.served_as, own, found = "default", call.target, dict(call.target.by_service_tier)
        if word not in found:
            return False
        if (target := found[word]) is None:
            others = "'auto', 'default' or 'flex'"
            message = f"'service_tier' may not be 'priority' for this key: ask for {others}"
            raise Refused(Outcome.INVALID_REQUEST, message)
        lenient = word == "priority" and not own.tenant.service_tiers.strict
        try:
            limited = changed(call, target)
        except Refused:
            if not lenient:
                raise
            return changed(call, own)  # the limits of the higher tier have no room for it
        self.served_as = word
        if lenient and (grant := call.grant) is not None and grant.waiter is call:
            grant.waiter = _OwnTier(call, own)
        return limited

    def response(self, call: Call, head: Any, data: bytes, complete: bool) -> bytes:
        """The upstream's head is about to be passed on. Returns the data that is."""
        tokens = self._tokens
        if tokens is not None:
            tokens.answer_began(head, prompt_tokens(call.bytes_in))
            tokens.feed(data)
            if complete:
                self._counted(call, tokens)
            if bounds_tokens(call.tenant, call.target.allowances):
                head.forward = [line for line in head.forward if not line[:12].lower().startswith(b"x-ratelimit-")]
                head.forward += token_lines(call, monotonic())
        if self.served_as:
            head.forward += [b"x-oriel-service-tier: " + self.served_as.encode()]
        head.forward += operator_lines(call)
        if self._copied is not None:
            self._seen = Fingerprint(call, head)
            self._seen.feed(data)
        if self._filter is not None and head.events and _plain(head):
            head.content_length = None  # less of it is passed on
        else:
            self._filter = None
        return data if self._filter is None else self._filter.feed(data, complete)

    def _counted(self, call: Call, tokens: AnswerTokens) -> None:
        """The answer is complete: count what it used, also for the tenant's `GET /v1/usage`."""
        tokens.answer_complete(call.used)
        if (grant := call.grant) is not None and grant.tokens is not None and call.status < 400:
            grant.settle_tokens(tokens.total(), monotonic())
            call.gateway.limiter.learn_tokens(call.tenant, call.target, tokens.tokens_out)
        call.used = with_tokens(call.used, tokens.tokens_in, tokens.tokens_out)

    def data(self, call: Call, data: bytes, complete: bool) -> bytes:
        """More of the answer. Returns what is passed on of it."""
        if (tokens := self._tokens) is not None:
            tokens.feed(data)
            if complete:
                self._counted(call, tokens)
        if self._seen is not None:
            self._seen.feed(data)
        return data if self._filter is None else self._filter.feed(data, complete)

    def cut_off(self, call: Call) -> None:
        """The call ends before its answer is complete: what has passed of it was used."""
        if (tokens := self._tokens) is not None and call.sent_s:
            call.used = with_tokens(call.used, tokens.tokens_in, tokens.tokens_out)

    def abandoned(self, call: Call, now: float) -> tuple[bool, float]:
        """Return what `Flight.cost_of_leaving` says of a call that ends before its flight does."""
        member = self._member
        if member is None or member.flight is None:
            return False, 0.0
        return member.flight.cost_of_leaving(member, now)

    def finished(self, call: Call) -> None:
        """The call is over, however it ended."""
        routing, target, member, record = self._routing, call.target, self._member, call.record
        assert record is not None
        if call.cost_us >= 0:
            call.endpoints.sequences.apart = True
        if call.stick is not None and call.stick.end and record.outcome is Outcome.ANSWERED and record.status < 400:
            call.endpoints.sequences.forget(call.stick.key)
        if target.side:
            routing.took_side(target.plan.name, target.side)
            if target.plan.rollback is not None:
                routing.canaries.finished(target, record.judged)
        if member is not None:
            flight = member.flight
            self._member = member.flight = None  # breaks the cycle of references between the flight and its founder
            if flight is not None:
                flight.leave(member)
        comparable = record.outcome is Outcome.ANSWERED and not target.spills
        if self._copied is not None and self._seen is not None and comparable:
            send_copy(call, routing, self._copied, self._seen)
        self._copied = None
