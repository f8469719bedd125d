"""One unary gRPC call on its way: a `call.http.Call` whose request and answer are gRPC messages.

States, decisions and ends are those of every call (`lifecycle`, `attempts`). What differs is here: how the request is
written to an upstream, and what its answer means.
"""

from dataclasses import replace
from time import monotonic
from typing import Any, Final

from oriel_gateway.call.fallback import SENT_ON
from oriel_gateway.call.http import Call
from oriel_gateway.call.late import deadline_passed
from oriel_gateway.call.lifecycle import SENDING
from oriel_gateway.contracts import Client, Host, Receiver
from oriel_gateway.errors import Outcome
from oriel_gateway.observe.spans import SpanFacts
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.grpc_answers import WHOLE_BYTES, GrpcAnswer, GrpcExchange
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant
from oriel_wire.context import INTERNAL
from oriel_wire.h2.grpc import DEADLINE_EXCEEDED, RpcHead, encode_timeout, prefix
from oriel_wire.h2.hpack import LENGTHS, literal
from oriel_wire.observe.orca import LOAD_FORMAT, LOAD_METRICS
from oriel_wire.observe.semantics import NOWHERE
from oriel_wire.v2.grpc_names import model_fields, schedule_fields

__all__ = ["SERVICE", "GrpcCall", "GrpcRequest", "RpcLine", "sent_on"]

SERVICE: Final = "inference.GRPCInferenceService"
KEPT_BYTES: Final = 1024 * 1024  # an answer that may be shared between callers is read as a whole up to this size
# These belong to the gateway or the transport, or are set anew for the next hop.
_DROPPED: Final = frozenset(
    name.encode()
    for name in INTERNAL
    | {
        LOAD_FORMAT,
        "authorization",
        "proxy-authorization",
        "x-api-key",
        "x_api_key",
        "x_api-key",
        "x-api_key",
        "proxy_authorization",
        "x-request-id",
        "x-request-timeout-ms",
        "x-request-tier",
        "traceparent",
        "tracestate",
        "user-agent",
        "te",
        "content-type",
        "content-length",
        "host",
        "forwarded",
        "x-real-ip",
    }
)
_ANSWERED: Final = Outcome.ANSWERED
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
_ASK_REPORT: Final = literal(LOAD_FORMAT.encode(), b"text")


class RpcLine:
    """The target of a call, as a request line has it over HTTP/1.1. method: the last part of its path."""

    __slots__ = ("encoded", "method", "path")

    def __init__(self, method: str) -> None:
        self.method = method
        self.path = f"/{SERVICE}/{method}"
        self.encoded = literal(b":path", self.path.encode())


class GrpcRequest:
    """The head of a gRPC call as a call keeps it. Other attributes are those of `oriel_wire.h1.request.RequestHead`."""

    chunked = False
    close = False
    content_length: int | None = None
    expect_continue = False

    __slots__ = ("line", "rpc", "timeout")

    def __init__(self, line: RpcLine, rpc: RpcHead) -> None:
        self.line = line
        self.rpc = rpc
        self.timeout = rpc.requested_ms

    @property
    def method(self) -> str:
        """The gRPC method."""
        return self.line.method

    def get(self, name: str) -> str | None:
        """The first value of the metadata with this lower-case name."""
        return self.rpc.get(name)

    def sent_on(self) -> list[tuple[str, str]]:
        """The metadata that the upstream gets."""
        return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in sent_on(self.rpc)]


def sent_on(rpc: RpcHead) -> list[tuple[bytes, bytes]]:
    """Return the client's metadata that the upstream gets."""
    return [field for field in rpc.fields if _passed_on(field[0])]


def _passed_on(name: bytes) -> bool:
    return (
        name not in _DROPPED
        and name[:1] != b":"
        and not name.startswith(b"grpc-")
        and name[:8].replace(b"_", b"-") != b"x-oriel-"
        and name[:12].replace(b"_", b"-") != b"x-forwarded-"
    )


