"""The parts of every HTTP answer of the v2 server."""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import msgspec

from oriel_inference.errors import InferenceError, InvalidRequest, RequestTooLarge, UnknownModel
from oriel_inference.servers.request_record import RequestRecord
from oriel_inference.servers.spans import Requested
from oriel_inference.servers.statuses import error_body, http_status, identity
from oriel_inference.servers.surface import Surface
from oriel_policies.documents.promises import fits
from oriel_wire.context import MODELS, CallContext, read_headers
from oriel_wire.engine.buffered import Exchange
from oriel_wire.errors import BadMessage, json_fault
from oriel_wire.h1.request import RequestHead
from oriel_wire.observe.orca import LOAD_FORMAT, report_form
from oriel_wire.v2.depth import check_depth
from oriel_wire.v2.document import MAX_LISTS
from oriel_wire.v2.http import JSON_LIMIT_BYTES

JSON = ("content-type", "application/json")
MAX_OBJECT_BYTES = 4 << 20
MAX_JSON_RATIO = 16  # largest ratio of a compressed body: a megabyte of JSON takes up to 33 ms to convert
_objects = msgspec.json.Decoder(dict[str, Any])


class HeadPlan:
    """The facts that follow from a call's head alone.

    header_length: length of the JSON part, None if the whole body is JSON.
    """

    __slots__ = ("accept_encoding", "connection", "context", "header_length", "load_form", "parent_id")

    def __init__(self, surface: Surface, exchange: Exchange) -> None:
        fields = exchange.head.by_name()
        self.context = read_headers(fields.get, trusted=exchange.peer in surface.peers, sampling=surface.sink.sampling)
        self.connection = exchange.connection
        trace = self.context.trace
        self.parent_id = trace.span_id if trace is not None else 0
        self.accept_encoding = fields.get("accept-encoding", "")
        self.header_length = exchange.head.header_length
        self.load_form = report_form(fields.get(LOAD_FORMAT, ""))


def begin(surface: Surface, exchange: Exchange) -> tuple[HeadPlan, CallContext, RequestRecord]:
    """Return the plan of a call's head, the call's context and its request record."""
    plan = HeadPlan(surface, exchange)
    received_s = exchange.received_s
    ctx = plan.context.at(received_s, surface.default_timeout_s, plan.connection)
    record = RequestRecord(
        surface,
        ctx,
        Requested("http", exchange.head.line.method, exchange.head.line.path),
        received_s,
        parent_id=plan.parent_id,
        size_bytes=len(exchange.body),
    )
    record.load_form = plan.load_form
    return plan, ctx, record


def wait(
    surface: Surface,
    exchange: Exchange,
    model: str,
    record: RequestRecord,
    size_bytes: int,
    resume: Callable[[], None],
) -> None:
    """Have a request wait for its model to be loaded. resume: begins it again. Raises InferenceError."""
    demand = surface.control.demand
    exchange.on_abort = record.wait_for_load(demand, model, size_bytes, resume, partial(refuse, exchange))


def answer(
    exchange: Exchange,
    body: bytes,
    status: int = 200,
    name: tuple[str, str] | None = None,
    more: Sequence[tuple[str, str]] = (),
) -> None:
    """Answer a path other than inference with JSON.

    name: the header line of the request's id, if the body has it too. more: further header lines.
    """
    exchange.respond(status, [name or identity(exchange.head), JSON, *more], body)


def refuse(exchange: Exchange, error: InferenceError, headers: Sequence[tuple[str, str]], status: int = 0) -> None:
    """Refuse a request. headers: the headers of the request record, the request's id first; without any, the answer
    carries only the id. status: 0 for that of the error.
    """
    status = status or http_status(error)
    extra = [JSON, ("retry-after", str(max(1, ceil(error.retry_s))))] if status == 503 else [JSON]
    sent = headers or (identity(exchange.head),)
    exchange.respond(status, [*sent, *extra], error_body(error.message, error.outcome, sent[0][1]))


def hinted(error: InferenceError, head: RequestHead) -> InferenceError:
    """Add the near name to the error of an unknown model, if the gateway lets this caller use that model."""
    if not isinstance(error, UnknownModel):
        return error
    patterns = head.by_name().get(MODELS)
    if patterns is None:  # not from a gateway, or from a tenant that may use all models
        return error.with_near_name(lambda name: True)
    allowed = [each.strip() for each in patterns.split(",")]
    return error.with_near_name(lambda name: any(fits(pattern, name) for pattern in allowed))


def check_expanded(exchange: Exchange, size: int) -> None:
    """Raise RequestTooLarge for JSON that is much larger than what was sent. size: its bytes."""
    if size > (most := max(JSON_LIMIT_BYTES, MAX_JSON_RATIO * len(exchange.body))):
        raise RequestTooLarge(f"the JSON is larger than {most} bytes once decompressed: send it without compression")


def json_object(body: bytes) -> dict[str, Any]:
    """Decode a body that has to be one JSON object; an empty body is an empty object. Raises InvalidRequest."""
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
        raise InvalidRequest(f"the body is not a JSON object: {json_fault(body, error)[:200]}") from error
