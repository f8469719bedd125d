"""What every HTTP answer of the v2 server is made with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from oriel_inference.errors import InferenceError, InvalidRequest, UnknownModel
from oriel_inference.servers.statuses import error_body, http_status, identity
from oriel_inference.servers.surface import Surface
from oriel_inference.servers.trail import Trail
from oriel_policies.documents.promises import fits
from oriel_wire.context import MODELS, CallContext, read_headers
from oriel_wire.engine.buffered import Exchange
from oriel_wire.errors import BadMessage
from oriel_wire.h1 import RequestHead
from oriel_wire.orca import LOAD_FORMAT, report_form
from oriel_wire.v2.depth import check_depth
from oriel_wire.v2.document import MAX_LISTS

__all__ = ["JSON", "HeadPlan", "answer", "begin", "hinted", "json_object", "refuse"]

JSON = ("content-type", "application/json")
RETRY_AFTER = ("retry-after", "1")
MAX_OBJECT_BYTES = 4 << 20
_objects = msgspec.json.Decoder(dict[str, Any])


class HeadPlan:
    """What a call's head alone says; kept with a head that its connection recognises.

    header_length: of the JSON part, None if all of it is JSON.
    """

    __slots__ = ("accept_encoding", "connection", "context", "header_length", "load_form", "parent_id")

    def __init__(self, surface: Surface, exchange: Exchange) -> None:
        fields = exchange.head.by_name()
        self.context = read_headers(fields.get, trusted=exchange.peer in surface.peers, sample=False)
        self.connection = exchange.connection
        trace = self.context.trace
        self.parent_id = trace.span_id if trace is not None else 0
        self.accept_encoding = fields.get("accept-encoding", "")
        self.header_length = exchange.head.header_length
        self.load_form = report_form(fields.get(LOAD_FORMAT, ""))


def begin(surface: Surface, exchange: Exchange) -> tuple[HeadPlan, CallContext, Trail]:
    """What the head of a call says, its context and its trail."""
    head = exchange.head
    plan: HeadPlan = head.plan or HeadPlan(surface, exchange)
    head.plan = plan
    received_s = exchange.received_s
    ctx = plan.context.at(received_s, surface.default_timeout_s, plan.connection)
    trail = Trail(
        ctx,
        received_s,
        surface.sink,
        surface.meter,
        parent_id=plan.parent_id,
        protocol="http",
        size_bytes=len(exchange.body),
        load_form=plan.load_form,
    )
    return plan, ctx, trail


def answer(exchange: Exchange, body: bytes, status: int = 200, name: tuple[str, str] | None = None) -> None:
    """JSON for a path that is no call. name: the header line with the request's id, where the body has it too."""
    exchange.respond(status, [name or identity(exchange.head), JSON], body)


def refuse(exchange: Exchange, error: InferenceError, headers: Sequence[tuple[str, str]]) -> None:
    """A refusal. headers: the trail's, the request's id first; without any, the answer
    says at least which request it was."""
    status = http_status(error)
    extra = [JSON, RETRY_AFTER] if status == 503 else [JSON]
    said = headers or (identity(exchange.head),)
    exchange.respond(status, [*said, *extra], error_body(error, said[0][1]))


def hinted(error: InferenceError, head: RequestHead) -> InferenceError:
    """A refusal for an unknown model names the near one, if the gateway lets this caller use that."""
    if not isinstance(error, UnknownModel):
        return error
    patterns = head.by_name().get(MODELS)
    if patterns is None:  # not from a gateway, or of a tenant that may use all
        return error.with_near_name(lambda name: True)
    allowed = [each.strip() for each in patterns.split(",")]
    return error.with_near_name(lambda name: any(fits(pattern, name) for pattern in allowed))


def json_object(body: bytes) -> dict[str, Any]:
    """A body that has to be one JSON object; an empty one is an empty object. Raises InvalidRequest."""
    if len(body) > MAX_OBJECT_BYTES:
        raise InvalidRequest(f"the body has {len(body)} bytes, at most {MAX_OBJECT_BYTES} are accepted")
    if len(body) > MAX_LISTS and (lists := body.count(b"[") + body.count(b"{")) > MAX_LISTS:
        raise InvalidRequest(f"the body has {lists} lists and objects, at most {MAX_LISTS} are accepted")
    try:
        check_depth(body)
        return _objects.decode(body) if body.strip() else {}
    except BadMessage as error:
        raise InvalidRequest(error.message) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {str(error)[:200]}") from error
