"""`/v1/services`: HTTP in, a service's answer out."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from oriel_logic.envelope import Visit, send_reply, visit_of
from oriel_logic.errors import DeadlineExceeded, HandlerFailed, InputTooLarge, LogicError, MediaUnsupported, Outcome
from oriel_logic.messages import Request
from oriel_logic.pipeline import Pipeline
from oriel_logic.registry import Registry
from oriel_logic.replies import Reply, error_body, error_reply, reply_of

__all__ = ["application"]

_log = logging.getLogger(__name__)
MAX_DROPPED_BYTES = 64 << 20
PRIVATE = frozenset({"authorization", "proxy-authorization", "cookie"})


class ClientLeft(Exception):
    """Nobody is there to answer. Stays inside this module."""


def application(registry: Registry, pipeline: Pipeline, *, max_body_bytes: int) -> Starlette:
    """The routes; to be wrapped in `Envelope`."""

    async def services(_: HttpRequest) -> Response:
        return json_response({"services": registry.describe()})

    return Starlette(
        routes=[
            Route("/v1/services", services),
            Route("/v1/services/{name}", ServiceInfo(registry), methods=["GET"]),
            Route("/v1/services/{name}", ServiceCall(registry, pipeline, max_body_bytes), methods=["POST"]),
        ],
        exception_handlers={HTTPException: not_routed},
    )


def json_response(value: object) -> Response:
    return Response(reply_of(value).body, media_type="application/json")


async def not_routed(request: HttpRequest, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    reason, message = {
        404: ("not_found", "there is nothing at this path: services are at /v1/services/<name>"),
        405: ("method_not_allowed", "this path does not take this method: call a service with POST"),
    }.get(status, ("bad_request", "the request cannot be served"))
    body = error_body(message, reason, visit_of(request.scope).call.request_id)
    headers = getattr(error, "headers", None)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


class ServiceInfo:
    """GET: what the service is and whether it can run."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            reply = reply_of(self._registry.describe_one(scope["path_params"]["name"]))
        except LogicError as error:
            reply = error_reply(error, visit_of(scope).call.request_id)
        await send_reply(send, reply)


class ServiceCall:
    """POST: run the service. The caller's departure cancels it at any point."""

    def __init__(self, registry: Registry, pipeline: Pipeline, max_body_bytes: int) -> None:
        self._registry = registry
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        visit = visit_of(scope)
        try:
            reply = await self._reply(scope, receive, visit)
            visit.outcome = Outcome.OK
        except ClientLeft:
            visit.outcome = Outcome.CLIENT_LEFT
            return
        except LogicError as error:
            visit.outcome = error.outcome
            if isinstance(error, HandlerFailed) and error.__cause__ is not None:
                _log.error("request %s: service '%s' failed", visit.call.request_id, visit.service, exc_info=error)
            reply = error_reply(error, visit.call.request_id)
            if not visit.body_read:  # nobody will read the rest of it
                reply = Reply(status=reply.status, body=reply.body, headers=(*reply.headers, ("connection", "close")))
        await send_reply(send, reply)

    async def _reply(self, scope: Scope, receive: Receive, visit: Visit) -> Reply:
        with visit.ledger.stage("body"):
            body = await self._read_body(receive, visit)
        definition = self._registry.find(scope["path_params"]["name"])
        visit.service = definition.name
        encoding = visit.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise MediaUnsupported("send the body without a content encoding, as it is")
        request = Request(
            body=body,
            content_type=visit.headers.get("content-type", "").partition(";")[0].strip().lower(),
            query=scope["query_string"].decode("latin-1"),
            headers={
                name: value
                for name, value in visit.headers.items()
                if name not in PRIVATE and not name.startswith("x-oriel-")
            },
        )
        run = self._pipeline.run(definition, request, visit.call, visit.ledger)
        return reply_of(await while_connected(receive, run))

    async def _read_body(self, receive: Receive, visit: Visit) -> bytes:
        """The whole body. One that is too large is read to its end, and dropped, before it is refused: a client (or
        gateway) that is still sending when the connection closes would see a broken connection and no reason."""
        declared = visit.headers.get("content-length", "0")
        size = int(declared) if declared.isdigit() else 0
        if size > self._max_body_bytes + MAX_DROPPED_BYTES:
            raise self._too_large()
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(visit.call.remaining_s(time.monotonic())):
                while not visit.body_read:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientLeft
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    if size <= self._max_body_bytes:
                        chunks.append(chunk)
                    elif size > self._max_body_bytes + MAX_DROPPED_BYTES:
                        raise self._too_large()
                    else:
                        chunks.clear()
                    visit.body_read = not message.get("more_body", False)
        except TimeoutError as error:
            raise DeadlineExceeded("body") from error
        if size > self._max_body_bytes:
            raise self._too_large()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def _too_large(self) -> InputTooLarge:
        return InputTooLarge(f"the body is larger than the {self._max_body_bytes} bytes this server reads")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Any]) -> Any:
    """Await `work`; if the client leaves meanwhile, cancel it and raise ClientLeft."""
    left = False

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        limit.reschedule(asyncio.get_running_loop().time())

    limit = asyncio.timeout(None)
    watcher: asyncio.Task[None] | None = None
    try:
        async with limit:
            watcher = asyncio.create_task(watch(), name="departure watch")
            return await work
    except TimeoutError as error:
        if left and limit.expired():
            raise ClientLeft from error
        raise
    finally:
        if watcher is not None:
            watcher.cancel()
