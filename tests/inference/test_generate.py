"""generate and generate_stream: inputs from JSON, events, errors around the first one, slow and absent readers."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit
from oriel_inference.errors import InvalidRequest, Outcome
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.servers.generate import _Events, decode_generate, encode_generate
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import InferResponse, tensor

from ..gateway.stack import GOLD, documents, gateway
from ..waiting import until
from .clients import client_of
from .streams import Fakes, streaming

GENERATE = "/v2/models/words/generate"
STREAM = "/v2/models/words/generate_stream"


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
async def unit(tmp_path: Path, fakes: Fakes) -> AsyncIterator[Unit]:
    async with streaming(tmp_path, fakes) as running:
        yield running


def events(text: str) -> list[dict[str, Any]]:
    parts = text.split("\n\n")
    assert parts.pop() == "" and all(part.startswith("data: ") and "\n" not in part for part in parts)
    return [json.loads(part[6:]) for part in parts]


async def test_generate_answers_with_plain_json(http: httpx.AsyncClient) -> None:
    answer = await http.post(GENERATE, json={"id": "7", "text_input": "hello", "parameters": {"temperature": 0.5}})
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json() == {"id": "7", "model_name": "words", "model_version": "1", "text_output": "hello"}
    assert "x-request-id" in answer.headers and "server-timing" in answer.headers


async def test_generate_works_with_models_of_one_response_too(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v2/models/double/generate", json={"x": [1, 2, 3, 4]})
    assert answer.json()["y"] == [2.0, 4.0, 6.0, 8.0]
    answer = await http.post("/v2/models/echo/versions/1/generate", json={"parameters": {"text": "nested"}})
    assert answer.json()["said"] == "nested"
    answer = await http.post("/v2/models/double/generate_stream", json={"x": [[1, 2, 3, 4]]})
    assert [event["y"] for event in events(answer.text)] == [[2.0, 4.0, 6.0, 8.0]]
    packed = gzip.compress(json.dumps({"x": [1, 2, 3, 4]}).encode())
    answer = await http.post("/v2/models/double/generate", content=packed, headers={"content-encoding": "gzip"})
    assert answer.json()["y"] == [2.0, 4.0, 6.0, 8.0]


async def test_generate_stream_sends_each_response_as_an_event(http: httpx.AsyncClient) -> None:
    answer = await http.post(STREAM, json={"text_input": "one two drei"}, headers={"x-request-id": "me"})
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["x-request-id"] == "me" and answer.headers["transfer-encoding"] == "chunked"
    assert [event["text_output"] for event in events(answer.text)] == ["one", "two", "drei"]


async def test_first_event_comes_before_the_second_is_made(http: httpx.AsyncClient, fakes: Fakes) -> None:
    gate = fakes.by_name["fake-words"].gate
    gate.close()
    gate.step()
    async with http.stream("POST", STREAM, json={"text_input": "one two"}) as answer:
        pieces = answer.aiter_text()
        assert events(await anext(pieces))[0]["text_output"] == "one"
        gate.open()
        assert events("".join([piece async for piece in pieces]))[0]["text_output"] == "two"


async def test_generate_refuses_what_is_not_one_response(http: httpx.AsyncClient) -> None:
    for text, words in (("one two", "more than one response"), ("", "no response")):
        answer = await http.post(GENERATE, json={"text_input": text})
        assert answer.status_code == 501 and words in answer.json()["error"]
    assert (await http.post(STREAM, json={"text_input": ""})).text == ""


async def test_decoupled_model_through_infer_is_501(http: httpx.AsyncClient) -> None:
    body = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}
    answer = await http.post("/v2/models/words/infer", json=body)
    assert answer.status_code == 501 and answer.json()["reason"] == "not_supported"


async def test_failure_before_the_first_event_is_plain_and_after_it_an_event(
    http: httpx.AsyncClient, fakes: Fakes
) -> None:
    answer = await http.post(STREAM, json={"nothing": 1})
    assert answer.status_code == 400 and answer.json()["reason"] == "invalid_request"
    fakes.session("fake-words").fail = True
    answer = await http.post(STREAM, json={"text_input": ""})
    assert answer.status_code == 500 and answer.json()["error"] == "the fake backend is set to fail"
    answer = await http.post(STREAM, json={"text_input": "one two"})
    assert answer.status_code == 200
    found = events(answer.text)
    assert [event.get("text_output") for event in found] == ["one", "two", None]
    assert found[2].pop("request_id") == answer.headers["x-request-id"]
    assert found[2] == {"error": "the fake backend is set to fail", "reason": "backend_failed"}


async def test_deadline_is_for_the_first_response(http: httpx.AsyncClient, fakes: Fakes) -> None:
    gate = fakes.by_name["fake-words"].gate
    gate.close()
    answer = await http.post(STREAM, json={"text_input": "one"}, headers={"x-oriel-timeout-ms": "30"})
    assert answer.status_code == 504
    gate.open()
    assert (await http.post(STREAM, json={"text_input": "one"})).status_code == 200


async def test_client_that_leaves_ends_the_run(unit: Unit, http: httpx.AsyncClient, fakes: Fakes) -> None:
    body = {"text_input": "word " * 100_000}
    async with http.stream("POST", STREAM, json=body) as answer:
        await anext(answer.aiter_text())
    await until(lambda: fakes.session("fake-words").abandoned == 1)
    batcher = unit.catalog.get("words").batcher
    await until(lambda: not batcher.running)
    assert batcher.statistics.failures[Outcome.CALLER_LEFT] == 1


async def test_slow_reader_holds_the_model_not_the_server(
    unit: Unit, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, emit = asyncio.Event(), _Events.emit

    def watched(events: _Events, *args: Any) -> None:
        emit(events, *args)
        if events._unread:
            held.set()

    monkeypatch.setattr(_Events, "emit", watched)
    words = 7500
    body = json.dumps({"text_input": " ".join(["x" * 500] * words)}).encode()
    head = f"POST {STREAM} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel must not read for us
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", unit.http_port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    writer.write(head.encode() + body)
    batcher = unit.catalog.get("words").batcher
    await held.wait()
    assert batcher.running == 1
    assert (await http.post("/v2/models/double/generate", json={"x": [1, 2, 3, 4]})).status_code == 200
    got = bytearray()
    while not (got.endswith(b"\r\n\r\n") and b"\r\n0\r\n" in got[-200:]):  # its trailers have the cost
        got += await reader.read(1 << 16)
    assert got.count(b"data: ") == words and not batcher.running
    writer.close()


async def test_events_pass_through_the_gateway(unit: Unit) -> None:
    async with gateway(documents([unit.http_port])) as (port, _):
        async with client_of(port) as http:
            headers = {"authorization": f"Bearer {GOLD}"}
            answer = await http.post(STREAM, json={"text_input": "one two"}, headers=headers)
            assert [event["text_output"] for event in events(answer.text)] == ["one", "two"]
            answer = await http.post(GENERATE, json={"text_input": "one"}, headers=headers)
            assert answer.json()["text_output"] == "one"


# --- bodies ---------------------------------------------------------------------------------------------------------


def spec(dims: tuple[int, ...], datatype: str = "FP32", *, batched: bool = True) -> ModelSpec:
    return ModelSpec(
        name="m",
        version=1,
        platform="",
        backend="fake",
        max_batch_size=4 if batched else 0,
        inputs=(TensorSpec(name="x", datatype=datatype, dims=dims),),
        outputs=(),
        bounds=None,
    )


@pytest.mark.parametrize(
    ("value", "dims", "batched", "shape"),
    [
        (1.5, (1,), True, (1, 1)),
        (1.5, (-1,), True, (1, 1)),
        ([1, 2, 3], (-1,), True, (1, 3)),
        ([1, 2, 3, 4], (2, -1), True, (1, 2, 2)),
        ([[1, 2], [3, 4]], (2, 2), True, (1, 2, 2)),
        ([[1, 2], [3, 4]], (2,), True, (2, 2)),
        ([[1, 2], [3, 4]], (2, 2), False, (2, 2)),
        ([1, 2], (2,), False, (2,)),
    ],
)
def test_values_take_the_shape_of_the_input(
    value: object, dims: tuple[int, ...], batched: bool, shape: tuple[int, ...]
) -> None:
    request = decode_generate("m", "", json.dumps({"x": value, "top_k": 3}).encode(), spec(dims, batched=batched))
    assert request.inputs[0].shape == shape and request.parameters == {"top_k": 3}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"[1]", "not a JSON object"),
        (b'{"x": NaN}', "not a JSON object"),
        (b'{"x": "text"}', "input 'x'"),
        (b'{"x": [1, 2, 3]}', "2 elements"),
        (b'{"x": {"a": 1}}', "input 'x'"),
        (b'{"x": null}', "input 'x'"),
        (b'{"x": 1, "parameters": {"x": 1}}', "element"),
        (b'{"x": [1, 2], "parameters": {"x": [1, 2]}}', "more than once"),
        (b'{"x": [1, 2], "y": [1]}', "'y' is not an input"),
        (b'{"x": [1, 2], "parameters": 3}', "parameters must be"),
        (b'{"id": 3}', "id must be"),
        (b'{"x": [' + b"1," * (1 << 18) + b"1]}", "send them as binary"),
        (b'{"triton_x": 3}', "reserved"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "exceeds maximum allowed limit"),
        (b'{"x": "' + b"a" * (4 << 20) + b'"}', "at most"),
        ("{}".encode("utf-16"), "not a JSON object"),
    ],
)
def test_bodies_that_do_not_fit_are_refused_by_name(body: bytes, words: str) -> None:
    with pytest.raises((BadMessage, InvalidRequest)) as refused:
        decode_generate("m", "", body, spec((2,)))
    assert words in (said := refused.value.message) and len(said) <= 500  # type: ignore[attr-defined]


def test_answers_are_flat() -> None:
    outputs = [
        tensor("one", np.array([[1.5]], np.float32)),
        tensor("many", np.array([[1, 2], [3, 4]])),
        tensor("none", np.zeros((0,), np.float32)),
        tensor("odd", np.array([np.nan], np.float32)),
    ]
    text = encode_generate(InferResponse(model_name="m", model_version="2", outputs=outputs)).decode()
    assert text == '{"model_name":"m","model_version":"2","one":1.5,"many":[1,2,3,4],"none":[],"odd":NaN}'
