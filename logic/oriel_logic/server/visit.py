"""One request as it goes through the server, and its spans.

The spans are made in the thread that sends them, and only for requests whose trace is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oriel_logic.errors import Outcome
from oriel_logic.observe.stages import Ledger, Stage
from oriel_logic.server.releases import Release
from oriel_wire.context import CallContext
from oriel_wire.observe.semantics import GRPC_SERVICE, Attributes, gen_ai_use, grpc_code, http_server
from oriel_wire.observe.trace import Span, TraceContext, server_span

PROVIDER = "oriel"  # as the conventions for generative AI name who serves the model
STREAM = f"{GRPC_SERVICE}/ModelStreamInfer"


@dataclass(slots=True, kw_only=True)
class Visit:
    """One request. `outcome` is set on the way; `status` is what was sent.

    started_s, ended_s: monotonic seconds at which its head was complete, and at which it was counted.
    release: the release that answers it, until it has been counted.
    parent_id: the caller's span, 0 if there is none.
    target: the name that usage is recorded for; "" for the service. bytes_in, bytes_out: sizes of the bodies.
    request: method and path.
    tokens: requested model, tokens read, written and found in a cache as far as they are known, of a call of the OpenAI
    API. first_s: monotonic seconds at which the first token came, 0 if none has.
    write: writes a piece of a streamed answer beside those of its iterator, once the first of these is written. It
    calls the function that makes the piece and returns True; or it returns False, as the client does not read.
    """

    call: CallContext
    ledger: Ledger
    started_s: float
    ended_s: float = 0.0
    parent_id: int = 0
    service: str = ""
    release: Release | None = None
    outcome: Outcome | None = None
    status: int = 0
    target: str = ""
    bytes_in: int = 0
    bytes_out: int = 0
    request: tuple[str, str] = ("", "")
    tokens: tuple[str, int | None, int | None, int | None] | None = None
    first_s: float = 0.0
    write: Callable[[Callable[[], bytes]], bool] | None = None

    def begin(self, release: Release) -> None:
        """Record the release that answers the request; it counts as in use until the visit is finished."""
        self.release = release
        self.service = release.name
        release.began()


def keeps_alone(visit: Visit) -> bool:
    """Return whether the server keeps a trace without being asked: the request failed, was late or its caller left."""
    return visit.status >= 500 or visit.outcome is Outcome.CALLER_LEFT


def spans_of(visit: Visit) -> list[Span]:
    """Return the SERVER span of a request, and one span for each of its stages: CLIENT for a call of a model."""
    call, own, service, status, outcome = visit.call, visit.ledger.root, visit.service, visit.status, visit.outcome
    method, path = visit.request
    otherwise = "/v1/services/{service}" if service else ""
    name, attributes = http_server(method, "http", path, "1.1", status, otherwise=otherwise)
    attributes["oriel.request_id"] = call.request_id
    if service:
        attributes["oriel.service"] = service
    if call.tier:
        attributes["oriel.tier"] = call.tier
    if visit.tokens is not None:
        attributes |= gen_ai_use(*visit.tokens) | {"gen_ai.provider.name": PROVIDER}
    failed = status >= 500 or (outcome is Outcome.HANDLER_FAILED)
    if outcome is not None and outcome is not Outcome.OK:
        attributes["oriel.outcome"] = outcome.value
        if failed:
            attributes["error.type"] = outcome.value
    spans = [server_span(name, own, visit.parent_id, (visit.started_s, visit.ended_s), attributes, failed)]
    spans += [stage_span(stage, own, visit.ended_s) for stage in visit.ledger.stages if stage.start_s]
    return spans


def stage_span(stage: Stage, own: TraceContext, ended_s: float) -> Span:
    """Return the span of one stage. ended_s: the time when its request ended, for a stage that did not."""
    attributes: dict[str, Any] = dict(stage.attributes)
    name, failed = stage.name, bool(stage.error)
    if stage.kind == "client":
        name, failed = _client(stage, attributes)
    if failed:
        attributes.setdefault("error.type", stage.error)
    return Span(
        name=name,
        context=stage.context,
        parent_id=own.span_id,
        start_s=stage.start_s,
        end_s=stage.end_s or ended_s,
        kind=stage.kind,
        attributes=attributes,
        failed=failed,
    )


def _client(stage: Stage, attributes: Attributes) -> tuple[str, bool]:
    """Add what is known of a call of a model. Returns the name of its span, and whether it failed."""
    hop = stage.hop
    if hop is None:
        if stage.name != "stream":
            attributes["http.request.method"] = method = "GET" if stage.name == "metadata" else "POST"
            return method, bool(stage.error)
        attributes |= {"rpc.system.name": "grpc", "rpc.method": STREAM}
        return STREAM, bool(stage.error)
    attributes["server.address"], attributes["server.port"] = hop.host, hop.port
    if not hop.path:
        attributes |= {"rpc.system.name": "grpc", "rpc.method": hop.method}
        if hop.status < 0:
            return hop.method, bool(stage.error)
        attributes["rpc.status_code"] = code = grpc_code(hop.status)
        return hop.method, bool(stage.error) or code not in ("OK", "CANCELLED")
    attributes["http.request.method"] = hop.method
    attributes["url.full"] = f"http://{hop.host}:{hop.port}{hop.path}"
    if hop.resent:
        attributes["http.request.resend_count"] = hop.resent
    if hop.status:
        attributes["http.response.status_code"] = hop.status
        if hop.status >= 400:
            attributes["error.type"] = str(hop.status)
    return hop.method, bool(stage.error) or hop.status >= 400
