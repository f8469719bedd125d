"""A sequence scheduler in virtual time over sessions that remember which steps they saw."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oriel_inference.backends import Session
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.statistics import Statistics
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import BackendFailed
from oriel_inference.model import (
    ControlKind,
    ModelSpec,
    SequenceControl,
    SequenceRules,
    SequenceState,
    TensorInfo,
    TensorSpec,
)
from oriel_inference.sequences.controls import engine_spec
from oriel_inference.sequences.scan import in_slots
from oriel_inference.sequences.scheduler import SequenceScheduler
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.v2.messages import Array, InferRequest

from .bench import Calls, context
from .manual_workers import ManualWorkers

IDLE_S = 5.0


def _tensor(name: str, datatype: str = "INT64") -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, dims=(1,))


def _flag(kind: ControlKind) -> SequenceControl:
    false, true = np.array([-1], np.int32), np.array([1], np.int32)
    return SequenceControl(tensor=_tensor(kind.name, "INT32"), kind=kind, false=false, true=true)


CORRID = SequenceControl(
    tensor=_tensor("CORRID", "INT32"),
    kind=ControlKind.CORRID,
    false=np.array([0], np.int32),
    true=np.array([0], np.int32),
)


class Remembers(Session):
    """A session whose output and state are the bits of all steps that the state has seen. Records every batch.

    bad: numbers of steps with which every batch fails.
    """

    provider = "fake"
    inputs = (TensorInfo(name="x", datatype="INT64", shape=(-1, 1)),)
    outputs = (TensorInfo(name="y", datatype="INT64", shape=(-1, 1)),)

    def __init__(self, bad: set[int]) -> None:
        self._bad = bad
        self.batches: list[dict[str, list[int]]] = []

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.batches.append({name: array[:, 0].tolist() for name, array in inputs.items()})
        if self._bad.intersection(self.batches[-1]["x"]):
            raise BackendFailed("a bad step")
        seen = inputs["state"] | np.left_shift(1, inputs["x"])
        return [seen for _ in outputs]

    def close(self) -> None:
        pass


class SequenceBench(Calls):
    """The scheduler of a model with one input, one output and one state.

    padded: rows stand at their slots. corrid: the model sees the ids.
    """

    def __init__(
        self, *, instances: int = 1, slots: int = 2, padded: bool = False, corrid: bool = False, **options: Any
    ) -> None:
        flags = tuple(_flag(kind) for kind in (ControlKind.START, ControlKind.END, ControlKind.READY))
        rules = SequenceRules(
            idle_s=IDLE_S,
            slots=slots,
            padded=padded,
            controls=(*flags, CORRID) if corrid else flags,
            states=(SequenceState(tensor=_tensor("state"), output=_tensor("kept"), initial=np.array([0])),),
        )
        model = ModelSpec(
            name="sum",
            version=1,
            platform="",
            backend="fake",
            max_batch_size=4,
            inputs=(_tensor("x"),),
            outputs=(_tensor("y"),),
            bounds=BatchBounds(max_rows=4),
            sequences=rules,
            instances=instances,
        )
        clock, workers = VirtualClock(), ManualWorkers()
        machine = Machine(clock=clock, cores=Cores(4), workers=workers, inline_s=0.0, **options)
        self.bad: set[int] = set()
        self.sessions = [Remembers(self.bad) for _ in range(instances)]
        self.statistics = Statistics()
        inner = engine_spec(model, rules)
        batchers = [
            Batcher(inner, [each], machine, statistics=self.statistics)
            for each in in_slots(self.sessions, model, clock.now)
        ]
        self.scheduler = SequenceScheduler(model, rules, batchers, machine, self.statistics, exclusive=False)
        super().__init__(self.scheduler, clock, workers)

    def send(
        self,
        sequence: int | str,
        *,
        start: bool = False,
        end: bool = False,
        tenant: str = "",
        band: int = 0,
        timeout_s: float = 60.0,
        rows: int = 1,
        size_bytes: int = 0,
    ) -> int:
        """Submit a step whose input is its number; returns the number."""
        number, now = len(self.calls), self.clock.now()
        parameters = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
        call = Call(
            inputs={"x": np.full((rows, 1), number, np.int64)},
            rows=rows,
            signature=None,
            arrived_s=now,
            deadline=now + timeout_s,
            reply=lambda result: self.replied(number, result),
            band=band,
            tenant=tenant,
            size_bytes=size_bytes,
            source=(InferRequest(model_name="sum", parameters=parameters), context(tenant)),
        )
        return self.submit(call)

    def value(self, number: int) -> int | None:
        """Return the bits of the steps that the answer saw; None if the step has no answer."""
        replies = self.replies[number]
        return int(replies[0].outputs[0][0, 0]) if replies and isinstance(replies[0], Answer) else None

    def text(self, number: int) -> str:
        """Return the error of a step."""
        return self.error(number).message

    def ended(self) -> dict[str, int]:
        """Return how sequences have ended."""
        return dict(self.statistics.sequences)


def bits(*numbers: int) -> int:
    """Return the value of an answer that saw these steps."""
    return sum(1 << number for number in numbers)
