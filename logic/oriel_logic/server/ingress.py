"""Routes requests: services at `/v1/services/<name>`, and other handlers at exact paths."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from oriel_logic.bodies.messages import Request
from oriel_logic.errors import BadRequest, DeadlineExceeded, MediaUnsupported
from oriel_logic.server.inbound import Inbound
from oriel_logic.server.registry import Registry, for_tenants
from oriel_logic.server.releases import Release
from oriel_logic.server.replies import Reply, error_body, reply_of
from oriel_logic.server.visit import Visit
from oriel_wire.context import SERVICES
from oriel_wire.near_names import near_path
from oriel_wire.observe.recall import Recaller, keep_requested
from oriel_wire.observe.trace import SpanSink
from oriel_wire.observe.unsampled import MAX_TRACES, Noted

Handler = Callable[[Inbound, Visit], Awaitable[Reply]]
PRIVATE = frozenset({"authorization", "proxy-authorization", "cookie"})
MAX_NAMED = 1024
MAX_NAMED_PATH = 256
LIST, MODELS = "/v1/services", "/v1/models"
SERVICE = re.compile(r"/v1/services/([^/]+)(?:/versions/([^/]+))?\Z")


async def models(inbound: Inbound, visit: Visit) -> Reply:
    """Answer `GET /v1/models` where no handler file defines a model for OpenAI clients: they expect a list."""
    return Reply(status=200, body=b'{"object":"list","data":[]}')


class Dispatch:
    """Finds and calls the handler of a request. `routes`: (method, path) -> handler; a path that ends in "/" is a
    prefix.
    """

    def __init__(self, registry: Registry, *, max_body_bytes: int) -> None:
        self._registry = registry
        self._max_body_bytes = max_body_bytes
        self._named: dict[str, tuple[str, str]] = {}  # path -> (service, version), parsed once
        self.routes: dict[tuple[str, str], Handler] = {("GET", LIST): self._list, ("GET", MODELS): models}

    async def __call__(self, inbound: Inbound, visit: Visit) -> Reply:
        """Answer a request. Raises LogicError."""
        method, path = inbound.method, inbound.path
        found = self.routes.get((method, path))
        if found is not None:
            return await found(inbound, visit)
        named = self._named.get(path)
        if named is None:
            match = SERVICE.match(path)
            if match is None:
                fitting = {known: each for (known, at), each in self.routes.items() if is_at(at, path)}
                if method in fitting:
                    return await fitting[method](inbound, visit)
                return wrong_method(visit, *sorted(fitting)) if fitting else nothing_here(path, visit, self.routes)
            named = unquote(match[1]), unquote(match[2] or "")
            if len(path) <= MAX_NAMED_PATH:
                if len(self._named) >= MAX_NAMED:
                    self._named.clear()
                self._named[path] = named
        name, version = named
        if method == "POST":
            release = self._registry.find(name, version, visit.call.request_id, inbound.headers.get(SERVICES))
            visit.begin(release)
            return await self.serve(release, inbound, visit)
        if method == "GET":
            return described(self._registry.describe_one(name), visit)
        return wrong_method(visit, "GET", "POST")

    async def serve(self, release: Release, inbound: Inbound, visit: Visit) -> Reply:
        """Answer a request with this release. Raises LogicError."""
        definition = release.definition
        headers = inbound.headers
        encoding = headers.get("content-encoding")
        if encoding is not None and encoding.strip().lower() not in ("", "identity"):
            raise MediaUnsupported("send the body without a content encoding, as it is")
        limit_bytes = definition.options.max_body_bytes or self._max_body_bytes
        body = b"" if definition.reads_stream else inbound.body.whole
        if body is None or len(body) > limit_bytes:
            body = await read_body(inbound, visit, limit_bytes)
        request = Request(
            body=body,
            content_type=headers.get("content-type", "").partition(";")[0].strip().lower(),
            query=inbound.query,
            headers=public(headers),
        )
        pieces = inbound.pieces() if definition.reads_stream else None
        return await release.pipeline.run(definition, request, visit.call, visit.ledger, pieces, limit_bytes)

    async def _list(self, inbound: Inbound, visit: Visit) -> Reply:
        return described({"services": self._registry.describe()}, visit)


def described(facts: Mapping[str, Any], visit: Visit) -> Reply:
    """Answer with a description: the whole of it only to trusted peers that do not call for a tenant."""
    call = visit.call
    return reply_of(facts if call.trusted and not (call.tenant or call.tier) else for_tenants(facts))


def public(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that a handler sees."""
    return {name: value for name, value in headers.items() if name not in PRIVATE and not name.startswith("x-oriel-")}


def is_at(known: str, path: str) -> bool:
    return path.startswith(known) if known.endswith("/") else path == known


async def read_body(inbound: Inbound, visit: Visit, limit_bytes: int) -> bytes:
    """Read the whole body under the request's deadline, as its stage "body"; one that came with its head needs no
    stage.

    Raises InputTooLarge, DeadlineExceeded.
    """
    with visit.ledger.stage("body"):
        if inbound.body.complete:
            return await inbound.read(limit_bytes)
        try:
            async with asyncio.timeout(visit.call.remaining_s(time.monotonic())):
                return await inbound.read(limit_bytes)
        except TimeoutError as error:
            raise DeadlineExceeded("body") from error


def nothing_here(path: str, visit: Visit, routes: Iterable[tuple[str, str]] = ()) -> Reply:
    """Answer that there is nothing at `path`. routes: a hint may name one of these."""
    message, near = "services are at /v1/services/<name>", near_path(path) if len(path) <= MAX_NAMED_PATH else ""
    if SERVICE.match(near) or any(is_at(known, near) for _, known in routes):
        message = f"{near} is one (a path has /v1 once, and no slash at its end)"
    body = error_body(404, f"there is nothing at this path: {message}", "not_found", visit.call.request_id)
    return Reply(status=404, body=body)


def wrong_method(visit: Visit, *allowed: str) -> Reply:
    message = "this path does not take this method: call a service with POST"
    body = error_body(405, message, "method_not_allowed", visit.call.request_id)
    return Reply(status=405, body=body, headers=(("allow", ", ".join(allowed)),))


class Keeping:
    """The handler of `POST /oriel/v1/keep`, by which a gateway asks for the spans of traces that it keeps at their end.

    recaller: asks the inference servers that the requests called.
    """

    def __init__(self, sink: SpanSink, recaller: Recaller) -> None:
        self._sink = sink
        self._recaller = recaller

    async def __call__(self, inbound: Inbound, visit: Visit) -> Reply:
        """Answer; a sender that is not trusted finds nothing at this path."""
        if not visit.call.trusted:
            return nothing_here(inbound.path, visit)
        body = keep_requested(self._sink, await inbound.read(MAX_TRACES * 33), self._pass_on)
        if body is None:
            raise BadRequest(f"send up to {MAX_TRACES} trace ids, one a line")
        return Reply(status=200, body=body)

    def _pass_on(self, found: Iterable[Noted]) -> None:
        for trace_id, _, record, _ in found:
            visit: Visit = record[0]
            for hop in {stage.hop for stage in visit.ledger.stages if stage.hop is not None}:
                self._recaller.ask(hop.host, hop.port, f"{trace_id:032x}", grpc=not hop.path)
