"""Sequences of an unmodified tritonclient through the gateway, at two inference servers that are processes."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from ..gateway.endpoint_pools import first_route
from ..gateway.stack import BRONZE, GOLD, documents, gateway
from ..inference.sequence_models import STATE, Client, put

IDS: list[int | str] = [*range(1, 9), *(str(number) for number in range(1, 9))]
ROUTE = '[[routes]]\nmodel = "*"\npool = "p"\nsticky = "sequence"\n'
LOST = "the server with its state was lost: begin the sequence again (sequence_start)"


@asynccontextmanager
async def server(root: Path) -> AsyncIterator[tuple[Process, int, int]]:
    words = ["--model-repository", str(root), "--http-port=0", "--grpc-port=0", "--allow-metrics=false"]
    command = [sys.executable, "-P", "-m", "oriel_cli.main", "inference", *words]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    assert process.stderr is not None
    while (ready := re.search(rb" ready: HTTP (\d+), gRPC (\d+)", line := await process.stderr.readline())) is None:
        assert line, "the server did not start"
    try:
        yield process, int(ready[1]), int(ready[2])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def send(way: str, client: Client, sequence: int | str, value: int, key: str = GOLD, **flags: bool) -> int | str:
    """Send one step; return the number that the answer has, or the text of the refusal."""
    try:
        if way != "stream":
            return client.step(sequence, value, headers={"x-api-key": key}, **flags)
        answers: Any = SimpleQueue()
        client.client.start_stream(lambda result, error: answers.put((result, error)), headers={"x-api-key": key})
        flags = {f"sequence_{name}": flag for name, flag in flags.items()}
        client.client.async_stream_infer("digits", client.inputs(value), sequence_id=sequence, **flags)
        result, error = answers.get(timeout=60)
        client.client.stop_stream()
        return str(error.message()) if error else int(result.as_numpy("OUTPUT").item())
    except InferenceServerException as refused:
        return str(refused.message())


@pytest.mark.parametrize("way", ["http", "grpc", "stream"])
async def test_a_sequence_keeps_its_server_until_that_dies(tmp_path: Path, way: str) -> None:
    zero = STATE % 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }'
    put(
        tmp_path, "digits", f"oldest {{ max_candidate_sequences: 64 }} {zero} max_sequence_idle_microseconds: 600000000"
    )
    async with AsyncExitStack() as opened:
        running = [await opened.enter_async_context(server(tmp_path)) for _ in range(2)]
        ports = [grpc if way != "http" else http for _, http, grpc in running]
        port, core = await opened.enter_async_context(gateway(first_route(documents(ports), ROUTE)))
        module: Any = tritonclient.http if way == "http" else tritonclient.grpc
        client = opened.enter_context(Client(module, f"127.0.0.1:{port}", "digits"))

        async def step(sequence: int | str, value: int, key: str = GOLD, **flags: bool) -> int | str:
            return await asyncio.to_thread(send, way, client, sequence, value, key, **flags)

        endpoints = core.pools["p"].endpoints_for(grpc=way != "http")

        assert [await step(each, 1, start=True) for each in IDS] == [1] * len(IDS)
        assert "must specify the START flag" in str(await step(1, 50, BRONZE))
        assert [await step(1, 100, BRONZE, start=True), await step(1, 100, BRONZE, end=True)] == [100, 200]

        addresses = [each.address for each in endpoints]
        endpoints.assign(addresses[1:])  # a drain of the first server
        assert [await step(each, 2) for each in IDS] == [3] * len(IDS)
        endpoints.assign(addresses)

        running[0][0].kill()
        await running[0][0].wait()
        found = [await step(each, 3) for each in IDS]
        again = [await step(each, 4) for each in IDS]
        assert set(again) == {10, LOST} and [each != 6 for each in found] == [each == LOST for each in again]
        assert [await step(each, 5, start=True) for each in IDS] == [5] * len(IDS)
        assert [await step(each, 6, end=True) for each in IDS] == [11] * len(IDS)
