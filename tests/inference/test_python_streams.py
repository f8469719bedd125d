"""Decoupled Python models, and Python models that ask other models."""

import asyncio
import json
import queue
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends import Request
from oriel_inference.backends.python import session as session_module
from oriel_inference.backends.python.frames import AHEAD
from oriel_inference.backends.python.messages import Infer
from oriel_inference.batching import requests as request_batches
from oriel_inference.catalog import UNTRIED
from oriel_inference.dataplane.scripting import ModelCall, of_sequence
from oriel_inference.errors import BackendFailed, InvalidRequest
from oriel_inference.settings import Settings
from oriel_wire.context import read_headers
from oriel_wire.observe.trace import ListSink
from oriel_wire.process.messages import FrameError
from oriel_wire.v2.grpc import encode_infer_request
from oriel_wire.v2.messages import InferRequest, InferResponse, tensor

from ..waiting import until
from . import models
from .bench import context
from .python_calls import BEHAVE, put
from .streams import said, stream

LATER = """
backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
SHAPES = """
backend: "python" max_batch_size: {rows} model_transaction_policy {{ decoupled: true }}
input [ {{ name: "shape" data_type: TYPE_STRING dims: [ 1 ] }} ]
output [ {{ name: "i" data_type: TYPE_INT32 dims: [ {dims} ] {more} }} ]
"""
SILENT = """
backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
parameters { key: "oriel.kill_after_s" value: { string_value: "0.1" } }
"""
PIPE = """
platform: "ensemble"
input [ { name: "how" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "ask" model_version: -1
    input_map { key: "how" value: "how" } output_map { key: "said" value: "said" } } ] }
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    root = tmp_path_factory.mktemp("python-streams")
    put(root, "repeat", "repeat", None)
    put(root, "silent", "repeat", SILENT)
    put(root, "ask", "ask", 'backend: "python" instance_group [ { count: 1 } ]')
    put(root, "ask2", "ask", None)
    put(root, "later", "later", LATER)
    put(root, "behave", "behave", BEHAVE)
    put(root, "rows", "shapes", SHAPES.format(rows=4, dims="2", more=""))
    put(root, "free", "shapes", SHAPES.format(rows=4, dims="-1", more=""))
    put(root, "reshaped", "shapes", SHAPES.format(rows=4, dims="2, 2", more="reshape { shape: [ 4 ] }"))
    put(root, "whole", "shapes", SHAPES.format(rows=0, dims="2", more=""))
    models.put(root, "double", models.double(), models.DOUBLE)
    models.put(root, "pipe", None, PIPE)
    settings = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, cores=1, drain_s=5.0)
    async with open_unit(settings, sink=ListSink()) as running:
        assert not [entry for entry in running.catalog.index() if entry.reason not in ("", UNTRIED)]
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(unit: Unit) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as opened:
        yield opened


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{unit.http_port}/v2"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
        yield client


def repeat(number: int, model: str = "repeat") -> Any:
    given = tensor("n", np.array([number], np.int32))
    return encode_infer_request(InferRequest(model_name=model, id=str(number), inputs=[given]))


async def told(channel: grpc.aio.Channel, *numbers: int, model: str = "repeat") -> list[Any]:
    """Everything the answers to these requests say."""
    call = stream(channel)
    for number in numbers:
        await call.write(repeat(number, model))
    await call.done_writing()
    return await said(call)


async def test_the_configuration_is_completed_by_the_models_code(http: httpx.AsyncClient) -> None:
    config = (await http.get("/models/repeat/config")).json()
    assert config["backend"] == "python" and config["model_transaction_policy"] == {"decoupled": True}
    assert [each["name"] for each in config["input"]] == ["n"]


