"""The gRPC side of a call: one message there, and one back. `grpc_stream` has that of a stream of messages."""

from typing import Final

from oriel_gateway.call.contracts import SENDING, Call, Side
from oriel_gateway.call.fallback import SENT_ON
from oriel_gateway.call.grpc_head import GrpcRequest, passed_on, sent_on
from oriel_gateway.call.late import deadline_passed
from oriel_gateway.clock import requested_until
from oriel_gateway.pools.grpc_answers import WHOLE_BYTES, GrpcAnswer, GrpcExchange
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_wire.h2.grpc import encode_timeout, prefix
from oriel_wire.h2.hpack import LENGTHS, literal
from oriel_wire.v2.grpc_names import model_fields, schedule_fields

__all__ = ["GRPC", "encoded_head", "requested_by", "schedule_of"]

KEPT_BYTES: Final = 1024 * 1024  # an answer that may be shared between callers is read as a whole up to this size
_FIRST: Final = b"\x83\x86"  # :method POST, :scheme http
_REST: Final = b"".join(
    literal(name, value)
    for name, value in (
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"grpc-accept-encoding", b"identity"),
        (b"user-agent", b"oriel-gateway"),
    )
)
_TIMEOUT: Final = literal(b"grpc-timeout", b"")[:-1]
_ID: Final = literal(b"x-request-id", b"")[:-1]
_TRACE: Final = literal(b"traceparent", b"")[:-1]
_STATE: Final = b"tracestate"
_SENT_ON: Final = literal(SENT_ON.encode(), b"true")


class GrpcSide(Side):
    """The side of unary gRPC calls. The message is kept: it may have to be sent again."""

    __slots__ = ()

    def requested_until(self, call: Call) -> float:
        return requested_by(call)

    def rename(self, call: Call, model: str) -> bool:
        """Let the message name another model: the last name and version of a message are in force."""
        added, body = model_fields(model, ""), call._body
        renamed = [*body, added] if isinstance(body, list) else (body or b"") + added
        call.replace_body(renamed, call.bytes_in + len(added))
        return True

    def write(self, call: Call, connection: GrpcExchange, now: float) -> None:
        left_s = call.deadline - now
        if call.receiver is not None:
            connection.whole_bytes = max(WHOLE_BYTES, KEPT_BYTES)
        schedule = schedule_of(call, left_s)
        head, start = encoded_head(call, connection, left_s), prefix(call.bytes_in + len(schedule))
        connection.most_bytes = call.gate.pool.max_response_bytes
        body = call._body
        if isinstance(body, list):
            connection.send(head, [start, *body, schedule] if schedule else [start, *body], True)
        else:
            connection.send_whole(head, b"".join((start, body or b"", schedule)))

    def classify(self, call: Call, head: GrpcAnswer, data: bytes) -> AnswerKind:
        return head.kind(model=bool(call.target.sought))

    def reads(self, call: Call, head: GrpcAnswer, data: bytes, complete: bool) -> bool:
        if complete:
            if head.timed_out:
                call.refuse(deadline_passed(call, SENDING))
                return False
            call.answer = head
        return True


GRPC: Final = GrpcSide("grpc")


def requested_by(call: Call) -> float:
    """Return the deadline that the caller of a gRPC call asked for; infinite if it asked for none."""
    head: GrpcRequest = call.head
    return requested_until(call.received_s, head.timeout, head.rpc.timeout_s)


def schedule_of(call: Call, timeout_s: float | None) -> bytes:
    """Return the fields with Triton's priority and timeout that a message gets; b"" where its tier has no priority."""
    pool, tier = call.gate.pool, call.tenant.tier
    if not (pool.triton_priorities or pool.engine) or call.method not in ("ModelInfer", "ModelStreamInfer"):
        return b""
    priority = pool.triton_priorities.get(tier.name) or (tier.band + 1 if pool.engine == "triton" else None)
    return b"" if priority is None else schedule_fields(priority, timeout_s)


def encoded_head(call: Call, connection: GrpcExchange, timeout_s: float) -> bytes:
    """Return the encoded head of a request. timeout_s: the time that the server is given."""
    lines = call.lines
    if lines is None:
        head: GrpcRequest = call.head
        shape = head.rpc.shape
        lines = None if shape is None else shape.lines
        if lines is None:
            fields = sent_on(head.rpc)
            lines = b"".join((head.line.encoded, *[literal(name, value) for name, value in fields]))
            if shape is not None and not any(map(passed_on, shape.block.names)):
                shape.lines = lines
        lines += call.gateway.targets.tenant_block(call.tenant)
        if call.target.spills:
            lines += _SENT_ON
        call.lines = lines
    mark = call.mark
    request_id = mark.request_id.encode("latin-1")
    timeout = encode_timeout(timeout_s)
    block = b"".join(
        (
            _FIRST,
            connection.endpoint.authority_block,
            lines,
            _REST,
            _TIMEOUT,
            LENGTHS[len(timeout)],
            timeout,
            _ID,
            LENGTHS[len(request_id)],
            request_id,
            _TRACE,
            b"\x37",
            mark.traceparent().encode("ascii"),
        )
    )
    if mark.state:
        block += literal(_STATE, mark.state.encode("latin-1"))
    return block
