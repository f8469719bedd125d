"""The context of a request that travels from hop to hop: deadline, tier, tenant and trace.

On the wire the deadline is the time *left* in milliseconds; inside a process it is absolute and monotonic.
The `x-oriel-*` headers count only from trusted peers; anyone may send `x-request-id` and `traceparent`.
"""

import re
from collections.abc import Callable
from math import ceil

import msgspec
from msgspec.structs import replace

from oriel_wire.observe.sampling import NEVER, Sampling
from oriel_wire.observe.trace import (
    TraceContext,
    follow_trace,
    format_traceparent,
    parse_traceparent,
    random_bits,
    start_trace,
)

TIMEOUT_MS = "x-oriel-timeout-ms"
CLIENT_TIMEOUT_MS = "x-request-timeout-ms"
TIER = "x-oriel-tier"
PRIORITY = "x-oriel-priority"
TENANT = "x-oriel-tenant"
MODELS = "x-oriel-models"
SERVICES = "x-oriel-services"
COST_US = "x-oriel-cost-us"
PROVIDER = "x-oriel-provider"  # with a model's statistics: the execution provider that runs it
ARTEFACT = "x-oriel-artefact"  # with a model's statistics: the state of its compiled artefact, if it asks for one
LANGUAGE = "x-oriel-language"  # with an answer that a server is ready: the calls of its language models
LOOP_US = "x-oriel-loop-us"  # with a model's statistics: how long the server's event loop has had something to do
COST = "x-oriel-cost"  # an answer's use, `dev=NS;cpu=NS;class=NAME`; streamed answers have it among their trailers
ANNOUNCED = "trailer"  # the cost of a streamed answer whose server will report it, until it has
STREAM = "x-oriel-stream"  # wanted milliseconds per token and the most of a whole stream: `token=50;max=600000`
SERVICE_TIER = "x-oriel-service-tier"  # the `service_tier` that a call asked for and gets: "flex" or "priority"
UNBILLED = "x-oriel-unbilled"  # why nobody is charged for a call: "shadow" or "repeat"
REQUEST_ID = "x-request-id"
TICKET = "x-oriel-ticket"  # with a call of a service: calls models for its tenant, as `authorization: Oriel-Ticket ...`
TICKET_SCHEME = "Oriel-Ticket"
INTERNAL = frozenset(
    {TIMEOUT_MS, TIER, SERVICE_TIER, PRIORITY, TENANT, MODELS, SERVICES, COST_US, COST, STREAM, UNBILLED, TICKET}
)

MAX_BAGGAGE_BYTES = 8192
MAX_TIMEOUT_S = 24 * 3600.0
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}\Z")  # some systems read a leading dot as a path
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}\Z")
_COST = re.compile(
    r"dev=([0-9]{1,18});cpu=([0-9]{1,18});class=([a-z0-9_-]{0,32})(?:;tin=([0-9]{1,15});tout=([0-9]{1,15}))?\Z"
)
_STREAM = re.compile(r"token=([0-9]{1,9});max=([0-9]{1,9})\Z")
_TOKENS = re.compile(r"(?:trailer;)?tin=([0-9]{1,15});tout=([0-9]{1,15})\Z")
_MAX_BAND = 255
_REASON_S = 0.1  # an answer takes no longer through two hops


class CallContext(msgspec.Struct, frozen=True, kw_only=True):
    """The context of one request. deadline: absolute `time.monotonic()` seconds; band: 0 is the most urgent.

    unbilled: why nobody is charged for the request, "" if its tenant is.
    trusted: True if the sender's `x-oriel-*` headers are honoured.
    connection: address and port of the client's connection, "" if nobody needs it.
    baggage: the client's own `baggage`, which is passed on and never read.
    ticket: the ticket by which models are called through a gateway, "" if the request brought none.
    token_s: wanted seconds per token of a streamed answer; 0 if none are wanted.
    stream_s: the most seconds that a streamed answer may last; 0 if unknown.
    service_tier: the `service_tier` of the OpenAI API by which the gateway serves the request.
    """

    request_id: str
    deadline: float
    tier: str
    band: int
    tenant: str
    models: tuple[str, ...]
    trace: TraceContext
    trusted: bool = False
    connection: str = ""
    unbilled: str = ""
    baggage: str = ""
    ticket: str = ""
    token_s: float = 0.0
    stream_s: float = 0.0
    service_tier: str = "default"

    def remaining_s(self, now: float) -> float:
        """Seconds left; negative once the deadline has passed."""
        return self.deadline - now

    def log_fields(self, target: str, reason: str = "") -> dict[str, str]:
        """Return the fields of a log record about this request."""
        found = {"request_id": self.request_id, "trace_id": f"{self.trace.trace_id:032x}", "tenant": self.tenant}
        return {**found, "tier": self.tier, "target": target, **({"reason": reason} if reason else {})}


