"""A fake inference server with the real v2 codec, and a logic server without sockets in front of it."""

import asyncio
import contextlib
import os
import socket
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from oriel_logic.app import Unit
from oriel_logic.loading.listing import read_listing, together
from oriel_logic.loading.sources import handler_files
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import WorkerPool
from oriel_logic.workers.worker import PoolLimits
from oriel_wire.context import CallContext
from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.observe.trace import ListSink, new_trace
from oriel_wire.v2.http import decode_request, encode_response
from oriel_wire.v2.messages import InferRequest, InferResponse, tensor

ROOT = Path(__file__).resolve().parents[2]
MODELS: dict[str, dict[str, Any]] = {
    "double": {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}],
    },
    "digits": {
        "inputs": [{"name": "image", "datatype": "FP32", "shape": [-1, 64]}],
        "outputs": [
            {"name": "label", "datatype": "INT64", "shape": [-1, 1]},
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]},
        ],
    },
}


class FakeInference:
    """A scripted inference server.

    calls: the infer calls that it received.
    hold: leave calls unanswered.
    refuse: answer calls with this (status, headers, body).
    """

    def __init__(self) -> None:
        self.models = {name: dict(facts) for name, facts in MODELS.items()}
        self.port = 0
        self.calls: list[Exchange] = []
        self.metadata_calls = 0
        self.hold = False
        self.arrived = asyncio.Event()
        self.departed = asyncio.Event()
        self.refuse: tuple[int, list[tuple[str, str]], bytes] | None = None
        self._session: Any = None

    async def saw_a_call(self) -> None:
        await asyncio.wait_for(self.arrived.wait(), 60)

    async def saw_the_caller_leave(self) -> None:
        await asyncio.wait_for(self.departed.wait(), 60)

    def handle(self, exchange: Exchange) -> None:
        _, _, _, model, *rest = exchange.head.path.split("/")
        if model not in self.models:
            exchange.respond(404, [], b'{"error": "unknown model"}')
        elif rest[-1:] != ["infer"]:
            self.metadata_calls += 1
            facts = {"name": model, "versions": ["1"], "platform": "onnxruntime_onnx", **self.models[model]}
            exchange.respond(200, [("content-type", "application/json")], msgspec.json.encode(facts))
        else:
            self.calls.append(exchange)
            exchange.on_abort = self.departed.set
            self.arrived.set()
            if self.refuse is not None:
                exchange.respond(*self.refuse)
            elif not self.hold:
                self.answer(exchange, model)

    def answer(self, exchange: Exchange, model: str) -> None:
        length = exchange.head.get("inference-header-content-length")
        request = decode_request(model, "", exchange.body, int(length) if length else None)
        outputs = [tensor(name, array) for name, array in self.run(request).items()]
        response = InferResponse(model_name=model, model_version="1", outputs=outputs)
        parts, head = encode_response(response, request)
        headers = [("inference-header-content-length", str(head)), ("server-timing", "queue;dur=0.1, compute;dur=0.2")]
        exchange.respond(200, [*headers, ("x-oriel-cost-us", "250")], parts)

    def run(self, request: InferRequest) -> dict[str, Any]:
        array = request.inputs[0].array
        if request.model_name == "double":
            return {"y": array * 2}
        if self._session is None:
            import onnxruntime

            self._session = onnxruntime.InferenceSession(ROOT / "examples/models/digits/1/model.onnx")
        label, probabilities = self._session.run(None, {"image": np.ascontiguousarray(array)})
        return {"label": label, "probabilities": probabilities}


@pytest.fixture
async def inference() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    async with fake_server(fake):
        yield fake


@contextlib.asynccontextmanager
async def fake_server(fake: FakeInference) -> AsyncIterator[None]:
    sock = socket.create_server(("127.0.0.1", fake.port))
    sock.setblocking(False)
    fake.port = sock.getsockname()[1]
    server = await serve(fake.handle, sock)
    try:
        yield
    finally:
        await server.drain(0.2)


@pytest.fixture
async def second_inference() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    async with fake_server(fake):
        yield fake


