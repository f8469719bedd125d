"""A server whose models of the fake backend are loaded on demand, each of MODEL_BYTES."""

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
from fake_backend import FakeBackend

from oriel_inference.app import Unit, open_unit
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from .clients import client_of

MODEL_BYTES = 1 << 20
BUDGET = 5 * MODEL_BYTES // 2  # room for two, also while the factor between file and memory is not known
ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
CONFIG = """
backend: "onnxruntime" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""
PINNED = 'parameters { key: "oriel.load" value { string_value: "pinned" } }'
DEMAND = PINNED.replace("pinned", "demand")


def put(root: Path, name: str, more: str = "", *, version: int = 1, size: int = MODEL_BYTES) -> None:
    """Write a model whose file the fake backend does not read."""
    folder = root / name / str(version)
    folder.mkdir(parents=True)
    (folder / "model.onnx").write_bytes(bytes(size))
    (root / name / "config.pbtxt").write_text(CONFIG + more)


def ensemble(*parts: str) -> str:
    """Return the configuration of a chain of models."""
    names = ["x", *(f"t{index}" for index in range(1, len(parts))), "y"]
    steps = ", ".join(
        f'{{ model_name: "{part}" model_version: -1 input_map {{ key: "x" value: "{names[index]}" }}'
        f' output_map {{ key: "y" value: "{names[index + 1]}" }} }}'
        for index, part in enumerate(parts)
    )
    return (
        CONFIG.replace('backend: "onnxruntime"', 'platform: "ensemble"') + f"ensemble_scheduling {{ step [ {steps} ] }}"
    )


def put_ensemble(root: Path, name: str, *parts: str, more: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(ensemble(*parts) + more)


class Demanded:
    """The server, a client of it, and the backend of its models."""

    def __init__(self, unit: Unit, client: httpx.AsyncClient, fake: FakeBackend) -> None:
        self.unit, self.client, self.fake = unit, client, fake

    async def infer(self, name: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
        return await self.client.post(f"/v2/models/{name}/infer", json=ROW, headers=headers)

    async def state(self, name: str) -> tuple[str, str]:
        """Return state and reason of a model in the repository index."""
        lines = (await self.client.post("/v2/repository/index", json={})).json()
        found = [(line["state"], line["reason"]) for line in lines if line["name"] == name]
        return found[-1]

    async def metrics(self) -> str:
        async with client_of(self.unit.metrics_port) as client:
            return (await client.get("/metrics")).text

    @property
    def waiting(self) -> Mapping[str, int]:
        return self.unit.surface.control.demand.waiting


@contextlib.asynccontextmanager
async def demanded(root: Path, fake: FakeBackend | None = None, **changes: Any) -> AsyncIterator[Demanded]:
    backend = fake or FakeBackend(
        (TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),),
        (TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),),
        occupied_bytes=MODEL_BYTES,
    )
    chosen = {"control_mode": "demand", "young_s": 0.0, "young_loads": 0.0, "poll_s": 0.05, "drain_s": 5.0} | changes
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    settings = Settings(repositories=(root,), cores=2, **ports, **chosen)
    async with open_unit(settings, backends=lambda _: backend, sink=ListSink()) as unit:
        async with client_of(unit.http_port) as client:
            try:
                yield Demanded(unit, client, backend)
            finally:
                backend.gate.open()
                backend.loads.open()