class Used(msgspec.Struct, frozen=True):
    """The use of one call as its server reports it.

    device_ns: nanoseconds of a device of class `device_class`. cpu_ns: nanoseconds of a CPU.
    tokens_in, tokens_out: tokens that were read and written.
    """

    device_ns: int
    cpu_ns: int
    device_class: str
    tokens_in: int
    tokens_out: int


def format_cost(device_ns: int, cpu_ns: int, device_class: str, tokens_in: int = 0, tokens_out: int = 0) -> str:
    """The value of `x-oriel-cost`; tokens only if there are any."""
    tokens = f";tin={tokens_in};tout={tokens_out}" if tokens_in or tokens_out else ""
    return f"dev={device_ns};cpu={cpu_ns};class={device_class}{tokens}"


def parse_cost(value: str) -> Used | None:
    """Read the value of `x-oriel-cost`; None if it is malformed."""
    match = _COST.match(value)
    if match is None:
        return None
    return Used(int(match[1]), int(match[2]), match[3], int(match[4] or 0), int(match[5] or 0))


def with_tokens(value: str, tokens_in: int, tokens_out: int) -> str:
    """Return the value of `x-oriel-cost` with tokens, unless it has some already.

    value: "" where the server reports no cost; then only the tokens are known, and `parse_tokens` reads them.
    """
    if not (tokens_in or tokens_out) or "tin=" in value:
        return value
    return f"{value}{';' if value else ''}tin={tokens_in};tout={tokens_out}"


def parse_tokens(value: str) -> tuple[int, int] | None:
    """Read the tokens of a call whose server reports no cost; see `with_tokens`."""
    match = _TOKENS.match(value)
    return None if match is None else (int(match[1]), int(match[2]))


def new_request_id() -> str:
    """A new request id of 16 characters."""
    return f"{random_bits(64):016x}"


def valid_request_id(value: str) -> bool:
    """Return whether an `x-request-id` from outside may be used unchanged."""
    return _REQUEST_ID.match(value) is not None


def parse_timeout_ms(value: str) -> float | None:
    """Milliseconds as a plain decimal integer -> seconds, capped at a day; None when it is not one."""
    if not value.isascii() or not value.isdigit() or len(value) > 18:
        return None
    return min(int(value) / 1000.0, MAX_TIMEOUT_S)


class ContextPlan(msgspec.Struct, frozen=True):
    """The context in a request head; gRPC servers keep it for calls with the same metadata.

    timeout_s: the timeout in the head, in seconds; None if the head has none.
    client_timeout_s: the client's own timeout, which can only shorten that or the default; None if it sent none.
    request_id, trace: "" and None if every request gets a new one.
    """

    timeout_s: float | None
    client_timeout_s: float | None
    tier: str
    band: int
    tenant: str
    models: tuple[str, ...]
    request_id: str
    trace: TraceContext | None
    sampling: Sampling
    trusted: bool
    unbilled: str = ""
    baggage: str = ""
    ticket: str = ""
    token_s: float = 0.0
    stream_s: float = 0.0
    service_tier: str = "default"

    def at(self, now: float, default_timeout_s: float, connection: str = "") -> CallContext:
        """The context of a request that arrived at `now`."""
        timeout_s = default_timeout_s if self.timeout_s is None else self.timeout_s
        if self.client_timeout_s is not None and self.client_timeout_s < timeout_s:
            timeout_s = self.client_timeout_s
        return CallContext(
            request_id=self.request_id or new_request_id(),
            deadline=now + timeout_s,
            tier=self.tier,
            band=self.band,
            tenant=self.tenant,
            models=self.models,
            trace=self.trace or start_trace(self.sampling),
            trusted=self.trusted,
            connection=connection,
            unbilled=self.unbilled,
            baggage=self.baggage,
            ticket=self.ticket,
            token_s=self.token_s,
            stream_s=self.stream_s,
            service_tier=self.service_tier,
        )

    def of_request(self, get: Callable[[str], str | None]) -> "ContextPlan":
        """Return this plan with what `get` has of one request alone: its timeouts, its id and its trace."""
        request_id = get(REQUEST_ID) or ""
        traceparent = get("traceparent")
        trace = parse_traceparent(traceparent, get("tracestate") or "") if traceparent else None
        return replace(
            self,
            timeout_s=parse_timeout_ms(get(TIMEOUT_MS) or "") if self.trusted else None,
            client_timeout_s=parse_timeout_ms(get(CLIENT_TIMEOUT_MS) or "") or None,
            request_id=request_id if request_id and valid_request_id(request_id) else "",
            trace=follow_trace(trace, self.sampling) if trace is not None else None,
            baggage=bounded_baggage(get("baggage") or "") or self.baggage,
        )


