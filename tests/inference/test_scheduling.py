"""Deadlines, queue policies and departures on real sockets, while a long batch holds the device."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from fake_backend import FakeBackend

from oriel_inference.app import Unit
from oriel_inference.batching.call import Call
from oriel_inference.errors import Outcome
from oriel_wire.engine.buffered import Exchange

from ..waiting import until
from . import models
from .gated import INFER, ROW, admitted, batcher_of, gated
from .grpc_calls import infer, ones

WARM_UP = [1, 1, 1]
POLICY = "default_queue_policy { default_timeout_microseconds: %d allow_timeout_override: true %s }"


def with_parameters(**parameters: Any) -> dict[str, Any]:
    return {**ROW, "parameters": parameters}


class Busy:
    """A unit whose device is held by one request; more can be sent over either protocol."""

    def __init__(self, unit: Unit, client: httpx.AsyncClient, fake: FakeBackend, group: asyncio.TaskGroup) -> None:
        self.unit, self.client, self.fake, self.group = unit, client, fake, group
        self.batcher = batcher_of(unit)

    async def hold(self) -> asyncio.Task[httpx.Response]:
        held = self.group.create_task(admitted(self.client))
        await asyncio.to_thread(self.fake.gate.wait_for_runs, 1)
        return held

    @property
    def executed(self) -> list[int]:
        """Rows of every batch after the warm-up."""
        return self.fake.sessions[0].batches[len(WARM_UP) :]


async def test_http_and_grpc_requests_that_expire_are_answered_while_the_batch_runs(
    tmp_path: Path, fake: FakeBackend
) -> None:
    async with gated(tmp_path, fake) as (unit, client), asyncio.TaskGroup() as group:
        busy = Busy(unit, client, fake, group)
        held = await busy.hold()
        over_http = await client.post(INFER, json=ROW, headers={"x-oriel-timeout-ms": "20"})
        assert (over_http.status_code, over_http.json()["reason"]) == (504, "deadline_exceeded")
        by_body = await client.post(INFER, json=with_parameters(timeout=20_000))
        assert by_body.status_code == 504  # without a queue policy `timeout` shortens the deadline
        async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(channel)(ones(), metadata=(("x-oriel-timeout-ms", "20"),))
        assert refused.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert busy.batcher.running == 1 and busy.batcher.pending == 0
        fake.gate.open()
        assert (await held).status_code == 200
        assert busy.executed == [1]


async def test_a_queue_policys_timeout_is_tritons_503_on_both_protocols(tmp_path: Path, fake: FakeBackend) -> None:
    config = models.DOUBLE + "dynamic_batching { " + POLICY % (20_000, "") + " }"
    async with gated(tmp_path, fake, config) as (unit, client), asyncio.TaskGroup() as group:
        busy = Busy(unit, client, fake, group)
        held = await busy.hold()
        for body in (ROW, with_parameters(timeout=10_000), with_parameters(timeout=90_000_000)):
            late = await client.post(INFER, json=body)
            assert (late.status_code, late.json()["reason"]) == (503, "queue_timeout")
            assert "Request timeout expired" in late.json()["error"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await infer(channel)(ones())
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        assert busy.batcher.running == 1
        fake.gate.open()
        assert (await held).status_code == 200
        assert busy.executed == [1]


async def test_a_delayed_request_is_answered_after_those_that_came_later(tmp_path: Path, fake: FakeBackend) -> None:
    delay = POLICY % (60_000_000, "timeout_action: DELAY")
    config = models.DOUBLE.replace("max_batch_size: 8", "max_batch_size: 1") + "dynamic_batching { " + delay + " }"
    order: list[str] = []
    async with gated(tmp_path, fake, config) as (unit, client), asyncio.TaskGroup() as group:
        busy = Busy(unit, client, fake, group)
        await busy.hold()

        async def ask(name: str, **parameters: int) -> None:
            assert (await client.post(INFER, json=with_parameters(**parameters))).status_code == 200
            order.append(name)

        group.create_task(ask("first", timeout=20_000))
        await until(lambda: busy.batcher.pending == 1)
        await until(lambda: busy.batcher._queue.rows_ahead(0) == 0)  # parked: it presses nobody any more
        group.create_task(ask("second"))
        await until(lambda: busy.batcher.pending == 2)
        fake.gate.open()
    assert order == ["second", "first"]


async def test_a_request_that_has_ended_leaves_nothing_to_the_garbage_collector(
    tmp_path: Path, fake: FakeBackend
) -> None:
    """A regression: caller and call knew each other, so bodies and tensors lived on until a collection."""

    def calls() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, Call | Exchange)]

    async with gated(tmp_path, fake) as (_, client):
        fake.gate.open()
        gc.collect()
        gc.disable()
        try:
            unknown = {"inputs": [{**ROW["inputs"][0], "name": "z"}]}
            asked = [(ROW, {}, 200), (ROW, {"x-oriel-timeout-ms": "0"}, 504), (unknown, {}, 400)]
            for body, headers, status in asked:
                for _ in range(3):
                    assert (await client.post(INFER, json=body, headers=headers)).status_code == status
            assert not calls()
        finally:
            gc.enable()


async def http_request(unit: Unit) -> AsyncIterator[None]:
    body = json.dumps(ROW).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", unit.http_port)
    writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (INFER.encode(), len(body), body))
    yield
    writer.close()
    yield


async def grpc_call(unit: Unit) -> AsyncIterator[None]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        call = infer(channel)(ones())
        yield
        call.cancel()
        yield


@pytest.mark.parametrize("kind", [http_request, grpc_call])
async def test_who_leaves_frees_the_place_for_the_next_while_the_batch_still_runs(
    tmp_path: Path, fake: FakeBackend, kind: Any
) -> None:
    async with gated(tmp_path, fake, max_queue_items=1) as (unit, client), asyncio.TaskGroup() as group:
        busy = Busy(unit, client, fake, group)
        held = await busy.hold()
        leaving = kind(unit)
        await anext(leaving)
        await until(lambda: busy.batcher.pending == 1)
        assert (await client.post(INFER, json=ROW)).status_code == 503
        await anext(leaving)
        await until(lambda: busy.batcher.pending == 0)
        assert busy.batcher.running == 1  # the batch has not moved
        follower = group.create_task(client.post(INFER, json=ROW))
        await until(lambda: busy.batcher.pending == 1)
        assert busy.batcher.statistics.failures[Outcome.CALLER_LEFT] == 1
        fake.gate.open()
        assert (await held).status_code == (await follower).status_code == 200
        assert busy.executed == [1, 1]  # nothing was computed for the one who left
        await leaving.aclose()


async def test_among_equals_nobody_overtakes_and_a_higher_tier_waits_for_one_batch_only(
    tmp_path: Path, fake: FakeBackend
) -> None:
    config = models.DOUBLE.replace("max_batch_size: 8", "max_batch_size: 2")
    order: list[str] = []
    async with gated(tmp_path, fake, config) as (unit, client), asyncio.TaskGroup() as group:
        busy = Busy(unit, client, fake, group)
        await busy.hold()

        async def ask(name: str, band: int) -> None:
            headers = {"x-oriel-priority": str(band), "x-oriel-timeout-ms": "60000"}
            assert (await client.post(INFER, json=ROW, headers=headers)).status_code == 200
            order.append(name)

        for number, (name, band) in enumerate([("a", 1), ("b", 1), ("c", 1), ("d", 1), ("gold", 0), ("gold", 0)]):
            group.create_task(ask(name, band))
            await until(lambda number=number: busy.batcher.pending == number + 1)  # type: ignore[misc]
        fake.gate.open()
    assert [sorted(order[at : at + 2]) for at in (0, 2, 4)] == [["gold", "gold"], ["a", "b"], ["c", "d"]]