class GrpcCall(Call):
    """A unary call. answer: the upstream's, once its trailers are here."""

    protocol = "grpc"
    __slots__ = ("answer",)

    def __init__(
        self,
        gateway: Host,
        client: Client | None,
        gate: PoolGate,
        head: GrpcRequest,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        received_s: float,
        deadline: float,
        lines: bytes | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        super().__init__(gateway, client, gate, head, tenant, target, mark, received_s, deadline, lines, receiver)
        self.endpoints = gate.grpc  # type: ignore[assignment]
        self.answer: GrpcAnswer | None = None

    def _span_facts(self) -> SpanFacts:
        client: Any = self.client  # an `ingress.grpc.GrpcClient`, or None
        served_at: tuple[str, int] = NOWHERE if client is None else client.served_at
        code = -1 if self.answer is None else self.answer.code
        return replace(super()._span_facts(), served_at=served_at, code=code)

    def shared_lines(self, left_out: tuple[bytes, ...]) -> bytes | None:
        """Return None: calls with different metadata have different keys, so no line has to be left out for shared
        calls.
        """
        return None

    def endpoints_of(self, gate: PoolGate) -> EndpointSet[Any]:
        return gate.grpc

    def rename(self, model: str) -> bool:
        """Let the message name another model: the last name and version of a message are in force."""
        added, body = model_fields(model, ""), self._body
        self._body = [*body, added] if isinstance(body, list) else (body or b"") + added
        self.body_bytes += len(added)
        return True

    def put(self, connection: GrpcExchange, now: float) -> None:
        """Write the whole request to a stream of the upstream. The message is kept: it may have to be sent again."""
        connection.most_bytes = self.gate.pool.max_response_bytes
        if self.receiver is not None:
            connection.whole_bytes = max(WHOLE_BYTES, KEPT_BYTES)
        schedule = b""
        priorities = self.gate.pool.triton_priorities
        if priorities and self.method in ("ModelInfer", "ModelStreamInfer"):
            priority = priorities.get(self.tenant.tier.name)
            if priority is not None:
                schedule = schedule_fields(priority, self.time_for_triton(now))
        head, start = self.head_block(connection, now), prefix(self.body_bytes + len(schedule))
        body = self._body
        if isinstance(body, list):
            pieces = [start, *body, schedule] if schedule else [start, *body]
            connection.send(head, pieces, self.ends_with_first())
            return
        data = b"".join((start, body or b"", schedule))
        if self.ends_with_first():
            connection.send_whole(head, data)
        else:
            connection.send(head, data, False)

    def requested_until(self) -> float:
        """See `Lifecycle.requested_until`."""
        return self.gateway.requested_until(self.received_s, self.head.timeout, self.head.rpc.timeout_s)

    def time_for_triton(self, now: float) -> float | None:
        """The seconds that Triton's own timeout parameter is to have; None for none."""
        return self.deadline - now

    def ends_with_first(self) -> bool:
        """Return whether the first message is the last."""
        return True

    def upstream_timeout_s(self, now: float) -> float:
        """The seconds that the upstream is told."""
        return self.deadline - now

    def head_block(self, connection: GrpcExchange, now: float) -> bytes:
        """Return the encoded head of the request."""
        lines = self.lines
        if lines is None:
            head: GrpcRequest = self.head
            shape = head.rpc.shape
            lines = None if shape is None else shape.lines
            if lines is None:
                fields = sent_on(head.rpc)
                lines = b"".join((head.line.encoded, *[literal(name, value) for name, value in fields]))
                if shape is not None and not any(map(_passed_on, shape.block.names)):
                    shape.lines = lines
            lines += self.gateway.targets.tenant_block(self.tenant)
            if self.target.spills:
                lines += _SENT_ON
            self.lines = lines
        mark = self.mark
        endpoint = connection.endpoint
        request_id = mark.request_id.encode("latin-1")
        timeout = encode_timeout(self.upstream_timeout_s(now))
        block = b"".join(
            (
                _FIRST,
                endpoint.authority_block,
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
        if self.gate.wants_load_report:
            self.gate.wants_load_report, self.asks_report = False, True
            block += _ASK_REPORT
        return block

    def classify(self, head: GrpcAnswer, data: bytes) -> AnswerKind:
        """Return what an error answer means for the call."""
        return head.kind(model=bool(self.target.sought))

    def response(self, head: GrpcAnswer, data: bytes, complete: bool) -> None:
        if complete:
            if head.timed_out:
                self.refuse(deadline_passed(self, SENDING))
                return
            self.answer = head
        super().response(head, data, complete)

    def ended(self, answer: GrpcAnswer) -> None:
        """Note the trailers of an answer whose data was passed on before."""
        self.answer = answer
        self.status = answer.status
        self.cost_us = answer.cost_us
        self.timing = answer.server_timing
        self.used = answer.used
        if self.asks_report:
            self.gate.note_load_report(answer.get(LOAD_METRICS))
        if answer.status >= 500 and self.endpoint is not None:
            now = monotonic()
            self.endpoints.note_error(self.endpoint, answer.status, now, now - self.sent_s, model=self.target.sought)
        self.response_data(b"", True)

    def finish(self, outcome: Outcome, error: str = "", now: float = 0.0) -> None:
        """See `Lifecycle.finish`. An upstream's error is recorded with its text."""
        answer = self.answer
        if answer is not None and answer.code and outcome is _ANSWERED:
            error = answer.passed_on()[0]
            if answer.code == DEADLINE_EXCEEDED:
                outcome = Outcome.DEADLINE_EXCEEDED
        super().finish(outcome, error, now)
