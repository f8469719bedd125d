"""What runs in workers, through the server's port: calls of models, batches, limits, and what is left behind."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Services = Callable[..., Path]
BLOCKING = """
    import numpy as np
    from oriel_logic import Request, service

    @service
    def blocking(request: Request, models, ctx) -> dict:
        row = np.frombuffer(request.body, np.float32)[np.newaxis]
        with ctx.stage("twice"):
            once = models.infer("double", {"x": row})
            again = models.infer("double", {"x": once["y"]})
        return {"y": again["y"], "tier": ctx.tier}
"""
TOGETHER = """
    from oriel_logic import Refused, Request, batched, service

    @batched(max_rows=3, max_delay_ms=1000)
    def measured(texts: list[str]) -> list[tuple[int, int]]:
        if "bad" in texts:
            raise Refused("this text is bad")
        return [(len(text), len(texts)) for text in texts]

    @service
    async def together(request: Request, ctx) -> dict:
        [(length, rows)] = await ctx.run(measured, [request.body.decode()])
        return {"length": length, "rows": rows}
"""
GREEDY = """
    import time
    from oriel_logic import Request, service

    @service(name="greedy", memory_mb=50)
    def greedy(request: Request) -> dict:
        return {"bytes": len(bytearray(int(request.body) << 20))}

    def twice(megabytes: int) -> int:
        return len(bytearray(megabytes << 20))

    @service(name="greedy-run", memory_mb=50)
    async def greedy_run(request: Request, ctx) -> dict:
        return {"bytes": await ctx.run(twice, int(request.body))}
"""


async def test_a_plain_handler_calls_models_under_its_requests_deadline_and_in_its_trace(
    stack: Any, services: Services, inference: Any
) -> None:
    made = await stack(services(blocking=BLOCKING))
    body = np.array([1.5, 2.0], np.float32).tobytes()
    answer = await made.post("blocking", body, x_oriel_tier="gold", content_type="application/octet-stream")
    assert answer.json() == {"y": [[6.0, 8.0]], "tier": "gold"}
    assert "logic-twice;dur=" in answer.headers["server-timing"]
    assert "logic-infer;dur=" in answer.headers["server-timing"]
    first, second = (float(each.head.get("x-oriel-timeout-ms")) for each in inference.calls)
    assert 0 < second <= first <= 30_000


async def test_requests_of_different_callers_share_one_call_and_a_bad_one_fails_alone(
    stack: Any, services: Services
) -> None:
    made = await stack(services(together=TOGETHER))
    answers = await asyncio.gather(*(made.post("together", text.encode()) for text in ("a", "bb", "ccc")))
    assert sorted(each.json()["length"] for each in answers) == [1, 2, 3]
    assert {each.json()["rows"] for each in answers} == {3}
    answers = await asyncio.gather(*(made.post("together", text.encode()) for text in ("a", "bad", "ccc")))
    assert [each.status_code for each in answers] == [200, 422, 200]
    assert [each.json().get("length") for each in answers] == [1, None, 3]
    assert made.unit.pool.tally.batches["full"] == 2


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA")
@pytest.mark.parametrize("name", ["greedy", "greedy-run"])
async def test_a_services_memory_is_bounded_and_says_so(stack: Any, services: Services, name: str) -> None:
    made = await stack(services(greedy=GREEDY))
    assert (await made.post(name, b"10")).json() == {"bytes": 10 << 20}
    answer = await made.post(name, b"200")
    assert (answer.status_code, answer.json()["error"]["reason"]) == (500, "memory_exceeded")
    assert (await made.post(name, b"10")).status_code == 200
