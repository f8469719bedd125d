"""Makes the spans of one request of the logic server. This happens in the thread that sends them, and only for requests
whose trace is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oriel_logic.errors import Outcome
from oriel_logic.observe.stages import Stage
from oriel_wire.context import CallContext
from oriel_wire.observe.semantics import (
    GRPC_SERVICE,
    Attributes,
    gen_ai_use,
    grpc_code,
    http_server,
)
from oriel_wire.observe.trace import Span, TraceContext, server_span

__all__ = ["Ended", "keeps_alone", "spans_of", "stage_span"]

STREAM = f"{GRPC_SERVICE}/ModelStreamInfer"


def keeps_alone(outcome: Outcome, status: int) -> bool:
    """Return whether the server keeps a trace without being asked: the request failed, was late or its caller left."""
    return status >= 500 or outcome is Outcome.CALLER_LEFT


@dataclass(slots=True, kw_only=True)
class Ended:
    """A request that has ended, as far as its spans tell of it. Times are monotonic seconds.

    own: the position of its span. parent_id: the caller's span, 0 if there is none.
    request: method and path.
    tokens: the tokens of a call of the OpenAI API, see `Visit`.
    """

    call: CallContext
    own: TraceContext
    parent_id: int
    request: tuple[str, str]
    service: str
    status: int
    outcome: Outcome
    started_s: float
    ended_s: float
    stages: Sequence[Stage]
    tokens: tuple[str, int | None, int | None] | None


def spans_of(ended: Ended) -> list[Span]:
    """Return the SERVER span of a request, and one span for each of its stages: CLIENT for a call of a model."""
    call, own, service, status, outcome = ended.call, ended.own, ended.service, ended.status, ended.outcome
    method, path = ended.request
    otherwise = "/v1/services/{service}" if service else ""
    name, attributes = http_server(method, "http", path, "1.1", status, otherwise=otherwise)
    attributes["oriel.request_id"] = call.request_id
    if service:
        attributes["oriel.service"] = service
    if call.tier:
        attributes["oriel.tier"] = call.tier
    if ended.tokens is not None:
        attributes |= gen_ai_use(*ended.tokens)
    failed = status >= 500 or (outcome is Outcome.HANDLER_FAILED)
    if outcome is not Outcome.OK:
        attributes["oriel.outcome"] = outcome.value
        if failed:
            attributes["error.type"] = outcome.value
    spans = [server_span(name, own, ended.parent_id, (ended.started_s, ended.ended_s), attributes, failed)]
    spans += [stage_span(stage, own, ended.ended_s) for stage in ended.stages if stage.start_s]
    return spans


def stage_span(stage: Stage, own: TraceContext, ended_s: float) -> Span:
    """Return the span of one stage. ended_s: when its request ended, for a stage that did not."""
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
