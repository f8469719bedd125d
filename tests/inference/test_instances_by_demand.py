"""Instances of models without `count`: as many as the cores hold, shared batch by batch with the other models."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_backend import FakeBackend, FakeSession, Gate
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.workers import Job
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError
from oriel_inference.model import Gpu
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.instances import instances_by_demand, placements
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

from ..waiting import until
from . import models
from .bench import X, Y, spec
from .gated import INFER, ROW, gated

CORES = 2
PHASE_S = 20
SERVICE_S = 0.1
TARGET_S = 0.5


@pytest.mark.parametrize(
    ("group", "instances", "sessions", "by"),
    [
        ("", 4, 1, "demand"),
        ("instance_group [ { kind: KIND_CPU } ]", 4, 1, "demand"),
        ("instance_group [ { count: 1 } ]", 1, 1, "configuration"),
        ("instance_group [ { count: 3 } ]", 3, 3, "configuration"),
        ("instance_group [ { kind: KIND_CPU }, { count: 1 } ]", 2, 2, "configuration"),
    ],
)
async def test_a_model_without_count_has_as_many_instances_as_the_cores_hold(
    tmp_path: Path, fake: FakeBackend, group: str, instances: int, sessions: int, by: str
) -> None:
    changes: dict[str, Any] = {"cores": 4, "load_defaults": LoadDefaults(intra_op_threads=1)}
    async with gated(tmp_path, fake, models.DOUBLE + group, **changes) as (unit, client):
        assert len(fake.sessions) == sessions
        base = f"http://127.0.0.1:{unit.metrics_port}"
        async with httpx.AsyncClient(trust_env=False, base_url=base) as control:
            (line,) = (await control.get("/models")).json()
            text = (await control.get("/metrics")).text
        assert (line["instances"], line["instances_by"], line["instances_running"]) == (instances, by, 0)
        assert f'oriel_instances{{model="double",version="1",by="{by}"}} {instances}\n' in text
        config = (await client.get("/v2/models/double/config")).json()
        assert sum(each["count"] for each in config["instance_group"]) == instances


async def test_its_runs_share_one_session_and_the_rest_of_the_cores_is_another_models(
    tmp_path: Path, fake: FakeBackend
) -> None:
    models.put(tmp_path, "other", models.double(), models.DOUBLE.replace('"double"', '"other"'))
    alone = 'parameters { key: "oriel.batching" value { string_value: "off" } }'
    async with gated(
        tmp_path, fake, models.DOUBLE + alone, cores=3, load_defaults=LoadDefaults(intra_op_threads=1)
    ) as (unit, client):
        double, other = unit.catalog.get("double").batcher, unit.catalog.get("other").batcher
        async with asyncio.TaskGroup() as group:
            sent = [group.create_task(client.post(INFER, json=ROW)) for _ in range(2)]
            await asyncio.to_thread(fake.gate.wait_for_runs, 2)
            sent.append(group.create_task(client.post(INFER.replace("double", "other"), json=ROW)))
            await asyncio.to_thread(fake.gate.wait_for_runs, 3)
            assert (double.running, other.running) == (2, 1)
            sent.append(group.create_task(client.post(INFER, json=ROW)))
            await until(lambda: double.pending == 1)  # it has an instance, and no core
            assert double.running == 2
            fake.gate.open()
        assert [each.result().status_code for each in sent] == [200] * 4


@given(cores=st.integers(1, 512), threads=st.integers(1, 256))
def test_its_runs_never_need_more_than_the_cores_and_leave_none_unused_that_one_more_run_could_take(
    cores: int, threads: int
) -> None:
    found = placements(pb.ModelConfig(), "config", threads=threads, gpus=())
    instances = instances_by_demand(pb.ModelConfig(), found, cores)
    assert instances >= 1
    assert instances == 1 or instances * threads <= cores
    assert instances == 256 or (instances + 1) * threads > cores


def test_a_decoupled_model_has_a_fixed_number() -> None:
    config = pb.ModelConfig()
    config.model_transaction_policy.decoupled = True
    assert instances_by_demand(config, placements(config, "config", threads=1, gpus=()), 8) == 0


def test_a_model_on_gpus_has_a_fixed_number() -> None:
    gpus = [Gpu(number=0, capability="9.0")]
    assert instances_by_demand(pb.ModelConfig(), placements(pb.ModelConfig(), "config", threads=1, gpus=gpus), 8) == 0


class ComputeClock(VirtualClock):
    """A virtual clock on which runs take SERVICE_S, also where the batcher measures them."""

    began_s: float | None = None

    def now(self) -> float:
        return super().now() if self.began_s is None else self.began_s


class ComputeWorkers:
    """Runs each job when the time of one run has passed; until its session runs, the job sees the time of its start."""

    def __init__(self, clock: ComputeClock) -> None:
        self.clock = clock

    def submit(self, job: Job) -> None:
        began_s = self.clock.now()

        def run() -> None:
            self.clock.began_s = began_s
            job()

        self.clock.call_at(began_s + SERVICE_S, run)

    def let_begin(self) -> None:
        pass


class ComputeSession(FakeSession):
    def __init__(self, clock: ComputeClock) -> None:
        super().__init__((X,), (Y,), gate=Gate())
        self.clock = clock

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        self.clock.began_s = None
        return super().run(inputs, outputs)


class Shift:
    """Two models that share the cores; 10 of 11 calls are for the first, then 10 of 11 for the second.

    in_time: (phase, model) -> calls answered within the target.
    """

    def __init__(self, split: tuple[int, int], rate: float, seed: int) -> None:
        self.clock = ComputeClock()
        workers = ComputeWorkers(self.clock)
        machine = Machine(clock=self.clock, cores=Cores(CORES), workers=workers, inline_s=0.0)
        self.batchers = []
        for instances in split:
            session = ComputeSession(self.clock)
            model = spec(alone=True, instances=instances)
            self.batchers.append(Batcher(model, [session] * instances, machine))
        self.in_time: dict[tuple[int, int], int] = {}
        random = np.random.default_rng(seed)
        start = self.clock.now()
        for phase, model in itertools.product(range(2), range(2)):
            self.in_time[phase, model] = 0
            share = 10 / 11 if phase == model else 1 / 11
            at_s = 0.0
            while (at_s := at_s + random.exponential(1 / (rate * share))) < PHASE_S:
                self.clock.call_at(start + phase * PHASE_S + at_s, self._sender(phase, model))
        self.clock.advance(2 * PHASE_S + 1)

    def _sender(self, phase: int, model: int) -> Callable[[], None]:
        def send() -> None:
            now = self.clock.now()
            self.batchers[model].submit(
                Call(
                    inputs={"x": np.zeros((1, 2), dtype=np.int64)},
                    rows=1,
                    signature=2,
                    arrived_s=now,
                    deadline=now + TARGET_S,
                    reply=reply,
                )
            )

        def reply(result: Answer | InferenceError) -> None:
            self.in_time[phase, model] += isinstance(result, Answer)

        return send

    def of(self, phase: int) -> int:
        return self.in_time[phase, 0] + self.in_time[phase, 1]


@pytest.mark.long
@settings(max_examples=15, deadline=None)
@given(rate=st.floats(2, 40), seed=st.integers(0, 1000))
def test_a_shift_of_1_to_10_is_served_at_once_as_well_as_by_the_best_fixed_split_of_each_phase(
    rate: float, seed: int
) -> None:
    by_demand = Shift((CORES, CORES), rate, seed)
    fixed = [Shift(split, rate, seed) for split in ((1, 1), (2, 1), (1, 2))]
    for phase in range(2):
        best = max(each.of(phase) for each in fixed)
        assert by_demand.of(phase) >= 0.9 * best
        with_a_core = fixed[0].in_time[phase, 1 - phase]  # the model with few calls
        assert by_demand.in_time[phase, 1 - phase] >= 0.9 * with_a_core - 3


def test_a_count_of_one_loses_what_the_other_model_does_not_use() -> None:
    """The load that the owner's fixed count cannot serve: 1.6 cores of work, nearly all of it for one model."""
    by_demand, one_each = Shift((CORES, CORES), 16, 1), Shift((1, 1), 16, 1)
    assert by_demand.of(0) > 1.3 * one_each.of(0)
    assert by_demand.of(1) > 1.3 * one_each.of(1)
