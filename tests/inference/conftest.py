"""An inference server in this process, with small real models and on free ports."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from fake_backend import FakeBackend

from oriel_inference.app import Unit, open_unit
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_inference.repository.check import CheckPool
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink
from oriel_wire.process.helper import Helper

from . import models
from .clients import client_of
from .grpc_port import Port, port_of
from .thread_unit import unit_in_thread

MAX_LEFT = 4


class LeavingPool(CheckPool):
    """Leaves its child processes to the next server: each of them spends 0.2 s of CPU on importing the runtime."""

    left: list[Helper] = []

    def check(
        self,
        path: Path,
        shown: str,
        backend: str,
        options: EngineOptions,
        wanted: Callable[[], bool] = lambda: True,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        with self._lock:
            if not self._idle and self.left:
                self._idle.append(self.left.pop())
        return super().check(path, shown, backend, options, wanted, shapes)

    def close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            if process.pid is not None and len(self.left) < MAX_LEFT:
                self.left.append(process)
            else:
                process.stop()


@pytest.fixture(scope="session", autouse=True)
def left_children() -> Iterator[None]:
    """Let the model checks of a server reuse the child processes of earlier servers in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oriel_inference.assembly.CheckPool", LeavingPool)
        yield
    for process in LeavingPool.left:
        process.stop()


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the imports of the engines that are extras fail, as where they are not installed."""
    for engine in ("openvino", "treelite"):
        monkeypatch.setitem(sys.modules, engine, None)


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.put(root, "double", models.double(), models.DOUBLE)
    models.put(root, "pair", models.two_inputs(), None)
    models.put(root, "echo", models.echo(), None)
    lookup = """
        max_batch_size: 4
        input [ { name: "index" data_type: TYPE_INT64 dims: [ 1 ] reshape { shape: [ ] } } ]
        output [ { name: "row" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
    """
    models.put(root, "lookup", models.lookup(), lookup)
    (root / "lookup/labels.txt").write_text("left\nright\n")
    # Its file is missing: junk would cost each server a child process of the model checks.
    models.put(root, "broken", None, 'backend: "onnxruntime"')
    return root


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend(
        (TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),), (TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),)
    )


@pytest.fixture
def sink() -> ListSink:
    return ListSink()


@pytest.fixture
def settings(repository: Path) -> Settings:
    return settings_of(repository)


def settings_of(repository: Path) -> Settings:
    return Settings(
        repositories=(repository,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        cores=2,
        drain_s=5.0,
        strict_readiness=False,
    )


@pytest.fixture
async def unit(settings: Settings, sink: ListSink) -> AsyncIterator[Unit]:
    async with open_unit(settings, sink=sink) as running:
        yield running


@pytest.fixture
async def http(unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(unit.http_port) as client:
        yield client


@pytest.fixture(scope="session")
def kept_unit(repository: Path) -> Iterator[Unit]:
    """A server for tests that do not change it."""
    with unit_in_thread(settings_of(repository)) as unit:
        yield unit


@pytest.fixture
async def port(unit: Unit) -> AsyncIterator[Port]:
    opened = await port_of(unit)
    yield opened
    await opened.server.drain(0.0)


@pytest.fixture
async def kept_http(kept_unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(kept_unit.http_port) as client:
        yield client
