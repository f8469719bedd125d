"""The v2 protocol over HTTP: paths and their answers, on buffered exchanges.

Everything here is synchronous. `refuse` checks the head before the body is read; `handle` answers at once or keeps the
exchange until the batcher replies. Routes of known models are cached by method and path.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

import msgspec

from oriel_inference.errors import InferenceError, InvalidRequest, Outcome, UnknownModel
from oriel_inference.model import is_served_name
from oriel_inference.servers import region_api, repository_api
from oriel_inference.servers.cloud import CloudPaths
from oriel_inference.servers.encoding import ACCEPTED, Encodings, is_encoded, is_known
from oriel_inference.servers.generate import generate
from oriel_inference.servers.http_call import answer, hinted, json_object, refuse
from oriel_inference.servers.http_infer import HEADER_LENGTH, HttpInfer
from oriel_inference.servers.large_json import LargeJson
from oriel_inference.servers.memory_report import memory_report
from oriel_inference.servers.not_served import system_region, why_not_served, without_regions
from oriel_inference.servers.request_record import keep_traces
from oriel_inference.servers.restrictions import NOT_RESTRICTED, Restriction
from oriel_inference.servers.statuses import as_inference_error, head_outcome, head_refusal, http_status, identity
from oriel_inference.servers.surface import SERVER_VERSION, Surface
from oriel_wire.context import ARTEFACT, LANGUAGE, LOOP_US, PROVIDER, TENANT
from oriel_wire.engine.buffered import Body, Exchange, Refusal
from oriel_wire.engine.kernel import thread_busy_s
from oriel_wire.engine.peers import page_refusal
from oriel_wire.h1.request import RequestHead
from oriel_wire.observe.recall import KEEP
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.metadata import encode_metadata, message_json

_MAX_ROUTES = 4096

_SERVER_PATHS = {
    "/v2": "metadata",
    "/v2/": "metadata",
    "/v2/health/live": "live",
    "/v2/health/ready": "ready",
    "/v2/models/stats": "all_stats",
    "/v2/logging": "logging",
    "/v2/trace/setting": "trace",
    KEEP: "keep",
}
_MODEL_PATHS = {"": "model_metadata", "ready": "model_ready", "config": "config", "stats": "stats", "infer": "infer"}
_MODEL_PATHS |= {"generate": "generate", "generate_stream": "generate_stream"}
_CALLS = frozenset({"infer", "generate", "generate_stream"})
_REGIONS = frozenset({"region_status", "region_register", "region_unregister"})  # of shared memory that is served
_POSTED = _CALLS | {"keep", "regions_unregister", "region_register", "region_unregister"} | repository_api.POSTED
_SETTINGS = frozenset({"logging", "trace"})
_NOT_FOUND = (404, "Not Found")


@dataclass(frozen=True, slots=True)
class _Route:
    kind: str
    model: str = ""
    version: str = ""


class HttpFrontend:
    """The callbacks `refuse` and `handle` for `oriel_wire.engine.buffered.serve`."""

    def __init__(
        self,
        surface: Surface,
        encodings: Encodings,
        large_json: LargeJson,
        *,
        local: bool = False,
        restricted: Mapping[str, Restriction] = NOT_RESTRICTED,
        cloud: CloudPaths | None = None,
    ) -> None:
        """local: True if only this machine reaches the port; pages in a browser here must not control the server.
        restricted: kinds of routes that need a secret. cloud: the paths of the port, if they are not those of v2.
        """
        self._local = local
        self._restricted = restricted
        self._surface = surface
        self._encodings = encodings
        self._infer = HttpInfer(surface, encodings, large_json, "" if cloud is None else cloud.mime)
        self._target = None if cloud is None else cloud.target
        self._archives = None if cloud is None else cloud.models
        self._routes: dict[tuple[str, str], _Route] = {}
        self._repository = repository_api.HttpRepository(surface, large_json)
        self._plain: dict[str, Callable[[Exchange, _Route], None]] = {
            "metadata": self._server_metadata,
            "live": self._live,
            "ready": self._ready,
            "all_stats": self._stats,
            "logging": self._logging,
            "trace": self._trace,
            "keep": self._keep,
            "stats": self._stats,
            "model_metadata": self._model_metadata,
            "model_ready": self._model_ready,
            "config": self._config,
            "repository_memory": self._memory,
            "regions_status": lambda exchange, _: answer(exchange, b"[]"),
            "regions_unregister": lambda exchange, _: answer(exchange, b""),
        }

    def explain(
        self, head: RequestHead | None, status: int, message: str, outcome: Outcome | None = None, model: str = ""
    ) -> Refusal:
        """Return and count a refusal of a head, or of wrong framing."""
        refusal = head_refusal(head, status, message, outcome)
        self._surface.meter.turned_away(refusal.headers[0][1], status, head_outcome(status, outcome), model)
        return refusal

    def refuse(self, head: RequestHead) -> Refusal | None:
        """Check path, method, encoding and model name: everything that needs no body."""
        route = self._route(head)
        if not isinstance(route, _Route):
            return self.explain(head, *route)
        if self._restricted and (needed := self._restricted.get(route.kind)) and not needed.met(head.get):
            why = f"This API is restricted, expecting header '{needed.header}'"
            return self.explain(head, 403, why, Outcome.RESTRICTED, route.model)
        if self._local and head.method == "POST" and route.kind not in _CALLS and (why := page_refusal(head.get)):
            return self.explain(head, 400, why)
        encoding = head.content_encoding
        if encoding and is_encoded(encoding) and not (is_known(encoding) and route.kind in _CALLS):
            what = f"send the body as it is or as one of {ACCEPTED}"
            refusal = self.explain(head, 501, what, Outcome.NOT_SUPPORTED, route.model)
            return Refusal(refusal.status, [*refusal.headers, ("accept-encoding", ACCEPTED)], refusal.body)
        if route.kind in _CALLS:
            try:
                self._surface.catalog.get(route.model, route.version)
            except UnknownModel as error:
                message = hinted(error, head).message
                return self.explain(head, 404, message, error.outcome, route.model)
            except InferenceError:
                return None  # answered with Retry-After once the body has arrived
        return None

    def views(self, head: RequestHead) -> bool:
        """Return whether the body has tensors behind a JSON part, so that the server needs only views of it."""
        route = self._route(head)
        is_infer = isinstance(route, _Route) and route.kind == "infer"
        return is_infer and head.content_encoding is None and HEADER_LENGTH in head.by_name()

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or when its batch has run."""
        route = self._route(exchange.head)
        assert isinstance(route, _Route)  # checked by `refuse`
        encoding = exchange.head.content_encoding
        if encoding is not None and is_encoded(encoding) and route.kind in _CALLS:
            self._encodings.decompress(bytes(exchange.body), lambda body: self._decompressed(exchange, route, body))
        else:
            self._answer(exchange, route, exchange.body)

    def _decompressed(self, exchange: Exchange, route: _Route, body: bytes | InferenceError) -> None:
        if exchange.aborted:
            return
        if isinstance(body, InferenceError):
            self._refuse(exchange, route, body)
        else:
            self._answer(exchange, route, body)

    def _answer(self, exchange: Exchange, route: _Route, body: Body) -> None:
        kind = route.kind
        try:
            if kind == "infer":
                self._infer.start(exchange, route.model, route.version, body)
            elif kind in _CALLS:
                stream = kind != "generate"
                generate(self._surface, exchange, route.model, route.version, bytes(body), stream=stream)
            elif kind in repository_api.POSTED:
                self._repository.start(exchange, kind, route.version, route.model)
            elif kind == "archives" and self._archives is not None:
                self._surface.control.spawn(self._archives.answer(exchange, route.model))
            elif kind in _REGIONS and self._surface.regions is not None:
                region_api.answer_http(self._surface.regions, exchange, kind.removeprefix("region_"), route.version)
            else:
                self._plain[kind](exchange, route)
        except Exception as failure:
            self._refuse(exchange, route, as_inference_error(failure))

    def _refuse(self, exchange: Exchange, route: _Route, error: InferenceError) -> None:
        """Refuse a request that has no request record."""
        name_value = identity(exchange.head)
        if route.kind in _CALLS:
            self._surface.meter.turned_away(name_value[1], http_status(error), error.outcome, route.model)
        refuse(exchange, hinted(error, exchange.head), [name_value])

    # Other requests ---------------------------------------------------------------------------------------------

    def _live(self, exchange: Exchange, _: _Route) -> None:
        answer(exchange, b'{"live":true}')

    def _ready(self, exchange: Exchange, _: _Route) -> None:
        ready, reason = self._surface.readiness()
        if ready:
            load = self._surface.language_load()
            answer(exchange, b'{"ready":true}', more=[(LANGUAGE, load)] if load else ())
        else:
            outcome = Outcome.SERVER_STOPPING if self._surface.stopping else Outcome.MODEL_NOT_READY
            name = identity(exchange.head)
            document = {"ready": False, "error": reason, "reason": outcome.value, "request_id": name[1]}
            answer(exchange, msgspec.json.encode(document), 503 if self._surface.stopping else 400, name)

    def _server_metadata(self, exchange: Exchange, _: _Route) -> None:
        listed = self._surface.extensions(of_tenant=TENANT in exchange.head.by_name())
        document = {"name": self._surface.server_id, "version": SERVER_VERSION, "extensions": listed}
        answer(exchange, msgspec.json.encode(document))

    def _model_metadata(self, exchange: Exchange, route: _Route) -> None:
        catalog = self._surface.catalog
        answer(exchange, encode_metadata(catalog.metadata(route.model, route.version)))

    def _model_ready(self, exchange: Exchange, route: _Route) -> None:
        ready = self._surface.model_ready(route.model, route.version)
        answer(exchange, msgspec.json.encode({"name": route.model, "ready": ready}), 200 if ready else 400)

    def _config(self, exchange: Exchange, route: _Route) -> None:
        answer(exchange, message_json(self._surface.catalog.config(route.model, route.version)))

    def _memory(self, exchange: Exchange, _: _Route) -> None:
        answer(exchange, msgspec.json.encode(memory_report(self._surface)))

    def _stats(self, exchange: Exchange, route: _Route) -> None:
        self._surface.control.spawn(self._answer_stats(exchange, route))

    async def _answer_stats(self, exchange: Exchange, route: _Route) -> None:
        surface = self._surface
        try:
            texts = [message_json(each) async for each in surface.statistics(route.model, route.version)]
            found = surface.execution(route.model, route.version) if route.model else ("", "")
        except Exception as failure:
            self._refuse(exchange, route, as_inference_error(failure))
            return
        more = [each for each in zip((PROVIDER, ARTEFACT), found, strict=True) if each[1]]
        more.append((LOOP_US, str(round(thread_busy_s() * 1e6))))
        answer(exchange, b'{"model_stats":[%b]}' % b",".join(texts), more=more)

    def _logging(self, exchange: Exchange, _: _Route) -> None:
        log = self._surface.log
        if exchange.head.method == "POST":
            log.change(json_object(bytes(exchange.body)))
        answer(exchange, msgspec.json.encode(log.shown()))

    def _trace(self, exchange: Exchange, route: _Route) -> None:
        traces = self._surface.traces
        if exchange.head.method == "POST":
            given = {}
            for name, value in json_object(bytes(exchange.body)).items():
                given[name] = texts = [] if value is None else value if isinstance(value, list) else [value]
                if not all(isinstance(each, str) for each in texts):
                    raise InvalidRequest(f"trace setting {quoted(name)} must be a text, a list of texts, or null")
            traces.change(route.model, given)
        found = traces.shown(route.model)
        shown = {name: texts if name == "trace_level" else texts[0] for name, texts in found.items()}
        answer(exchange, msgspec.json.encode(shown))

    def _keep(self, exchange: Exchange, _: _Route) -> None:
        """Send the spans of traces that a server in front asks for."""
        trusted = exchange.peer in self._surface.peers
        kept = keep_traces(self._surface, bytes(exchange.body)) if trusted else None
        if kept is not None:
            answer(exchange, kept)
        else:
            answer(exchange, b"{}", 400 if trusted else 404)

    # Routing ----------------------------------------------------------------------------------------------------

    def _route(self, head: RequestHead) -> _Route | tuple[int, str] | tuple[int, str, Outcome]:
        line = head.line
        key = (line.method, line.path) if self._target is None else self._target(head)
        method, path = key
        found = self._routes.get(key)
        if found is not None:
            return found
        route = self._resolve_region(head, path) or _resolve(path)
        if route is None:
            why = why_not_served(path)
            return _NOT_FOUND if why is None else (501, why, Outcome.NOT_SUPPORTED)
        allowed = ("POST",) if route.kind in _POSTED else ("GET", "HEAD", "POST")[: 3 if route.kind in _SETTINGS else 2]
        if route.kind == "archives":
            allowed = ("GET", "DELETE") if route.model else ("GET", "POST")
        if method not in allowed:
            return 405, f"use {allowed[0]} for this path"
        # Only routes of existing models are cached, because their number is known. Those of regions depend on the head.
        cached = self._exists(route) if route.model else not route.version and not route.kind.startswith("region")
        if len(self._routes) < _MAX_ROUTES and cached:
            self._routes[key] = route
        return route

    def _resolve_region(self, head: RequestHead, path: str) -> _Route | None:
        """Return the route of a request for regions of shared memory, if its sender may use any."""
        may = self._surface.regions is not None and TENANT not in head.by_name()
        found = system_region(path) if may else None
        return _Route(f"region_{found[0]}", version=found[1]) if found else None

    def _exists(self, route: _Route) -> bool:
        try:
            self._surface.catalog.get(route.model, route.version)
        except InferenceError:
            return False
        return True