@pytest.fixture(autouse=True)
def forgotten_services() -> Iterator[None]:
    """Forget the handler files of a test before the next one."""
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("oriel_services.")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def no_spare_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no spare worker because a busy machine makes set-up slow; tests about spare workers set this themselves."""
    monkeypatch.setattr("oriel_logic.workers.keeper.SPARE_FROM_S", float("inf"))


@pytest.fixture
def services(tmp_path: Path) -> Callable[..., Path]:
    """`services(name="source", ...)` writes handler files and returns their folder."""

    def write(**files: str) -> Path:
        folder = tmp_path / "services"
        folder.mkdir(exist_ok=True)
        for name, source in files.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source))
        return folder

    return write


class Stack:
    """A logic server on a port of loopback, with its client and its spans."""

    def __init__(self, unit: Unit, sink: ListSink, port: int) -> None:
        self.unit = unit
        self.sink = sink
        self.port = port
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)

    async def post(self, service: str, body: bytes = b"", **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.post(f"/v1/services/{service}", content=body, headers=named)


StackMaker = Callable[..., Awaitable[Stack]]


@pytest.fixture
async def stack(inference: FakeInference) -> AsyncIterator[StackMaker]:
    """`await stack(folder, **settings)` starts a server in front of `inference`; it is closed after the test.

    models: fakes in place of inference servers.
    """
    async with contextlib.AsyncExitStack() as opened:

        async def start(
            *folders: Path, inference_ports: Sequence[int] = (), models: Any = None, **settings: Any
        ) -> Stack:
            ports = inference_ports or [inference.port]
            inferring = tuple(("127.0.0.1", port) for port in ports)
            chosen = Settings(services=folders, inference=inferring, **{"workers": 1, "watch": False, **settings})
            sink = ListSink()
            listing = read_listing(folders)
            server = ForkServer.launch(together(listing), max_frame_bytes=chosen.max_frame_bytes)
            unit = Unit(chosen, server, listing, sink, models)
            opened.push_async_callback(unit.close)
            await unit.start()
            await unit.pool.wait_ready()
            sock = socket.create_server(("127.0.0.1", 0))
            sock.setblocking(False)
            front = await unit.open(sock)
            opened.push_async_callback(front.drain, 0.0)
            made = Stack(unit, sink, front.port)
            opened.push_async_callback(made.client.aclose)
            return made

        yield start


JOBS = """
    import asyncio, os, signal
    from oriel_logic import Refused

    def echo(value): return value
    def pid(): return os.getpid()
    def fail(): raise ZeroDivisionError("of the job")
    def unpicklable(): return lambda: None
    def mark(path): open(path, "w").close()

    def hold(fifo):
        with open(fifo) as gate:
            return gate.read()

    def negated(rows): return [(-row, len(rows)) for row in rows]
    def negated_array(rows): return -rows

    def total(array):
        array += 1  # in place: it is this worker's own
        return array.sum(), array

    def count(to, closed=""):
        try:
            yield from range(to)
        finally:
            if closed:
                open(closed, "w").close()

    def breaks():
        yield 1
        raise Refused("broken off")

    def silent(fifo):
        yield 1
        hold(fifo)
        yield 2

    async def acount(to):
        for each in range(to):
            yield each

    def asks(value, models, ctx):
        with ctx.stage("asking"):
            return models.infer("double", value), ctx.tier, 0 < ctx.remaining_s <= 30

    def asks_wrongly(models):
        models.infer("nonsense")

    async def asks_at_once(models, ctx):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(models.infer("double", n)) for n in range(5)]
        return [await ctx.run(echo, task.result()) for task in tasks]

    async def waits_for_ever():
        await asyncio.Event().wait()

    def greedy(megabytes):
        return len(bytearray(megabytes << 20))

    def uses(array, megabytes):
        return int(array.sum()) + len(bytearray(megabytes << 20))

    def uses_outputs(array, megabytes, models):
        first = models.infer("double", array)
        again = models.infer("double", array)
        return int(first.sum() + again.sum()) + len(bytearray(megabytes << 20))

    def uses_outputs_in_turn(array, times, models):
        for _ in range(times):
            array = models.infer("double", array)
        return len(bytearray(2 * array.nbytes + (40 << 20)))

    def ends_in_a_frame(last_byte):
        from oriel_wire.process import messages

        def send(sock, pieces):
            sock.sendall(b"".join(pieces)[:last_byte])
            os.kill(os.getpid(), signal.SIGKILL)

        messages.send = send
        return bytes(1_000_000)

    def sends_nonsense(head):
        from oriel_wire.process import messages

        send = messages.send
        messages.send = lambda sock, pieces: send(sock, messages.frame(head))

    def announce_and_hold(fifo):
        with open(fifo, "w") as gate:
            gate.write(str(os.getpid()))
        return hold(fifo)
"""


@pytest.fixture
async def pool(services: Callable[..., Path]) -> AsyncIterator[Callable[..., Awaitable[WorkerPool]]]:
    """`await pool(**limits)` returns a ready pool whose workers know the functions of JOBS."""
    folder = services(jobs=JOBS)
    async with contextlib.AsyncExitStack() as opened:

        async def start(*, clock: Callable[[], float] = monotonic, **limits: Any) -> WorkerPool:
            chosen = PoolLimits(**{"workers": 1, **limits})

            def launch() -> ForkServer:
                return ForkServer.launch(handler_files([folder]), max_frame_bytes=chosen.max_frame_bytes)

            made = WorkerPool(launch(), chosen, launch=launch, clock=clock)
            opened.push_async_callback(made.close)
            await made.start()
            await made.wait_ready()
            return made

        yield start


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe: who opens one end waits for the other."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def a_call(
    *, deadline: float | None = None, band: int = 0, tenant: str = "acme", tier: str = "gold", sampled: bool = False
) -> CallContext:
    return CallContext(
        request_id="req-1",
        deadline=monotonic() + 30 if deadline is None else deadline,
        tier=tier,
        band=band,
        tenant=tenant,
        models=(),
        trace=new_trace(sampled),
    )


@pytest.fixture
def call() -> Callable[..., CallContext]:
    return a_call
