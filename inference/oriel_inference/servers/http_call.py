"""What every HTTP answer of the v2 server is made with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from oriel_inference.errors import InferenceError, InvalidRequest
from oriel_inference.servers.statuses import error_body, http_status, identity
from oriel_inference.servers.surface import Surface
from oriel_inference.servers.trail import Trail
from oriel_wire.context import CallContext, from_headers
from oriel_wire.engine.buffered import Exchange
from oriel_wire.errors import BadMessage
from oriel_wire.orca import LOAD_FORMAT
from oriel_wire.v2.depth import check_depth
from oriel_wire.v2.http import JSON_LIMIT_BYTES

__all__ = ["JSON", "answer", "begin", "json_object", "refuse"]

JSON = ("content-type", "application/json")
RETRY_AFTER = ("retry-after", "1")
_objects = msgspec.json.Decoder(dict[str, Any])


def begin(surface: Surface, exchange: Exchange) -> tuple[dict[str, str], CallContext, Trail]:
    """The header fields of a call by name (the first of a name wins), its context and its trail."""
    fields = exchange.head.by_name()
    received_s = exchange.received_s
    ctx = from_headers(
        fields.get,
        now=received_s,
        trusted=exchange.peer in surface.peers,
        default_timeout_s=surface.default_timeout_s,
        sample=False,
    )
    parent_id = ctx.trace.span_id if "traceparent" in fields else 0
    trail = Trail(
        ctx,
        received_s,
        surface.sink,
        surface.meter,
        parent_id=parent_id,
        protocol="http",
        size_bytes=len(exchange.body),
        load_format=fields.get(LOAD_FORMAT, ""),
    )
    return fields, ctx, trail


def answer(exchange: Exchange, body: bytes, status: int = 200) -> None:
    """JSON for a path that is no call."""
    exchange.respond(status, [identity(exchange.head), JSON], body)


def refuse(exchange: Exchange, error: InferenceError, headers: Sequence[tuple[str, str]]) -> None:
    """A refusal. headers: the trail's; without any, the answer says at least which request it was."""
    status = http_status(error)
    extra = [JSON, RETRY_AFTER] if status == 503 else [JSON]
    exchange.respond(status, [*(headers or (identity(exchange.head),)), *extra], error_body(error))


def json_object(body: bytes) -> dict[str, Any]:
    """A body that has to be one JSON object; an empty one is an empty object. Raises InvalidRequest."""
    if len(body) > JSON_LIMIT_BYTES:
        raise InvalidRequest(f"the body has {len(body)} bytes, at most {JSON_LIMIT_BYTES} are accepted")
    try:
        check_depth(body)
        return _objects.decode(body) if body.strip() else {}
    except BadMessage as error:
        raise InvalidRequest(error.message) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not a JSON object: {str(error)[:200]}") from error