async def test_responses_are_counted_by_their_number(unit: Unit, channel: grpc.aio.Channel) -> None:
    def counted() -> list[tuple[int, int]]:
        return [
            (each.success.count, each.empty.count) for each in unit.catalog.get("repeat").batcher.statistics.responses
        ]

    before = [*counted(), *[(0, 0)] * 4]
    assert await told(channel, 2) == [0, 1]
    after = counted()
    assert [(success - b, empty - e) for (success, empty), (b, e) in zip(after, before, strict=False)][:3] == [
        (1, 0),
        (1, 0),
        (0, 1),
    ]


async def test_a_decoupled_model_sends_any_number_of_responses(channel: grpc.aio.Channel) -> None:
    assert await told(channel, 3) == [0, 1, 2]
    assert await told(channel, 0) == []


async def test_several_requests_are_under_way_in_one_instance_and_end_out_of_order(channel: grpc.aio.Channel) -> None:
    assert await told(channel, -4, -5) == [5, 4]


async def test_coroutines_of_one_instance_wait_side_by_side(channel: grpc.aio.Channel) -> None:
    assert await told(channel, 3, 1, 2, model="later") == [1, 2, 3]
    assert await told(channel, -1, model="later") == ["the model failed: the server's log says why"]


async def test_an_error_ends_the_request_and_a_forgotten_end_is_made_up(channel: grpc.aio.Channel) -> None:
    assert await told(channel, -2) == [0, "enough"]
    assert await told(channel, -3) == [7]


async def finals(channel: grpc.aio.Channel, number: int, *, empty: bool) -> list[tuple[bool, bool]]:
    """Of every response: whether it has outputs, whether it is called the last."""
    call = stream(channel)
    request = repeat(number)
    request.parameters["triton_enable_empty_final_response"].bool_param = empty
    await call.write(request)
    await call.done_writing()
    found = []
    while (answer := await call.read()) is not grpc.aio.EOF:
        response = answer.infer_response
        found.append((bool(response.outputs), response.parameters["triton_final_response"].bool_param))
    return found


@pytest.mark.parametrize("empty", [False, True])
async def test_the_response_with_which_a_model_ends_is_called_the_last(channel: grpc.aio.Channel, empty: bool) -> None:
    """A regression: clients that read until the last response waited for ever.

    As in Triton, an empty last response is sent only if the model ends without a response, and only to clients that
    ask.
    """
    assert await finals(channel, 2, empty=empty) == [(True, False), (True, True)]
    assert await finals(channel, 0, empty=empty) == [(False, True)] * empty
    assert await finals(channel, -3, empty=empty) == [(True, False), (False, True)][: 1 + empty]


async def test_an_unmodified_client_reads_the_stream(unit: Unit) -> None:
    def read() -> list[Any]:
        found: queue.Queue[Any] = queue.Queue()
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
            client.start_stream(lambda result, error: found.put((result, error)))
            given = tritonclient.grpc.InferInput("n", [1], "INT32")
            given.set_data_from_numpy(np.array([4], np.int32))
            client.async_stream_infer("repeat", [given], request_id="r", enable_empty_final_response=True)
            values = []
            while True:
                result, error = found.get(timeout=60)
                assert error is None
                response = result.get_response()
                if response.outputs:
                    values.append(int(result.as_numpy("i")[0]))
                if response.parameters["triton_final_response"].bool_param:
                    client.stop_stream()
                    return values

    assert await asyncio.to_thread(read) == [0, 1, 2, 3]


async def test_a_reader_that_leaves_is_seen_by_the_sender(channel: grpc.aio.Channel) -> None:
    (before,) = await told(channel, -1)
    call = stream(channel)
    await call.write(repeat(-6))
    await call.read()
    call.cancel()

    async def stopped() -> int:
        (now,) = await told(channel, -1)
        return int(now) % 1000 - before % 1000

    await until(stopped)


