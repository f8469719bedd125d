"""Cost of a request when 10 or 10,000 others wait: CPU from its bytes to the bytes of its answer.

    python benchmarks/growth.py model-queue [--depths 10,1000,10000] [--requests 20000] [--repeats 5] [--json]

One process, no sockets, no runtime: the real codec, dataplane and batcher on the real loop with its real expiry timers;
the session returns its input. The queue is filled to a depth, then as many requests come as each batch of eight takes
out. CPU is `time.process_time` of the second part only, garbage collection included; the median of the repeats counts.
`drain` is the other way of meeting a long queue: so many requests come at once, and then all of them are served.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.cost import compare_depths
from msgspec.structs import replace
from tests.inference.manual_workers import ManualWorkers

from oriel_inference.app import calm_collector
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.cores import Cores
from oriel_inference.catalog import ServingModel
from oriel_inference.clock import LoopClock
from oriel_inference.dataplane.dataplane import Completion, Dataplane
from oriel_inference.model import ModelSpec, QueuePolicy, QueueRules, TensorInfo, TensorSpec
from oriel_policies.waiting.batch import BatchBounds
from oriel_wire.context import read_headers
from oriel_wire.v2.http import decode_request, encode_response
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

BATCH = 8
Maker = Callable[[int, random.Random], dict[str, Any]]


def plain(number: int, chance: random.Random) -> dict[str, Any]:
    return {"timeout_s": 600.0}


def deadlines(number: int, chance: random.Random) -> dict[str, Any]:
    return {"timeout_s": chance.uniform(300.0, 900.0)}


def tightening(number: int, chance: random.Random) -> dict[str, Any]:
    """Every request is due before all others: each one moves the expiry timer."""
    return {"timeout_s": 900.0 - number * 0.005}


def tenants(number: int, chance: random.Random) -> dict[str, Any]:
    return {"timeout_s": chance.uniform(300.0, 900.0), "tenant": f"t{number % 100}", "band": number % 3}


def levels(number: int, chance: random.Random) -> dict[str, Any]:
    return {"timeout_s": chance.uniform(300.0, 900.0), "priority": 1 + number % 8}


_LEVELS = QueueRules(policy=QueuePolicy(max_items=10_001), priority_levels=8, default_priority=1)
_DELAYED = QueueRules(policy=QueuePolicy(timeout_s=0.0005, delays=True))  # everything is parked at once
CASES: dict[str, tuple[Maker, QueueRules, float]] = {
    "plain": (plain, QueueRules(), 0.0),
    "drain": (plain, QueueRules(), 0.0),
    "queue delay": (plain, QueueRules(), 0.0001),
    "any deadlines": (deadlines, QueueRules(), 0.0),
    "earlier deadlines": (tightening, QueueRules(), 0.0),
    "100 tenants, 3 tiers": (tenants, QueueRules(), 0.0),
    "8 levels": (levels, _LEVELS, 0.0),
    "all delayed": (deadlines, _DELAYED, 0.0),
    "preserve_ordering": (deadlines, QueueRules(preserve_ordering=True), 0.0),
}


class Echo:
    """A session that costs nothing."""

    provider = "none"
    inputs: Sequence[TensorInfo] = ()
    outputs: Sequence[TensorInfo] = ()

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        return [inputs["x"]]

    def close(self) -> None:
        pass


def model(rules: QueueRules, delay_s: float) -> ModelSpec:
    tensor = {"datatype": "FP32", "dims": (16,)}
    return ModelSpec(
        name="echo",
        version=1,
        platform="",
        backend="none",
        max_batch_size=BATCH,
        inputs=(TensorSpec(name="x", **tensor),),  # type: ignore[arg-type]
        outputs=(TensorSpec(name="y", **tensor),),  # type: ignore[arg-type]
        bounds=BatchBounds(max_rows=BATCH, max_delay_s=delay_s),
        queue=rules,
    )


class One:
    """A catalog of one model."""

    def __init__(self, serving: ServingModel) -> None:
        self._serving = serving

    def get(self, name: str, version: str = "") -> ServingModel:
        return self._serving


def body(priority: int = 0) -> tuple[bytes, int]:
    """A binary request and the length of its JSON part."""
    tensor: dict[str, Any] = {"name": "x", "shape": [1, 16], "datatype": "FP32"}
    tensor["parameters"] = {"binary_data_size": 64}
    document: dict[str, Any] = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    if priority:
        document["parameters"]["priority"] = priority
    head = json.dumps(document).encode()
    return head + bytes(64), len(head)


async def measure(case: str, depth: int, requests: int) -> float:
    """CPU microseconds per request."""
    make, rules, delay_s = CASES[case]
    workers = ManualWorkers()
    clock = LoopClock(asyncio.get_running_loop())
    session = Echo()
    spec = model(rules, delay_s)
    batcher = Batcher(
        spec,
        [session],
        clock=clock,
        cores=Cores(1),
        workers=workers,
        max_items=depth + 2 * BATCH,
        max_bytes=1 << 40,
        inline_s=0.0,
    )
    serving = ServingModel(spec, pb.ModelConfig(), batcher, [session], 0.0)
    dataplane = Dataplane(One(serving), clock.now)  # type: ignore[arg-type]
    headers = {"x-request-id": "growth"}.get
    bodies = [body(priority) for priority in range(9)]
    chance = random.Random(1)
    replied = 0
    number = 0

    def submit() -> None:
        nonlocal number
        how = make(number, chance)
        number += 1
        data, json_length = bodies[how.pop("priority", 0)]
        request = decode_request("echo", "", data, json_length)
        asked = replace(request, inputs=[])  # what the server keeps for the answer

        def reply(completion: Completion) -> None:
            nonlocal replied
            assert completion.response is not None
            encode_response(completion.response, asked)
            replied += 1

        now = clock.now()
        ctx = read_headers(headers, trusted=True).at(now, 60.0)
        how["deadline"] = now + how.pop("timeout_s")
        dataplane.infer(request, replace(ctx, **how), size_bytes=len(data), reply=reply, left=reply)

    async def batches(calls: int, fresh: bool) -> None:
        target = replied + calls
        while replied < target:
            if fresh:
                for _ in range(BATCH):
                    submit()
            await asyncio.sleep(0)
            if workers.jobs:
                workers.run_next()

    if case == "drain":
        started = time.process_time()
        rounds = max(1, requests // depth)
        for _ in range(rounds):
            for _ in range(depth):
                submit()
            await batches(depth, fresh=False)
        return (time.process_time() - started) / (rounds * depth) * 1e6
    for _ in range(depth):
        submit()
    await batches(64, fresh=True)  # what was filled in and is parked now, what is imported late
    started = time.process_time()
    await batches(requests, fresh=True)
    used = time.process_time() - started
    assert abs(batcher.pending - depth) <= 4 * BATCH
    return used / requests * 1e6


def main() -> None:
    calm_collector()  # as the server
    compare_depths(__doc__, CASES, measure)