def _resolve(path: str) -> _Route | None:
    """Decode a path once: /v2/models/M[/versions/V][/what] and the server's own paths; None for anything else."""
    if path in _SERVER_PATHS:
        return _Route(_SERVER_PATHS[path])
    if path.startswith("/v2/repository/"):
        found = repository_api.resolve(path)
        return _Route(found[0], found[2], found[1]) if found else None  # version: the name of the repository
    if path.startswith("models/"):  # of SageMaker's; a client's begins with a slash
        return _Route("archives", unquote(path.removeprefix("models/"), errors="replace"))
    if action := without_regions(path):
        return _Route(f"regions_{action}")
    parts = path.split("/")
    if len(parts) < 4 or len(parts) > 7 or parts[1:3] != ["v2", "models"]:
        return None
    model, rest = unquote(parts[3], errors="replace"), parts[4:]
    if not is_served_name(model):
        return None
    version = ""
    if rest[:1] == ["versions"]:
        if len(rest) < 2 or not rest[1].isascii() or not rest[1].isdigit() or len(rest[1]) > 18:
            return None
        version, rest = rest[1], rest[2:]
    if rest == ["trace", "setting"] and not version:
        return _Route("trace", model)
    if len(rest) > 1:
        return None
    kind = _MODEL_PATHS.get(rest[0] if rest else "")
    if kind is None or rest == [""]:
        return None
    return _Route(kind, model, version)