async def test_a_reader_that_does_not_read_holds_the_sender_up(unit: Unit, channel: grpc.aio.Channel) -> None:
    (before,) = await told(channel, -1)
    serving = unit.catalog.get("repeat")
    emitted: list[Any] = []
    context = read_headers(lambda _: None, trusted=False).at(0.0, 1e9)
    leave = unit.surface.dataplane.infer(
        InferRequest(model_name="repeat", inputs=[tensor("n", np.array([1000], np.int32))]),
        context,
        size_bytes=4,
        reply=lambda completion: None,
        on_caller_left=lambda completion: None,
        emit=lambda response, consumed, last: emitted.append(consumed),
    )
    await until(lambda: len(emitted) == AHEAD)
    (now,) = await told(channel, -1)
    assert now // 1000 - before // 1000 <= AHEAD and len(emitted) == AHEAD
    emitted[0]()
    await until(lambda: len(emitted) == AHEAD + 1)
    leave()
    await until(lambda: not serving.batcher.running)


@pytest.mark.parametrize("number", [-7, -8])
async def test_a_model_that_falls_silent_for_ever_gives_its_place_back(
    unit: Unit, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Its deadline was for the first response; the next one has `IDLE_S`. With -8 the process has to go as well."""
    monkeypatch.setattr(request_batches, "IDLE_S", 0.1)
    call = stream(channel, metadata=(("x-oriel-timeout-ms", "2500"),))
    await call.write(repeat(number, "silent"))
    await call.done_writing()
    response, late = await said(call)
    assert response == -number and "deadline" in late
    batcher = unit.catalog.get("silent").batcher
    await until(lambda: not batcher.running)
    assert await told(channel, 2, model="silent") == [0, 1]


async def test_a_model_that_never_stops_talking_is_stopped(
    unit: Unit, channel: grpc.aio.Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every response moves the end of its request, up to `MAX_S` or its deadline."""
    monkeypatch.setattr(request_batches, "MAX_S", 0.1)
    call = stream(channel, metadata=(("x-oriel-timeout-ms", "1000"),))
    await call.write(repeat(-6, "silent"))
    await call.done_writing()
    found = await said(call)
    # The model may have noticed in time, and ended it without an error.
    assert found and all("deadline" in each for each in found if isinstance(each, str))
    batcher = unit.catalog.get("silent").batcher
    await until(lambda: not batcher.running)


async def ask(
    http: httpx.AsyncClient, how: str, headers: dict[str, str] | None = None, model: str = "ask"
) -> list[str]:
    inputs = [{"name": "how", "datatype": "BYTES", "shape": [1], "data": [how]}]
    answer = await http.post(f"/models/{model}/infer", json={"inputs": inputs}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json()["outputs"][0]["data"]
    return found


async def test_a_model_asks_another_model(http: httpx.AsyncClient) -> None:
    assert await ask(http, "sync 4") == ["8.0"]
    assert await ask(http, "many 20") == [str(2.0 * i) for i in range(20)]
    assert await ask(http, "stream 3") == ["0", "1", "2"]
    assert await ask(http, "stream -2") == ["0", "enough"]


@pytest.mark.parametrize("how", ["cancel", "drop"])
async def test_an_asked_model_waits_for_the_asking_one_and_hears_that_it_has_gone(
    http: httpx.AsyncClient, how: str
) -> None:
    assert await ask(http, f"few {how}", {"x-oriel-timeout-ms": "120000"}) == [
        str(3 + AHEAD),
        *["7"] * (how == "cancel"),
    ]


def answer(size: int) -> InferResponse:
    return InferResponse(model_name="m", model_version="1", id="", outputs=[tensor("y", np.zeros(size, np.uint8))])


class Asking:
    """A session, as far as what it asks is concerned."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.model_calls: dict[int, Any] = {}
        self.launch = SimpleNamespace(model="asking")
        self.heard: list[Any] = []
        self._limit = limit

    def inferred(self, message: Any, body: Any = ()) -> None:
        if sum(map(len, body)) > self._limit:
            raise FrameError("too large")
        self.heard.append((sum(map(len, body)), message.result.error if message.result else None, message.final))


def asking(limit: int = 1 << 30) -> tuple[Asking, ModelCall]:
    session = Asking(limit)
    asked = session.model_calls[5] = ModelCall(
        cast(Any, session), Infer(5, "m", "", "", {}, [], 0, True, []), ahead_bytes=100
    )
    return session, asked


async def test_bytes_that_are_not_taken_wait_here() -> None:
    session, asked = asking()
    consumed: list[int] = []
    for number, size in enumerate((304, 48, 48, 16)):
        asked.emit(answer(size), partial(consumed.append, number), False)
    asked.finish(None)
    assert session.heard == [(304, None, False)] and not consumed, "the first one goes whatever its size"
    asked.taken(1)
    assert [size for size, _, _ in session.heard] == [304, 48, 48] and consumed == [0]
    asked.taken(1)
    assert session.heard[3:] == [(16, None, False), (0, None, True)] and asked.over and not session.model_calls
    asked.taken(99)
    assert consumed == [0, 1, 2, 3]


async def test_an_error_and_a_departure_are_told_before_what_waits() -> None:
    for leaves in (False, True):
        session, asked = asking()
        for _ in range(2):
            asked.emit(answer(96), lambda: None, False)
        if leaves:
            asked.finish(None)
            asked.caller_left()
        else:
            asked.finish(BackendFailed("broken"))
        assert [size for size, _, _ in session.heard] == [96, 0] and session.heard[-1][2] and not session.model_calls
        asked.emit(answer(16), lambda: None, False)
        asked.caller_left()
        assert len(session.heard) == 2, "nothing follows the end"


async def test_a_response_too_large_to_be_passed_on_ends_the_request() -> None:
    session, asked = asking(limit=100)
    ended: list[bool] = []
    asked.give_up = lambda: ended.append(asked.over)
    asked.emit(answer(112), lambda: None, False)
    assert session.heard == [(0, (1, "the answer of the other model cannot be passed on"), True)] and ended == [True]
    asked.finish(BackendFailed("its caller left"))
    assert len(session.heard) == 1


async def test_a_step_of_an_ensemble_asks_too(http: httpx.AsyncClient) -> None:
    assert await ask(http, "sync 4", model="pipe") == ["8.0"]
    assert await ask(http, "model ask sync 1", model="pipe") == ["3 model 'ask' would wait for itself (ask)"]


async def test_errors_of_the_asked_model_come_as_responses(http: httpx.AsyncClient) -> None:
    assert await ask(http, "model nobody x") == ["2 Request for unknown model: 'nobody' is not found"]
    assert await ask(http, "model ask sync 1") == ["3 model 'ask' would wait for itself (ask)"]
    assert await ask(http, "model ask2 model ask sync 1") == ["3 model 'ask' would wait for itself (ask -> ask2)"]
    assert await ask(http, "model pipe sync 1") == ["3 model 'ask' would wait for itself (ask)"], "through an ensemble"
    assert await ask(http, "model ask2 sync 1") == ["2.0"]


async def test_the_asked_model_has_the_time_of_the_asking_one(http: httpx.AsyncClient) -> None:
    asked, asking = map(float, await ask(http, "time", headers={"x-oriel-timeout-ms": "120000"}))
    assert 0.0 < asking <= asked <= 120.0
    asked, asking = map(float, await ask(http, "time 40000000", headers={"x-oriel-timeout-ms": "120000"}))
    assert 0.0 < asked <= 40.0 < asking


async def test_a_stream_of_events_from_a_python_model(http: httpx.AsyncClient) -> None:
    answer = await http.post("/models/repeat/generate_stream", json={"n": 2})
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    assert [event["i"] for event in events] == [0, 1]


async def test_what_nobody_waits_for_any_more_is_not_asked_any_more(http: httpx.AsyncClient, unit: Unit) -> None:
    asked = unit.catalog.get("behave").batcher
    before = asked.statistics.failures.total()
    task = asyncio.create_task(ask(http, "text left"))
    await until(lambda: asked.running)
    task.cancel()
    await until(lambda: asked.statistics.failures.total() > before)
    await until(lambda: not unit.catalog.get("ask").batcher.running)
    assert await ask(http, "sync 1") == ["2.0"]


def warm(number: int) -> str:
    return f"""
    backend: "python"
    model_warmup [ {{ name: "w" inputs {{ key: "n" value {{
        data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "{number}" }} }} }} ]
    """


async def test_a_decoupled_model_is_warmed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "WARM_RESPONSES", 40)
    for name, number in (("three", 3), ("none", 0), ("endless", -6), ("broken", -2)):
        folder = put(tmp_path, name, "repeat", warm(number))
        (folder / "warmup").mkdir()
        (folder / f"warmup/{number}").write_bytes(np.array([number], np.int32).tobytes())
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=1)
    async with open_unit(settings, sink=ListSink()) as unit:
        reasons = {entry.name: entry.reason for entry in unit.catalog.index()}
        assert reasons.pop("broken").endswith("model_warmup[0]: the warm-up failed: enough")
        assert not any(reasons.values()), reasons
        async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
            assert await told(channel, -1, model="three") == [3000]
            assert await told(channel, 1, model="none") == [0]
            (sent,) = await told(channel, -1, model="endless")
            assert 40 <= sent // 1000 <= 40 + AHEAD, "left, not read for ever"


def shaped(model: str, shape: list[int] | str) -> Any:
    array = np.array([json.dumps(shape).encode()], dtype=object)
    given = tensor("shape", array if model == "whole" else array.reshape(1, 1))
    return encode_infer_request(InferRequest(model_name=model, id="s", inputs=[given]))


@pytest.mark.parametrize(
    ("model", "shape", "expected"),
    [
        ("rows", [1, 2], [1, 2]),
        ("rows", [3, 2], [3, 2]),
        ("rows", [2], [2]),
        ("rows", [1, 2, 1], [1, 2, 1]),
        ("rows", [1, 3], [1, 3]),
        ("rows", [], []),
        ("rows", "float", "FP32"),
        ("free", [2, 7], [2, 7]),
        ("free", [2, 7, 1], [2, 7, 1]),
        ("reshaped", [3, 4], [3, 2, 2]),
        ("reshaped", [3, 2, 2], [3, 2, 2]),
        ("reshaped", [3, 5], [3, 5]),
        ("reshaped", [], []),
        ("whole", [2], [2]),
        ("whole", [3], [3]),
        ("whole", [1, 2], [1, 2]),
    ],
)
async def test_shapes_of_a_decoupled_models_responses_are_passed_on(
    channel: grpc.aio.Channel, unit: Unit, model: str, shape: list[int] | str, expected: list[int] | str
) -> None:
    call = stream(channel)
    await call.write(shaped(model, shape))
    await call.done_writing()
    response = await call.read()
    (output,) = response.infer_response.outputs
    assert expected == (output.datatype if isinstance(expected, str) else list(output.shape))
    await until(lambda: not unit.catalog.get(model).batcher.running)


async def test_a_step_of_a_sequence_is_sent_for_the_request_with_its_id() -> None:
    """In a batch of several tenants it belonged to nobody, and its sequence was not found."""

    def asked(sequence: int, tenant: str) -> Request:
        client = InferRequest(model_name="m", parameters={"sequence_id": sequence})
        return Request(inputs={}, outputs=[], deadline=1.0, ends=1.0, client_request=client, context=context(tenant))

    one, two = asked(-1, "a"), asked(8, "b")
    assert of_sequence([one, two], 2**64 - 1) == [one] and of_sequence([one, two], 8) == [two]
    assert of_sequence([one, two], 9) == [one, two]
    with pytest.raises(InvalidRequest, match="several tenants use sequence 8"):
        of_sequence([two, asked(8, "a")], 8)
