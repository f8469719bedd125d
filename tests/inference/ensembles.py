"""Configurations of ensembles, and a scheduler in virtual time over batchers of fake sessions."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_backend import FakeSession, Gate

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.catalog import ServingModel
from oriel_inference.clock import VirtualClock
from oriel_inference.ensembles.graph import check_flow, check_models
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.model import EnsembleStep, ModelSpec, TensorInfo, TensorSpec
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

from . import models
from .bench import Calls
from .control_server import Served, times
from .manual_workers import ManualWorkers

Step = tuple[str, Mapping[str, str], Mapping[str, str]]

# x -> a -> (b | c) -> d -> y, and b's tensor is an output as well.
DIAMOND: tuple[Step, ...] = (
    ("a", {"x": "in"}, {"y": "t"}),
    ("b", {"x": "t"}, {"y": "left"}),
    ("c", {"x": "t"}, {"y": "right"}),
    ("d", {"x": "right"}, {"y": "out"}),
)


def steps(given: Sequence[Step]) -> tuple[EnsembleStep, ...]:
    return tuple(EnsembleStep(model=name, version=0, inputs=into, outputs=out) for name, into, out in given)


def tensor(name: str, dims: tuple[int, ...] = (-1,), datatype: str = "INT64", **more: object) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, dims=dims, **more)  # type: ignore[arg-type]


def model(name: str, *, max_rows: int = 8, **more: object) -> ModelSpec:
    fields: dict[str, object] = {
        "name": name,
        "version": 1,
        "platform": "",
        "backend": "fake",
        "max_batch_size": max_rows,
        "inputs": (tensor("x"),),
        "outputs": (tensor("y"),),
        "bounds": BatchBounds(max_rows=max_rows) if max_rows else None,
    }
    return ModelSpec(**{**fields, **more})  # type: ignore[arg-type]


def ensemble(
    given: Sequence[Step],
    inputs: Sequence[str | TensorSpec] = ("in",),
    outputs: Sequence[str] = ("left", "out"),
    **more: object,
) -> ModelSpec:
    fields: dict[str, object] = {
        "inputs": tuple(each if isinstance(each, TensorSpec) else tensor(each) for each in inputs),
        "outputs": tuple(tensor(name) for name in outputs),
        "bounds": None,
        "steps": steps(given),
    }
    return model("e", **{**fields, **more})


def judged(spec: ModelSpec, models: Mapping[str, ModelSpec]) -> None:
    """Check an ensemble as a server does that loads it. Raises ConfigInvalid."""
    check_flow([each.name for each in spec.inputs], [each.name for each in spec.outputs], spec.steps, "e")
    check_models(spec, [models[step.model] for step in spec.steps], "e")


class Flights(Calls):
    """An ensemble in virtual time; each of its models has one fake session that doubles its input."""

    def __init__(
        self,
        spec: ModelSpec,
        models: Mapping[str, ModelSpec] | None = None,
        *,
        cores: int = 4,
        step_items: int = 10_000,
        inner: Mapping[str, "Flights"] | None = None,
        clock: VirtualClock | None = None,
        **limits: int,
    ) -> None:
        clock, workers = clock or VirtualClock(), ManualWorkers()
        self.cores = Cores(cores)
        machine = Machine(clock=clock, cores=self.cores, workers=workers, inline_s=0.0)
        self.sessions: dict[str, FakeSession] = {}
        self.batchers: dict[str, Batcher] = {}
        self.serving: dict[str, ServingModel] = {}
        for name in dict.fromkeys(step.model for step in spec.steps):
            if inner and name in inner:
                self.serving[name] = ServingModel(inner[name].spec, pb.ModelConfig(), inner[name].ensemble, (), 0.0)
                continue
            part = (models or {}).get(name) or model(name)
            infos = [
                [TensorInfo(name=each.name, datatype=each.datatype, shape=(-1, -1)) for each in tensors]
                for tensors in (part.inputs, part.outputs)
            ]
            session = self.sessions[name] = FakeSession(infos[0], infos[1], gate=Gate())
            batcher = self.batchers[name] = Batcher(part, [session], replace(machine, max_items=step_items))
            self.serving[name] = ServingModel(part, pb.ModelConfig(), batcher, [session], 0.0)
        judged(spec, {name: each.spec for name, each in self.serving.items()})
        self.spec = spec
        self.ensemble = Ensemble(spec, replace(machine, **limits))
        self.ensemble.bind([self.serving[step.model] for step in spec.steps])
        super().__init__(self.ensemble, clock, workers)

    def call(
        self, rows: int = 1, *, timeout_s: float = 60.0, inputs: Mapping[str, Array] | None = None, **more: object
    ) -> int:
        """Submit a call whose rows all hold its own number; returns the number."""
        number, now = len(self.calls), self.clock.now()
        call = Call(
            inputs=inputs or {each.name: np.full((rows, 2), number, dtype=np.int64) for each in self.spec.inputs},
            rows=rows,
            signature=None,
            arrived_s=now,
            deadline=now + timeout_s,
            reply=lambda result: self.replied(number, result),
            **more,  # type: ignore[arg-type]
        )
        return self.submit(call)

    def batches(self, name: str) -> list[int]:
        return self.sessions[name].batches

    def at_rest(self) -> bool:
        """Whether nothing waits, runs or is held anywhere."""
        assert self.cores.free == self.cores.total
        assert self.ensemble.running == 0 and self.ensemble._size_bytes == 0
        assert all(each.pending == each.running == each._waiting.rows == 0 for each in self.batchers.values())
        assert all(each.holds == 0 for each in self.serving.values())
        assert all(limit._free == self.spec.max_inflight for limit in self.ensemble._limits)
        return True


def config(
    given: Sequence[Step],
    inputs: str = 'name: "in" data_type: TYPE_FP32 dims: [ 4 ]',
    outputs: Sequence[str] = ("out",),
    more: str = "",
    head: str = 'platform: "ensemble" max_batch_size: 8',
) -> str:
    """Return the `config.pbtxt` of an ensemble of models on rows of four floats."""
    said = "".join(f'output [ {{ name: "{name}" data_type: TYPE_FP32 dims: [ 4 ] }} ]\n' for name in outputs)
    return f"{head}\ninput [ {{ {inputs} }} ]\n{said}ensemble_scheduling {{ {more}\n{scheduled(given)} }}\n"


def scheduled(given: Sequence[Step], version: int = -1) -> str:
    text = ""
    for name, into, out in given:
        maps = "".join(
            f'{kind} {{ key: "{key}" value: "{value}" }} '
            for kind, pairs in (("input_map", into), ("output_map", out))
            for key, value in pairs.items()
        )
        text += f'step [ {{ model_name: "{name}" model_version: {version} {maps} }} ]\n'
    return text


def put(root: Path, name: str, text: str, version: int = 1) -> Path:
    folder = root / name
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


PART = models.DOUBLE.replace('name: "double" backend: "onnxruntime"', "")

CHAIN: tuple[Step, ...] = (("a", {"x": "in"}, {"y": "t"}), ("b", {"x": "t"}, {"y": "out"}))

ROW = {"inputs": [{"name": "in", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def part(root: Path, name: str, factor: float, version: int = 1, text: str = PART) -> Path:
    return models.put(root, name, times(factor), text, version)


async def infer(served: Served, name: str = "e") -> tuple[int, Any]:
    response = await served.client.post(f"/v2/models/{name}/infer", json=ROW)
    body = response.json()
    return response.status_code, body["outputs"][0]["data"][0] if response.status_code == 200 else body
