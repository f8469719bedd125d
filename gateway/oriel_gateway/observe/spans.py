"""Makes the spans of a request that has ended, from its record.

This happens in the thread that sends them, and only for requests whose trace is kept. docs/tracing.md names them all.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import CODES, STATUS
from oriel_gateway.observe.record import Record
from oriel_gateway.observe.tracing import Attempt
from oriel_wire.context import parse_cost, parse_tokens
from oriel_wire.observe.semantics import (
    GEN_AI,
    GRPC_SERVICE,
    NOWHERE,
    Attributes,
    gen_ai_use,
    grpc_code,
    grpc_failed,
    grpc_request,
    grpc_server,
    http_server,
)
from oriel_wire.observe.trace import Span, TraceContext, internal_span, server_span


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """Facts about a request that only its spans tell.

    version: the version of HTTP that the client speaks; "" if it is not known.
    served_at: address and port of the listener, over gRPC.
    code: the gRPC status that the upstream sent, -1 without one.
    held: the phase of a cold start in which the call waited for a server, and the seconds that it did.
    model: the model that a body of the OpenAI API names; "" if the body was not read.
    """

    version: str = ""
    served_at: tuple[str, int] = NOWHERE
    code: int = -1
    held: tuple[str, float] | None = None
    model: str = ""


def spans_of(decided: Record, why: str, scheme: str, facts: SpanFacts) -> list[Span]:
    """Return the SERVER span of a request, that of its wait in the queue, and one CLIENT span for each attempt.

    why: the value of `oriel.kept`. scheme: the scheme of the client's URL.
    """
    code, held = facts.code, facts.held
    mark, outcome = decided.mark, decided.outcome
    own = TraceContext(mark.trace_id, mark.span_id, True, mark.state, mark.flags in ("02", "03"))
    if decided.protocol == "grpc":
        method = f"{GRPC_SERVICE}/{decided.method}" if decided.method else "_OTHER"
        status = grpc_code(code if code >= 0 else CODES[outcome] if outcome in CODES else 1 if _left(outcome) else 0)
        name, attributes, failed = method, grpc_server(method, status, facts.served_at), grpc_failed(status)
        hop = Hop(name=method, status=status, path="")
    else:
        path = _path(decided)
        number = decided.status or STATUS.get(outcome, 0)
        sent = decided.status if _left(outcome) else number
        name, attributes = http_server(decided.method, scheme, path, facts.version, sent)
        if GEN_AI["operation"] in attributes:
            attributes |= gen_ai_use(facts.model, *_tokens(decided.used))
        failed = number >= 500 or STATUS.get(outcome, 0) >= 500
        status = str(number)
        hop = Hop(name=decided.method, status=status, path=path)
    _describe(attributes, decided)
    attributes["oriel.kept"] = why
    if failed:
        attributes["error.type"] = status if outcome is Outcome.ANSWERED else outcome.value
    spans = [server_span(name, own, mark.parent_id, (decided.received_s, decided.ended_s), attributes, failed)]
    if decided.queued_s and (decided.ahead >= 0 or held is not None):
        spans.append(_queue(decided, own, held))
    attempts = mark.attempts
    last: Attempt | None = None
    if decided.permit_s and decided.endpoint is not None and decided.sent_s:
        error = "" if outcome is Outcome.ANSWERED or _left(outcome) else outcome.value
        start_s = decided.sent_s if attempts else decided.permit_s
        last = Attempt(mark.onward, decided.endpoint, start_s, decided.ended_s, error)
        attempts = (*attempts, last)
    if len(attempts) > 1:  # a copy that was sent later may have ended earlier
        attempts = tuple(sorted(attempts, key=attrgetter("start_s")))
    for before, attempt in enumerate(attempts):
        spans.append(hop.span(decided, own, attempt, before, last=attempt is last))
    return spans


class Hop:
    """The common part of the CLIENT spans of one request.

    status: status of the last attempt's answer.
    """

    def __init__(self, *, name: str, status: str, path: str) -> None:
        self._name = name
        self._status = status
        self._path = path

    def span(
        self,
        decided: Record,
        own: TraceContext,
        attempt: Attempt,
        before: int,
        *,
        last: bool,
    ) -> Span:
        """Return the CLIENT span of one attempt. before: earlier attempts. last: True if it ended the call."""
        endpoint, error = attempt.endpoint, attempt.error
        grpc = decided.protocol == "grpc"
        attributes: Attributes = {"server.address": endpoint.host, "server.port": endpoint.port}
        failed = bool(error)
        if grpc:
            attributes |= grpc_request(self._name, self._status if last else "UNAVAILABLE" if error else "CANCELLED")
            failed = failed or (last and self._status not in ("OK", "CANCELLED"))
        else:
            attributes["http.request.method"] = decided.method
            attributes["url.full"] = f"http://{endpoint.host}:{endpoint.port}{self._path}"
            if last and decided.response_s:
                attributes["http.response.status_code"] = decided.status
                failed = failed or decided.status >= 400
            elif error.isdecimal():
                attributes["http.response.status_code"] = int(error)
            if before:
                attributes["http.request.resend_count"] = before
        if failed:
            attributes["error.type"] = error or self._status
        if decided.target is not None:
            attributes["oriel.pool"] = decided.target.pool
        return Span(
            name=self._name,
            context=TraceContext(own.trace_id, int(attempt.span, 16), True, own.state, own.random),
            parent_id=own.span_id,
            start_s=attempt.start_s,
            end_s=attempt.end_s,
            kind="client",
            attributes=attributes,
            failed=failed,
        )


def span_count(record: Record) -> int:
    """Return about how many spans `spans_of` makes."""
    return 1 + (record.permit_s > 0.0) + (record.ahead >= 0) + len(record.mark.attempts)


def _queue(decided: Record, own: TraceContext, held: tuple[str, float] | None) -> Span:
    attributes: Attributes = {} if decided.ahead < 0 else {"oriel.queue.ahead": decided.ahead}
    if held is not None:
        phase, held_s = held
        attributes |= {"oriel.cold_start.phase": phase, "oriel.cold_start.held_ms": round(held_s * 1e3, 3)}
    failed = not decided.permit_s and not _left(decided.outcome)
    if failed:
        attributes["error.type"] = decided.outcome.value
    return internal_span("queue", own, decided.queued_s, decided.permit_s or decided.ended_s, attributes, failed)


def _describe(found: Attributes, decided: Record) -> None:
    """Add our own attributes of the SERVER span."""
    found["oriel.request_id"] = decided.mark.request_id
    found["oriel.outcome"] = decided.outcome.value
    tenant, target = decided.tenant, decided.target
    if tenant is not None:
        found["oriel.tenant"] = tenant.name
        found["oriel.tier"] = tenant.tier.name
        found["oriel.target_ms"] = round(tenant.tier.target_s * 1e3, 3)
    if target is not None:
        found["oriel.target"] = target.route
        found["oriel.pool"] = target.pool
        if target.kind == "model":
            found["oriel.model"] = target.name
            if target.version:
                found["oriel.model.version"] = target.version
        if target.spills:
            found["oriel.spilled"] = ", ".join([f"{each.pool}: {each.reason}" for each in target.spills])
    if decided.deadline:
        found["oriel.deadline_ms"] = round((decided.deadline - decided.received_s) * 1e3, 3)
    if tenant is None:
        return
    judged = decided.judged
    if judged is None:
        found["oriel.sla.result"] = "met"
        return
    found["oriel.sla.result"] = judged.result
    if judged.cause:
        found["oriel.sla.cause"] = judged.cause
        found["oriel.sla.excess_ms"] = round(judged.excess_s * 1e3, 3)


def _path(decided: Record) -> str:
    """Return the canonical path, without its query; "" if the request was refused before it was known."""
    return "" if decided.target is None else _path_of(decided.target.line)


@lru_cache(maxsize=2048)
def _path_of(line: bytes) -> str:
    parts = line.decode("latin-1").split(" ", 2)
    return parts[1].partition("?")[0] if len(parts) > 1 else ""


def _tokens(used: str) -> tuple[int | None, int | None]:
    """Return the tokens that a call read and wrote as far as they were counted. used: see `Record`."""
    cost = parse_cost(used) if "tin=" in used else None
    found = (cost.tokens_in, cost.tokens_out) if cost is not None else parse_tokens(used)
    return (None, None) if found is None else (found[0], found[1] or None)


def _left(outcome: Outcome) -> bool:
    return outcome is Outcome.CALLER_LEFT
