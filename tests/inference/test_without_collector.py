"""No kind of request leaves objects that only the garbage collector can free, for which it would stop all requests."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
from grpc import aio

from oriel_inference.app import Unit
from oriel_wire.v2.grpc import SERVICE

from ..uncollected import left_by
from .grpc_calls import infer, ones
from .streams import Fakes, said, stream, streaming

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"
HEAD = json.dumps(
    {
        "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}],
        "parameters": {"binary_data_output": True},
    }
).encode()
BINARY = HEAD + np.ones(4, np.float32).tobytes()
LENGTH = {"inference-header-content-length": str(len(HEAD))}
Ask = Callable[[httpx.AsyncClient], Awaitable[httpx.Response]]
KINDS: dict[str, tuple[int, Ask]] = {
    "JSON": (200, lambda client: client.post(INFER, json=ONES)),
    "large JSON": (200, lambda client: client.post(INFER, content=json.dumps(ONES).encode() + b" " * 2_000_000)),
    "binary": (200, lambda client: client.post(INFER, content=BINARY, headers=LENGTH)),
    "generate": (200, lambda client: client.post("/v2/models/words/generate", json={"text_input": "one"})),
    "events": (200, lambda client: client.post("/v2/models/words/generate_stream", json={"text_input": "one two"})),
    "metadata": (200, lambda client: client.get("/v2/models/double")),
    "statistics": (200, lambda client: client.get("/v2/models/double/stats")),
    "no model": (404, lambda client: client.post("/v2/models/none/infer", json=ONES)),
    "no JSON": (400, lambda client: client.post(INFER, content=b"{")),
    "no input": (400, lambda client: client.post(INFER, json={"inputs": []})),
    "no events": (400, lambda client: client.post("/v2/models/words/generate_stream", json={"other": 1})),
    "late": (504, lambda client: client.post(INFER, json=ONES, headers={"x-oriel-timeout-ms": "0"})),
    "a path": (404, lambda client: client.get("/nothing")),
}


@pytest.fixture
async def unit(tmp_path: Path) -> AsyncIterator[Unit]:
    async with streaming(tmp_path, Fakes()) as running:
        yield running


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_over_http_leaves_nothing_in_cycles(http: httpx.AsyncClient, kind: str) -> None:
    status, call = KINDS[kind]

    async def ask() -> None:
        answer = await call(http)
        assert answer.status_code == status, answer.text

    assert await left_by(ask) == {}


@pytest.mark.parametrize("kind", ["unary", "stream", "no model", "no message", "no method"])
async def test_a_call_over_grpc_leaves_nothing_in_cycles(unit: Unit, kind: str) -> None:
    async with aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:

        async def ask() -> None:
            match kind:
                case "unary":
                    await infer(channel)(ones())
                case "stream":
                    call = stream(channel)
                    for _ in range(3):
                        await call.write(ones())
                    await call.done_writing()
                    assert len(await said(call)) == 3
                case "no model":
                    assert await infer(channel)(ones("none")).code() is grpc.StatusCode.NOT_FOUND
                case "no message":
                    call = channel.unary_unary(f"/{SERVICE}/ModelInfer")(b"\xff")
                    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                case _:
                    call = channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
                    assert await call.code() is grpc.StatusCode.UNIMPLEMENTED

        assert await left_by(ask) == {}
