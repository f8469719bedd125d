"""TensorRT plans on the stand-ins of `tensorrt` and `cuda.bindings.runtime`: plans, folders, and a server of them."""

import contextlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends import find_backend
from oriel_inference.model import EngineOptions
from oriel_inference.repository.check import CheckPool
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .clients import client_of

STAND_INS = Path(__file__).parent / "stand_ins"
VERSIONS = {"face_10": "10.16.1.11", "face_11": "11.4.0.106"}
MODULES = (
    "tensorrt",
    "tensorrt_stand_in",
    "tensorrt_builder",
    "tensorrt_onnx",
    "cuda",
    "cuda.bindings",
    "cuda.bindings.runtime",
)
ON_GPU = EngineOptions(providers=(("TensorRT", {"device_id": "0"}),))

# The configuration of case 1, as its owner wrote it.
CLASSIFIER = """
platform: "tensorrt_plan"
dynamic_batching { }
instance_group [ { count: 2 kind: KIND_GPU } ]
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT32 dims: [ -1 ] }
]
output [ { name: "logits" data_type: TYPE_FP32 dims: [ -1, 25 ] } ]
"""
DOUBLE = """
backend: "tensorrt" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
"""

Spans = Sequence[Sequence[int]]


@contextlib.contextmanager
def stand_in(face: str) -> Iterator[Any]:
    """Install the stand-ins with the face of one version of TensorRT; gives the machine that they show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STAND_INS)
        patch.syspath_prepend(STAND_INS / face)
        _forget()
        try:
            yield import_module("cuda.bindings.runtime").machine
        finally:
            _forget()


def _forget() -> None:
    for name in MODULES:
        sys.modules.pop(name, None)


def plan(*args: Any, **more: Any) -> bytes:
    written: bytes = import_module("tensorrt_stand_in").write_plan(*args, **more)
    return written


def classifier(
    *profiles: Spans, function: str = "classify", output: Sequence[int] = (-1, 25), datatype: str = "INT32", **more: Any
) -> bytes:
    """Return the plan of case 1; both inputs have the same profiles."""
    names = ("input_ids", "attention_mask")
    return plan(
        function,
        dict.fromkeys(names, (datatype, (-1, -1))),
        {"logits": ("FLOAT", output)},
        [dict.fromkeys(names, spans) for spans in profiles or [((1, 1), (1, 512), (1, 512))]],
        **more,
    )


def double(*profiles: Spans, shape: Sequence[int] = (-1, 4), datatype: str = "FLOAT", **more: Any) -> bytes:
    """Return a plan of y = x + x."""
    tensor = (datatype, shape)
    spans = profiles or [((1, 4), (4, 4), (8, 4))]
    return plan("double", {"x": tensor}, {"y": tensor}, [{"x": each} for each in spans], **more)


def put(root: Path, name: str, data: bytes, config: str | None = DOUBLE, *, version: int = 1) -> Path:
    """Write a model with a plan; return the version's folder."""
    folder = root / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.plan").write_bytes(data)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return folder


class Served:
    """A server and a client of it."""

    def __init__(self, unit: Unit, client: httpx.AsyncClient) -> None:
        self.unit, self.client = unit, client

    async def infer(self, name: str, **inputs: tuple[str, Any]) -> httpx.Response:
        """Send a request. inputs: name -> (datatype, values)."""
        tensors = [
            {"name": tensor, "datatype": datatype, "shape": list(array.shape), "data": array.ravel().tolist()}
            for tensor, (datatype, values) in inputs.items()
            if (array := np.asarray(values)) is not None
        ]
        return await self.client.post(f"/v2/models/{name}/infer", json={"inputs": tensors})

    async def classify(self, name: str, ids: Any, *, datatype: str = "INT32") -> httpx.Response:
        """Send ids with a mask of ones."""
        mask = np.ones_like(np.asarray(ids))
        return await self.infer(name, input_ids=(datatype, ids), attention_mask=(datatype, mask))

    async def double(self, name: str, rows: Any) -> httpx.Response:
        return await self.infer(name, x=("FP32", rows))

    async def state(self, name: str) -> tuple[str, str]:
        """Return state and reason of a model in the repository index."""
        lines = (await self.client.post("/v2/repository/index", json={})).json()
        found = [(line.get("state", ""), line.get("reason", "")) for line in lines if line["name"] == name]
        return found[-1]

    async def until_closed(self) -> None:
        """Wait until the versions that left are closed."""
        catalog = self.unit.catalog
        await until(lambda: not catalog.leaving and not list(catalog.serving()))


@contextlib.asynccontextmanager
async def serving(root: Path, *, checked: bool = False, **more: Any) -> AsyncIterator[Served]:
    """Serve a repository. checked: each file is tried in another process first, as in a real server."""
    settings = Settings(
        repositories=(root,),
        http_port=0,
        grpc_port=None,
        metrics_port=0,
        cores=4,
        drain_s=5.0,
        strict_readiness=False,
        **more,
    )
    backends = find_backend if checked else lambda name: find_backend(name)  # only that one's files are checked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("oriel_inference.assembly.CheckPool", CheckPool)  # not one whose processes know no stand-in
        async with open_unit(settings, backends=backends, sink=ListSink()) as unit, client_of(unit.http_port) as client:
            yield Served(unit, client)


def logits(answer: httpx.Response) -> Any:
    """Return the output of a classifier as an array."""
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def expected_logits(ids: Any, function: str = "classify") -> Any:
    """Return what the classifier computes for ids with a mask of ones."""
    rows: Mapping[str, Any] = {"input_ids": np.asarray(ids), "attention_mask": np.ones_like(np.asarray(ids))}
    return import_module("tensorrt_stand_in").FUNCTIONS[function][1](rows)["logits"]
