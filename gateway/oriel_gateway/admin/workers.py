"""The admin port of a gateway with workers: it asks all of them, and makes one answer of theirs."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from time import time
from typing import Any, Final

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from oriel_gateway.admin.console.live import SECOND_S, STREAM
from oriel_gateway.admin.guard import Guard
from oriel_gateway.admin.merged import merged, merged_decisions, one_value
from oriel_wire.observe import exposition
from oriel_wire.observe.telemetry import END, wants_openmetrics
from oriel_wire.process.control import health_routes, metrics_response

__all__ = ["STREAM", "WorkersAdmin"]
_ASK_S: Final = 5.0
_READY_S: Final = 0.5  # a probe is answered in a second, also while a worker stands still
_PASSED: Final = ("accept", "authorization", "origin", "content-type", "if-none-match")
_SENT: Final = ("content-type", "cache-control", "etag", "content-security-policy", "x-content-type-options")
_BODY_BYTES: Final = 4096


class WorkersAdmin:
    """Asks the workers. paths: of the sockets of their admin pages. draining: returns whether the gateway stops.

    started: returns whether all workers have served.

    Counts never fall, or else the rates of Prometheus would show all calls of the others again: the last ones of a
    worker stay when it ends, and stand for it while it does not answer.
    """

    def __init__(self, paths: Sequence[Path], draining: Callable[[], bool], started: Callable[[], bool]) -> None:
        self._draining = draining
        self._started = started
        self._last: dict[tuple[int, bool], str] = {}  # (worker, whether OpenMetrics) -> its latest metrics
        self._ended: dict[bool, str] = {}  # whether OpenMetrics -> the counts of workers that have ended
        self._clients = [
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://worker", timeout=_ASK_S
            )
            for path in paths
        ]

    def app(self, token: str | None) -> Guard:
        """Return the application of the admin port. token: as for the admin port of a gateway by itself."""
        live, _ = health_routes(lambda: (True, ""), None)
        routes = [
            live,
            Route("/health/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/queues", self._queues),
            Route("/decisions", self._decisions),
            Route("/decisions/{request_id}", self._decisions),
            Route(STREAM, self._live),
            Route("/{path:path}", self._first, methods=["GET", "POST"]),
        ]
        return Guard(Starlette(routes=routes), token)

    async def close(self) -> None:
        """Close the connections to the workers."""
        for client in self._clients:
            await client.aclose()

    def ended(self, index: int) -> None:
        """Keep the counts of a worker that has ended."""
        for form in (False, True):
            if text := self._last.pop((index, form), ""):
                self._ended[form] = exposition.merged([self._ended.get(form, ""), exposition.counts(text)], one_value)

    async def _ask(
        self, client: httpx.AsyncClient, request: Request, body: bytes = b"", timeout_s: float = _ASK_S
    ) -> httpx.Response | None:
        """Pass a request on to one worker; return None if it does not answer."""
        url = str(request.url.path) + (f"?{request.url.query}" if request.url.query else "")
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        try:
            return await client.request(request.method, url, headers=headers, content=body, timeout=timeout_s)
        except httpx.HTTPError:
            return None

    async def _all(self, request: Request, timeout_s: float = _ASK_S) -> list[httpx.Response]:
        """Return the answers of all workers that answer."""
        found = await asyncio.gather(*[self._ask(each, request, timeout_s=timeout_s) for each in self._clients])
        return [each for each in found if each is not None]

    async def _ready(self, request: Request) -> Response:
        """Ready once all workers have served, and then while one of them is: others may be about to start again."""
        answers = await self._all(request, _READY_S)
        ready = [each for each in answers if each.status_code == 200]
        if ready and self._started() and not self._draining():
            return JSONResponse({"ready": True})
        reasons = [each.json()["reason"] for each in answers if each.status_code != 200]
        return JSONResponse({"ready": False, "reason": (reasons or ["workers start"])[0]}, status_code=503)

    async def _metrics(self, request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        await asyncio.gather(*[self._renew(index, request, openmetrics) for index in range(len(self._clients))])
        texts = [self._last.get((index, openmetrics), "") for index in range(len(self._clients))]
        texts.append(self._ended.get(openmetrics, ""))
        whole = await asyncio.to_thread(exposition.merged, texts, one_value)  # the loop answers for limits meanwhile
        return await metrics_response(iter([whole]), openmetrics=openmetrics)

    async def _renew(self, index: int, request: Request, openmetrics: bool) -> None:
        """Keep the latest metrics of a worker, if it answers."""
        answer = await self._ask(self._clients[index], request)
        if answer is not None and answer.status_code == 200:
            self._last[index, openmetrics] = answer.text.removesuffix(END)

    async def _queues(self, request: Request) -> Response:
        return JSONResponse(merged([each.json() for each in await self._all(request)]))

    async def _decisions(self, request: Request) -> Response:
        answers = await self._all(request)
        bad = next((each for each in answers if each.status_code == 400), None)
        if bad is not None or not answers:
            return _passed_on(bad)
        limit = int(request.query_params.get("limit", "20"))
        found = merged_decisions([each.json() for each in answers], limit)
        return JSONResponse(found, status_code=200 if found["decisions"] else 404)

    async def _first(self, request: Request) -> Response:
        """Pass on what each worker has whole: to the first one, or the next that answers."""
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > _BODY_BYTES:
                return JSONResponse({"error": {"message": f"at most {_BODY_BYTES} bytes"}}, status_code=413)
        for client in self._clients:
            if (answer := await self._ask(client, request, body)) is not None:
                return _passed_on(answer)
        return _passed_on(None)

    async def _live(self, request: Request) -> Response:
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
        return StreamingResponse(self._snapshots(), headers=headers)

    async def _snapshots(self) -> AsyncGenerator[bytes]:
        """Yield one snapshot a second, made of those of the workers."""
        latest: dict[int, tuple[float, Any]] = {}
        tasks = [asyncio.create_task(self._follow(index, latest)) for index in range(len(self._clients))]
        try:
            while not self._draining():
                await asyncio.sleep(SECOND_S)
                fresh = [value for _, (at, value) in sorted(latest.items()) if time() - at < 3 * SECOND_S]
                if fresh:
                    yield b"data: %b\n\n" % msgspec.json.encode(merged(fresh))
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, index: int, latest: dict[int, tuple[float, Any]]) -> None:
        """Keep the latest snapshot of a worker in `latest`, also of one that has been started again."""
        while True:
            try:
                async with self._clients[index].stream("GET", STREAM, timeout=None) as answer:
                    async for line in answer.aiter_lines():
                        if line.startswith("data: "):
                            latest[index] = (time(), msgspec.json.decode(line[6:]))
            except httpx.HTTPError:
                pass
            await asyncio.sleep(SECOND_S)


def _passed_on(answer: httpx.Response | None) -> Response:
    """Return the answer of a worker as our own; None if no worker answers."""
    if answer is None:
        return JSONResponse({"error": {"message": "no worker answers now: try again"}}, status_code=503)
    headers = {name: answer.headers[name] for name in _SENT if name in answer.headers}
    return Response(answer.content, answer.status_code, headers)
