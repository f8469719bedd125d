"""The HTTP side of a call, over HTTP/1.1 and HTTP/2: servers are asked over HTTP/1.1."""

from typing import Any, Final

from oriel_gateway.call.contracts import SMALL_BYTES, Call, Side
from oriel_gateway.call.engine_body import for_engine
from oriel_gateway.call.fallback import SENT_ON
from oriel_gateway.call.heads import Known, head_lines
from oriel_gateway.identity.named_models import naming_another
from oriel_gateway.pools.upstream_answers import AnswerKind, classify_answer

__all__ = ["HTTP"]


class HttpSide(Side):
    """The side of HTTP requests."""

    __slots__ = ()

    def lines_for_others(self, call: Call, left_out: tuple[bytes, ...]) -> bytes | None:
        tenant_lines = call.gateway.targets.tenant_lines(call.tenant)
        return head_lines(call.head, tenant_lines, left_out + call.target.left_out)

    def rename(self, call: Call, model: str) -> bool:
        """Let the body name another model; False if it does not name exactly one."""
        body = naming_another(call.body(), model)
        if body is None:
            return False
        call.replace_body(body, len(body))
        return True

    def classify(self, call: Call, head: Any, data: bytes) -> AnswerKind:
        return classify_answer(head, data, model=bool(call.target.sought))

    def write(self, call: Call, connection: Any, now: float) -> None:
        """Write the whole request. A body of up to `SMALL_BYTES` is kept: it may have to be sent again."""
        mark, lines = call.mark, call.lines
        if lines is None:
            lines = call.lines = _lines(call)
        remaining_ms = int((call.deadline - now) * 1000.0)
        tail = (
            f"x-oriel-timeout-ms: {remaining_ms if remaining_ms > 0 else 1}\r\nx-request-id: {mark.request_id}\r\n"
            f"traceparent: 00-{mark.trace}-{mark.onward}-{mark.flags}\r\n"
        )
        if mark.state:
            tail += f"tracestate: {mark.state}\r\n"
        if call.target.kind == "service" and call.gateway.callers.tickets is not None:
            tail += call.gateway.callers.tickets.line(call.tenant, mark.request_id, call.deadline - now)
        body, size = call._body, call.bytes_in
        if call.gate.pool.engine and size:
            body, lines, more = for_engine(call, lines, now)
            size, tail = sum([len(piece) for piece in body]), tail + more
        if call.head.content_length is not None or call.head.chunked:  # it is complete now: its length is known
            tail += f"content-length: {size}\r\n"
        if (client := call.client) is not None and client.forwarded:
            tail += client.forwarded
        line, host, rest = call.target.line, connection.endpoint.host_line, tail.encode("latin-1")
        if body is None or call.bytes_in <= SMALL_BYTES:
            pieces = (body,) if isinstance(body, bytes) else body or (b"",)
            whole = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            request = b"\r\n".join((line, host, lines, rest, whole))
            connection.request_bytes = len(request)
            connection.transport.write(request)
        else:
            connection.request_bytes = -1
            pieces = (body,) if isinstance(body, bytes) else body
            connection.transport.writelines((b"\r\n".join((line, host, lines, rest, b"")), *pieces))
            call._body = None
        connection.request_done = True


def _lines(call: Call) -> bytes:
    """Return the header lines that are the same whenever the request is sent."""
    head, target = call.head, call.target
    known: Known | None = head.decision
    # the lines that are known name the tier of the target that is known
    if known is not None and known.target.tenant is call.tenant and not target.spills:
        if not known.varies:
            return known.lines
        varying = head.varying
        if target.tokens:
            varying = [line for line in varying if not line.lower().startswith(target.left_out)]
        return b"\r\n".join((known.lines, *varying))
    lines = head_lines(head, call.gateway.targets.tenant_lines(call.tenant), target.left_out)
    return b"%b\r\n%b: true" % (lines, SENT_ON.encode()) if target.spills else lines


HTTP: Final = HttpSide("http")
