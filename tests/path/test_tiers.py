"""A call waits by its effective tier from the gateway to the model's queue, whichever document or header decided it."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from grpc import aio
from tritonclient.grpc import service_pb2

from ..inference.gated import INFER, ROW
from .units import digest, path, until

# A pipeline of two models at once.
SERVICE = """
import asyncio

import numpy as np
from oriel_logic import service

@service
async def NAME(request, models, ctx):
    x = {"x": np.array([request.json()], np.float32)}
    await asyncio.gather(models.infer("double", x), models.infer("triple", x))
    return {"tier": ctx.tier}
"""
SERVICES = {name: SERVICE.replace("NAME", name) for name in ("both", "pinned", "urgent")}
DOCUMENTS = f"""
[tiers.gold]
band = 0
target_ms = 60000
[tiers.silver]
band = 1
target_ms = 60000
[tiers.bronze]
band = 2
target_ms = 60000
[[routes]]
service = "pinned"
pool = "logic"
tier = "silver"
[[routes]]
service = "urgent"
pool = "logic"
tier = "gold"
above_tenant = true
[[routes]]
service = "*"
pool = "logic"
[[routes]]
model = "triple"
pool = "models"
tier = "silver"
[[routes]]
model = "*"
pool = "models"
[tenants.acme]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [
  {{ sha256 = "{digest("acme")}" }},
  {{ sha256 = "{digest("acme-batch")}", name = "batch", tier = "bronze" }},
]
[tenants.birch]
tier = "bronze"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest("birch")}" }}]
"""
TIERS = ("gold", "silver", "bronze")
# Key, service or model, the requested tier, the tier that serves.
THROUGH_LOGIC = [
    ("acme", "both", None, "gold"),
    ("acme-batch", "both", None, "bronze"),
    ("acme", "both", "bronze", "bronze"),
    ("acme", "both", "gold", "gold"),
    ("acme", "pinned", None, "silver"),
    ("acme", "pinned", "bronze", "bronze"),
    ("acme-batch", "pinned", None, "bronze"),
    ("birch", "urgent", None, "gold"),
    ("birch", "urgent", "silver", "silver"),
]
STRAIGHT = [
    ("acme", "double", None, "gold"),
    ("acme", "double", "silver", "silver"),
    ("acme-batch", "double", None, "bronze"),
    ("acme", "triple", None, "silver"),
    ("birch", "triple", None, "bronze"),
]


def headers(key: str, asked: str | None) -> dict[str, str]:
    return {"x-api-key": key} | ({"x-request-tier": asked} if asked else {})


def message(model: str) -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[b"\0" * 16])
    made.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    return bytes(made.SerializeToString())


class Waiting:
    """The calls that wait in the queues of some models, by band."""

    def __init__(self, it: Any, models: list[str]) -> None:
        self._batchers = [it.serving[model].batcher for model in models]
        self._before = self._now()

    def _now(self) -> list[int]:
        return [
            sum(waiting for band, waiting, _ in batcher.depths() if band == asked)
            for batcher in self._batchers
            for asked in range(len(TIERS))
        ]

    async def tier_of_one_more(self) -> set[str]:
        """Return the tiers by which one more call waits in each queue."""
        expected = sum(self._before) + len(self._batchers)
        await until(lambda: sum(self._now()) >= expected)
        more = [now - before for now, before in zip(self._now(), self._before, strict=True)]
        return {TIERS[place % len(TIERS)] for place, count in enumerate(more) if count}


async def test_each_call_waits_in_every_model_by_its_effective_tier(tmp_path: Path) -> None:
    async with (
        path(tmp_path, DOCUMENTS, SERVICES, others=["triple"]) as it,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.http}", timeout=60, trust_env=False) as client,
        aio.insecure_channel(f"127.0.0.1:{it.grpc}") as channel,
        asyncio.TaskGroup() as group,
    ):
        blocker = group.create_task(client.post(INFER, json=ROW, headers={"x-api-key": "birch"}))
        await asyncio.to_thread(it.fake.gate.wait_for_runs, 1)
        served: list[tuple[asyncio.Task[httpx.Response], str]] = []
        for key, service, asked, expected in THROUGH_LOGIC:
            waiting = Waiting(it, ["double", "triple"])
            call = client.post(f"/v1/services/{service}", content=b"[1, 2, 3, 4]", headers=headers(key, asked))
            served.append((group.create_task(call), expected))
            assert await waiting.tier_of_one_more() == {expected}, (key, service, asked)
        others = []
        for key, model, asked, expected in STRAIGHT:
            waiting = Waiting(it, [model])
            call = client.post(f"/v2/models/{model}/infer", json=ROW, headers=headers(key, asked))
            others.append(group.create_task(call))
            assert await waiting.tier_of_one_more() == {expected}, ("http", key, model, asked)
        unary = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for key, model, asked, expected in STRAIGHT:
            metadata = tuple(headers(key, asked).items())
            waiting = Waiting(it, [model])
            others.append(unary(message(model), metadata=metadata))
            assert await waiting.tier_of_one_more() == {expected}, ("unary", key, model, asked)
            waiting = Waiting(it, [model])
            streamed = stream(metadata=metadata)
            await streamed.write(message(model))
            others.append(group.create_task(streamed.read()))
            assert await waiting.tier_of_one_more() == {expected}, ("stream", key, model, asked)
            await streamed.done_writing()
        it.fake.gate.open()
        for task, expected in served:
            answer = await task
            assert (answer.status_code, answer.json()) == (200, {"tier": expected})
            (decided,) = it.gateway.records.decisions.of(answer.headers["x-request-id"])
            assert decided.tenant.tier.name == expected
        await asyncio.gather(blocker, *others)
        for model in ("double", "triple"):
            counted = {name: tier.latency.count for name, tier in it.serving[model].batcher.statistics.tiers.items()}
            expected_counts = Counter(tier for _, _, _, tier in THROUGH_LOGIC)
            for _, each, _, tier in STRAIGHT:
                expected_counts[tier] += 3 * (each == model)  # HTTP, unary and streamed
            expected_counts["bronze"] += model == "double"  # the blocker
            assert counted == expected_counts
