"""Calls a service as HTTP would, through the server's own code. Requests and answers are httpx's."""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import httpx

from oriel_logic.bodies.schemas import mismatch
from oriel_logic.bodies.signature import NotAService
from oriel_logic.errors import HandlerFailed
from oriel_logic.loading.handlers import Loaded, load_file
from oriel_logic.loading.sources import HandlerFile, module_name
from oriel_logic.observe.metrics import Metrics
from oriel_logic.server.envelope import Envelope
from oriel_logic.server.inbound import Body, Inbound
from oriel_logic.server.ingress import Dispatch
from oriel_logic.server.pipeline import Pipeline
from oriel_logic.server.registry import Registry
from oriel_logic.server.releases import Deployment, Release
from oriel_logic.server.replies import Reply
from oriel_logic.server.visit import Visit
from oriel_logic.services.definition import Definition, definition_of
from oriel_logic.services.serving import Services
from oriel_logic.testing.models import FakeModels, fakes_beside
from oriel_logic.testing.workers import ThreadWorkers
from oriel_wire.observe.trace import ListSink

T = TypeVar("T")
TIMEOUT_S = 30.0
MAX_BODY_BYTES = 16 << 20
STREAM_IDLE_S = 30.0


class AsyncClient:
    """Serves one service, or all of a file, in this process.

    served: a function or class with `@service`, or the path of a handler file or of a service's folder.
    models: FakeModels, or a dict of their answers; None for those of a `fakes.py` beside the handler.
    clock: the clock of `ctx.remaining_s`.
    raise_errors: raise the errors of the service's code here too, with their traceback, and TypeError for an answer
        that is not as declared; False to see only what a caller would.
    spans: the spans of every call so far.
    Raises NotAService, and what importing or `setup` raises.
    """

    def __init__(
        self,
        served: Callable[..., Any] | str | Path,
        *,
        models: FakeModels | Mapping[str, Any] | None = None,
        clock: Callable[[], float] = monotonic,
        raise_errors: bool = True,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        if models is None:
            models = fakes_beside(served)
        self.models = models if isinstance(models, FakeModels) else FakeModels(models)
        self._clock = clock
        self._raise_errors = raise_errors
        self._failure: HandlerFailed | None = None
        self._release: Release | None = None
        loaded = loaded_of(served)
        self._names = [each.name for each in loaded]
        services = Services()
        for each in loaded:
            assert each.definition is not None
            services.set_up(each.definition)
        workers = ThreadWorkers(services, clock)
        pipeline = Pipeline(services, workers, self.models.bind, clock=clock)
        self._dispatch = Dispatch(registry_of(loaded, workers, pipeline), max_body_bytes=max_body_bytes)
        self._sink = ListSink()
        self._envelope = Envelope(
            self._handle,
            sink=self._sink,
            metrics=Metrics(),
            default_timeout_s=TIMEOUT_S,
            max_in_flight=1024,
            stream_idle_s=STREAM_IDLE_S,
            clock=clock,
        )
        self.spans = self._sink.spans

    async def post(
        self,
        service: str = "",
        *,
        tier: str = "",
        tenant: str = "",
        timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        """Call a service; its name is needed only if there are several.

        tier, tenant, timeout_s: as a gateway would send them.
        headers: header fields as for `httpx.post`, and so are json, content, files, data and params.
        """
        if not service and len(self._names) > 1:
            raise ValueError(f"say which service: {', '.join(self._names)}")
        own_headers = {**promised(tier, tenant, timeout_s), **(headers or {})}
        return await self.request("POST", f"/v1/services/{service or self._names[0]}", headers=own_headers, **body)

    async def request(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, **body: Any
    ) -> httpx.Response:
        """Make any request, for example GET /v1/services. Streamed answers are read to their end."""
        sent = httpx.Request(method, httpx.URL("http://logic").join(path), headers=headers, **body)
        content = await sent.aread() if isinstance(sent.stream, httpx.AsyncByteStream) else sent.read()
        fields = {name: value for name, value in sent.headers.items() if name != "host"}
        inbound = Inbound(
            method=method,
            path=sent.url.raw_path.decode().partition("?")[0],
            query=sent.url.query.decode(),
            headers=fields,
            size_bytes=len(content),
            body=Body(content),
        )
        self._failure = self._release = None
        visit = self._envelope.visit(self._envelope.plan(fields, trusted=True), self._clock())
        reply = await self._envelope.answer(inbound, visit)
        answer = reply.body
        if reply.pieces is not None:
            answer = b"".join([piece async for piece in reply.pieces])
        if self._failure is not None and self._failure.__cause__ is not None and self._raise_errors:
            raise self._failure.__cause__
        release = self._release
        if self._raise_errors and reply.pieces is None and reply.status == 200 and release is not None:
            wrong = mismatch(release.definition.signature.output, reply.content_type, answer)
            if wrong:
                raise TypeError(f"{release.name}: {wrong}")
        named = [("content-type", reply.content_type), *reply.headers]
        return httpx.Response(reply.status, headers=named, content=answer, request=sent)

    async def _handle(self, inbound: Inbound, visit: Visit) -> Reply:
        try:
            return await self._dispatch(inbound, visit)
        except HandlerFailed as failure:
            self._failure = failure
            raise
        finally:
            self._release = visit.release


class Client:
    """`AsyncClient` for plain test functions: the same, without `await`. All clients share one loop."""

    def __init__(self, served: Callable[..., Any] | str | Path, **options: Any) -> None:
        self._client = AsyncClient(served, **options)
        self.models = self._client.models
        self.spans = self._client.spans

    def post(self, service: str = "", **keywords: Any) -> httpx.Response:
        """See `AsyncClient.post`."""
        return on_the_loop(self._client.post(service, **keywords))

    def request(self, method: str, path: str, **keywords: Any) -> httpx.Response:
        """See `AsyncClient.request`."""
        return on_the_loop(self._client.request(method, path, **keywords))


def registry_of(loaded: Sequence[Loaded], workers: ThreadWorkers, pipeline: Pipeline) -> Registry:
    registry = Registry()
    deployment = Deployment([each.file for each in loaded], workers, pipeline)
    releases = [Release(each.definition, each.file, deployment) for each in loaded if each.definition is not None]
    registry.publish(loaded[0].file.origin, releases)
    return registry


def promised(tier: str, tenant: str, timeout_s: float | None) -> dict[str, str]:
    own_headers = {"x-oriel-tier": tier, "x-oriel-tenant": tenant}
    if timeout_s is not None:
        own_headers["x-oriel-timeout-ms"] = str(round(timeout_s * 1000))
    return {name: value for name, value in own_headers.items() if value}


def loaded_of(served: Callable[..., Any] | str | Path) -> list[Loaded]:
    if isinstance(served, str | Path):
        return loaded_file(Path(served).resolve())
    definition: Definition | None = definition_of(served)
    if definition is None:
        raise NotAService(f"{getattr(served, '__name__', served)!r} is not a service: put @service on it")
    file = HandlerFile(module=served.__module__, attribute=served.__qualname__, name=definition.name)
    return [Loaded(name=definition.name, file=file, definition=definition)]


def loaded_file(path: Path) -> list[Loaded]:
    """Load the services of a file or a service's folder. Raises what importing it raises, or NotAService."""
    folder = path if path.is_dir() else path.parent
    name = path.stem if path.is_file() else path.name
    file = path / "handler.py" if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"there is no handler file {file}")
    found = load_file(HandlerFile(module=module_name(name), path=file, folder=folder, name=name), log=False)
    broken = [each.problem for each in found if each.problem]
    if broken or not found:
        raise NotAService(broken[0] if broken else f"{file.name} has no service: put @service on a function or class")
    return found


_loop: asyncio.AbstractEventLoop | None = None
_lock = threading.Lock()


def on_the_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a loop in its own thread, so that it works in a test that has a running loop."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_loop.run_forever, name="oriel test clients", daemon=True)
            thread.start()
            atexit.register(end, _loop, thread)
        loop = _loop
    return asyncio.run_coroutine_threadsafe(work, loop).result()


def end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(1.0)
    if not loop.is_running():
        loop.close()


class FakeClock:
    """A clock that stands still until a test moves it, in seconds as `time.monotonic`. `ctx.remaining_s` uses it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
