"""The trailers of gRPC answers and refusals, as encoded header fields."""

from typing import Final

from oriel_gateway.call.contracts import Call
from oriel_gateway.call.late import bound_of
from oriel_gateway.errors import Refused
from oriel_gateway.observe.tracing import Mark
from oriel_wire.h2.grpc import DEADLINE_EXCEEDED, encode_text
from oriel_wire.h2.hpack import LENGTHS, literal

__all__ = ["OK", "about", "answer_trailers", "refusal"]

OK: Final = literal(b"grpc-status", b"0")
_ID: Final = literal(b"x-request-id", b"")[:-1]
_TRACE: Final = literal(b"traceresponse", b"")[:-1]
_TIMING: Final = literal(b"server-timing", b"")[:-1]


def answer_trailers(call: Call, now: float) -> bytes:
    """Return the trailers of an answer: its status, ids and timing, and what the limits have left."""
    answer = call.answer
    parts = []
    if answer is None or not answer.code:
        parts.append(OK)
    else:
        text, more = answer.passed_on()
        if answer.code == DEADLINE_EXCEEDED and not call.side.streams:
            text = f"{text}; {bound_of(call)}" if text else bound_of(call)
        parts.append(literal(b"grpc-status", b"%d" % answer.code))
        parts.append(literal(b"grpc-message", encode_text(text)))
        parts += [literal(name.encode(), value.encode("latin-1")) for name, value in more]
    held = call.permit_s != call.queued_s and call.hold_timing()
    parts.append(about(call.mark, call.permit_s - call.queued_s, now - call.sent_s, held or ""))
    if call.grant is not None and (answer is None or not answer.code):
        for name, value in call.grant.headers(now):
            parts.append(literal(name.encode(), value.encode("ascii")))
    if call.tenant.caller and call.cost_us >= 0:
        # a model call of a service: its cost is part of what the service's own call is charged
        parts += (literal(b"x-oriel-cost-us", b"%d" % call.cost_us), literal(b"x-oriel-cost", call.used.encode()))
    if answer is not None and answer.forward:
        for line in answer.forward:
            name_, _, value_ = line.partition(b":")
            parts.append(literal(name_, value_.strip()))
    return b"".join(parts)


def refusal(refused: Refused, code: int, mark: Mark, queue_s: float, upstream_s: float = 0.0) -> bytes:
    """Return the trailers of a refusal: its status, why and when to come back, ids and timing."""
    parts = [
        literal(b"grpc-status", b"%d" % code),
        literal(b"grpc-message", encode_text(refused.message)),
        literal(b"x-oriel-reason", refused.outcome.value.encode()),
    ]
    if refused.retry_after_s is not None:
        parts.append(literal(b"retry-after", b"%d" % refused.retry_after_s))
    for name, value in refused.headers:
        if name.startswith(("ratelimit", "www-auth")):
            parts.append(literal(name.encode(), value.encode("latin-1")))
    parts.append(about(mark, queue_s, upstream_s, refused.timing))
    return b"".join(parts)


def about(mark: Mark, queue_s: float, upstream_s: float, more: str = "") -> bytes:
    """Return ids and timing as trailers, for an answer or for a refusal at any stage. more: a further timing."""
    times = b"gateway-queue;dur=%.3f" % (queue_s * 1e3) if queue_s > 0.0 else b"gateway-queue;dur=0.000"
    if upstream_s:
        times += b", gateway-upstream;dur=%.3f" % (upstream_s * 1e3)
    if more:
        times += f", {more}".encode("ascii")
    request_id = mark.request_id.encode("latin-1")
    return b"".join(
        (
            _ID,
            LENGTHS[len(request_id)],
            request_id,
            _TRACE,
            b"\x37",
            mark.traceresponse().encode("ascii"),
            literal(b"server-timing", times) if more else _TIMING + LENGTHS[len(times)] + times,
        )
    )
