"""The three units in this process, with sockets between them, and models that wait at a gate."""

import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from fake_backend import FakeBackend

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection, serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_inference.model import TensorInfo
from oriel_logic.app import Unit as LogicUnit
from oriel_logic.loading.listing import read_listing, together
from oriel_logic.settings import Settings as LogicSettings
from oriel_logic.workers.launch import ForkServer
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.observe.trace import ListSink

from .. import waiting
from ..inference import models
from ..inference.gated import gated

POOLS = """
[pools.logic]
learn_concurrency = false
endpoints = ["127.0.0.1:{logic}"]
[pools.models]
learn_concurrency = false
endpoints = ["127.0.0.1:{http}"]
grpc_endpoints = ["127.0.0.1:{grpc}"]
"""


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


@contextlib.asynccontextmanager
async def logic(
    folder: Path, services: Mapping[str, str], port: int = 0, **changes: Any
) -> AsyncIterator[tuple[LogicUnit, int]]:
    """Start a logic server.

    services: name -> source. port: of the inference server. changes: other settings.
    """
    folder.mkdir()
    for name, source in services.items():
        (folder / f"{name}.py").write_text(source)
    settings = LogicSettings(services=(folder,), inference=(("127.0.0.1", port),), workers=1, **changes)
    listing = read_listing((folder,))
    forks = ForkServer.launch(together(listing), max_frame_bytes=settings.max_frame_bytes)
    unit = LogicUnit(settings, forks, listing, ListSink())
    sock = socket.create_server(("127.0.0.1", 0))
    await unit.start()
    await unit.pool.wait_ready()
    server = await unit.open(sock)
    try:
        yield unit, server.port
    finally:
        await server.drain(0.0)
        await unit.close()


@contextlib.asynccontextmanager
async def path(
    tmp_path: Path, documents: str, services: Mapping[str, str], others: Sequence[str] = ()
) -> AsyncIterator[Any]:
    """Start all three units. documents: TOML to add to POOLS. others: names of models that equal the model `double`."""
    fake = FakeBackend(
        (TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),), (TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),)
    )
    repository = tmp_path / "models"
    for name in others:
        models.put(repository, name, models.double(), models.DOUBLE.replace("double", name, 1))
    async with contextlib.AsyncExitStack() as opened:
        inference, _ = await opened.enter_async_context(gated(repository, fake))
        logic_unit, logic_port = await opened.enter_async_context(
            logic(tmp_path / "services", services, inference.http_port)
        )
        pools = POOLS.format(logic=logic_port, http=inference.http_port, grpc=inference.grpc_port)
        snapshot = compile_documents({"pools.toml": pools.encode(), "all.toml": documents.encode()})
        core = Gateway(snapshot, limiter=EmbeddedLimiter(), sink=ListSink())
        opened.push_async_callback(core.close)
        http: HttpServer = HttpServer(HttpLimits())
        await http.open(lambda: ClientConnection(http, core), bound())
        opened.push_async_callback(http.drain, 0.0)
        grpc = await serve_public(core, bound())
        opened.push_async_callback(grpc.drain, 0.0)
        serving = {model.spec.name: model for model in inference.catalog.serving()}
        batchers = [model.batcher for model in serving.values()]

        def state() -> tuple[int, int, int]:
            """Return how many calls are in the gateway and in logic, and how many wait in the inference server."""
            gates = core.pools.values()
            mine = sum(gate.admission.inflight + len(gate.admission.queue) for gate in gates)
            return (
                mine + len(core.routing.flights),
                logic_unit.envelope.in_flight,
                sum(each.pending for each in batchers),
            )

        yield SimpleNamespace(
            http=http.port,
            grpc=grpc.port,
            gateway=core,
            serving=serving,
            state=state,
            running=lambda: sum(each.running for each in batchers),
            fake=fake,
        )
        fake.gate.open()


def bound() -> socket.socket:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


async def until(check: Callable[[], bool]) -> float:
    """Wait until `check` holds; returns the seconds that took."""
    began = perf_counter()
    await waiting.until(check)
    return perf_counter() - began