def read_headers(
    get: Callable[[str], str | None], *, trusted: bool, sampling: Sampling = NEVER, ticket: str = ""
) -> ContextPlan:
    """Read the context of an incoming request; `get` takes lower-case header names.

    Malformed values count as absent: a request between units is never refused because of its context.
    `sampling` decides about a trace that starts here.
    """
    tier, band, tenant, models, unbilled = "", 0, "", (), ""  # type: str, int, str, tuple[str, ...], str
    token_s, stream_s = 0.0, 0.0
    if trusted:
        tier = _name(get(TIER))
        tenant = _name(get(TENANT))
        priority = get(PRIORITY) or ""
        band = min(int(priority), _MAX_BAND) if priority.isascii() and priority.isdigit() and len(priority) < 5 else 0
        reason = get(UNBILLED)
        unbilled = reason if reason in ("shadow", "repeat") else ""
        listed = get(MODELS)
        models = tuple(part for part in (p.strip() for p in listed.split(",")) if part) if listed else ()
        token_s, stream_s = _stream(get(STREAM) or "")
    plan = ContextPlan(
        None, None, tier, band, tenant, models, "", None, sampling, trusted, unbilled, "", ticket, token_s, stream_s
    )
    return plan.of_request(get)


def _name(value: str | None) -> str:
    return value if value and _NAME.match(value) else ""


def format_stream(token_s: float, stream_s: float) -> str:
    """The value of `x-oriel-stream`."""
    return f"token={round(token_s * 1000.0)};max={round(stream_s * 1000.0)}"


def _stream(value: str) -> tuple[float, float]:
    """Read `x-oriel-stream`: seconds per token and of the whole stream, each at most a day; zeros if malformed."""
    match = _STREAM.match(value)
    if match is None:
        return 0.0, 0.0
    return min(int(match[1]) / 1000.0, MAX_TIMEOUT_S), min(int(match[2]) / 1000.0, MAX_TIMEOUT_S)


def bounded_baggage(value: str) -> str:
    """A `baggage` to pass on: unread, and nothing if it is larger than MAX_BAGGAGE_BYTES or not printable ASCII."""
    return value if len(value) <= MAX_BAGGAGE_BYTES and value.isascii() and value.isprintable() else ""


def before(deadline: float, now: float) -> float:
    """The deadline of a call to a gateway, early enough that its reason is passed on before `deadline`."""
    return deadline - min(_REASON_S, max(0.0, deadline - now) / 20.0)


class Hop:
    """The headers for the upstream calls of one request, with the common part written once.

    through_gateway: the next hop is a gateway, which knows the caller by the request's ticket.
    """

    __slots__ = ("_deadline", "_fixed", "_through_gateway")

    def __init__(self, ctx: CallContext, *, through_gateway: bool = False) -> None:
        self._deadline, self._through_gateway = ctx.deadline, through_gateway
        lines = [f"{REQUEST_ID}: {ctx.request_id}\r\n"]
        if through_gateway:
            lines.append(f"authorization: {TICKET_SCHEME} {ctx.ticket}\r\n")
        else:
            lines.append(f"{PRIORITY}: {ctx.band}\r\n")
            for name, value in ((TIER, ctx.tier), (TENANT, ctx.tenant), (MODELS, ",".join(ctx.models))):
                if value:
                    lines.append(f"{name}: {value}\r\n")
            if ctx.token_s or ctx.stream_s:
                lines.append(f"{STREAM}: {format_stream(ctx.token_s, ctx.stream_s)}\r\n")
        if ctx.baggage:
            lines.append(f"baggage: {ctx.baggage}\r\n")
        self._fixed = "".join(lines)

    def lines(self, now: float, trace: TraceContext) -> str:
        """Return the lines, each with its CRLF. trace: the context of the span that makes the call.

        The time that is left is rounded up and is at least 0: the next hop refuses a call that is already late.
        """
        if self._through_gateway:
            timeout = f"{CLIENT_TIMEOUT_MS}: {max(1, ceil((before(self._deadline, now) - now) * 1000.0))}"
        else:
            timeout = f"{TIMEOUT_MS}: {max(0, ceil((self._deadline - now) * 1000.0))}"
        state = f"tracestate: {trace.state}\r\n" if trace.state else ""
        return f"{self._fixed}{timeout}\r\ntraceparent: {format_traceparent(trace)}\r\n{state}"

    def headers(self, now: float, trace: TraceContext) -> list[tuple[str, str]]:
        """Return the same as names and values."""
        parts = [line.partition(": ") for line in self.lines(now, trace).split("\r\n")[:-1]]
        return [(name, value) for name, _, value in parts]
