"""JSON beyond what the loop reads and writes: another process does it, and the answers are those of small JSON."""

import asyncio
import base64
import dataclasses
import gzip
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.clock import LoopClock, Timer
from oriel_inference.errors import (
    BackendFailed,
    DeadlineExceeded,
    InferenceError,
    QueueFull,
    RequestTooLarge,
    ServerStopping,
)
from oriel_inference.servers.large_json import Converted, LargeJson, Task
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.http import decode_request

from ..waiting import gone, until
from . import models
from .clients import client_of

PAIR = "/v2/models/pair/infer"
SMALL = b'{"inputs":[{"name":"a","shape":[2],"datatype":"FP32","data":[1, 2]}]}'
# As 5 MiB of JSON: more than the loop reads.
PADDING = b" " * (5 << 20)


@pytest.fixture
def http(kept_http: httpx.AsyncClient) -> httpx.AsyncClient:
    """A client of the kept server: its child that converts large JSON serves all of these tests."""
    return kept_http


@pytest.fixture
def converted(kept_unit: Unit) -> Callable[[], int]:
    """How many texts the kept server has converted since the test began."""
    before = kept_unit.large_json.converted
    return lambda: kept_unit.large_json.converted - before


@pytest.fixture
async def large() -> AsyncIterator[LargeJson]:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20)
    yield made
    await asyncio.to_thread(made.close)


def pair(width: int, **members: Any) -> dict[str, Any]:
    data = list(range(width))
    inputs = [{"name": name, "shape": [1, width], "datatype": "FP32", "data": data} for name in "ab"]
    return {"inputs": inputs, **members}


# --- through the server -------------------------------------------------------------------------------------------


async def test_more_values_and_more_bytes_than_the_loop_reads_are_answered(
    http: httpx.AsyncClient, converted: Callable[[], int]
) -> None:
    binary = [{"name": "sum", "parameters": {"binary_data": True}}]
    for body in (
        json.dumps(pair(300_000, outputs=binary, id="me")).encode(),  # too many values
        json.dumps(pair(4, outputs=binary, id="me")).encode() + PADDING,  # too many bytes
    ):
        answer = await http.post(PAIR, content=body)
        assert answer.status_code == 200, answer.text
        length = int(answer.headers["inference-header-content-length"])
        head = json.loads(answer.content[:length])
        width = head["outputs"][0]["shape"][1]
        assert head["id"] == "me"
        np.testing.assert_array_equal(np.frombuffer(answer.content[length:], "<f4"), np.arange(width) * 2)
    assert converted() == 2


async def test_many_lists_are_read_there_as_well(http: httpx.AsyncClient, converted: Callable[[], int]) -> None:
    rows = 70_000
    data = [[n] for n in range(rows)]
    inputs = [{"name": name, "shape": [1, rows], "datatype": "FP32", "data": data} for name in "ab"]
    answer = await http.post(PAIR, json={"inputs": inputs, "outputs": [{"name": "sum"}]})
    assert answer.status_code == 200 and answer.json()["outputs"][0]["data"][-1] == 2.0 * (rows - 1)
    assert converted() == 1


@pytest.mark.parametrize(("accept", "width"), [("identity", 200_000), ("gzip", 200_001)])
async def test_large_answers_in_json_are_written_there(
    http: httpx.AsyncClient, converted: Callable[[], int], accept: str, width: int
) -> None:
    values = np.arange(width, dtype="<f4")
    parameters = {"binary_data_size": values.nbytes}
    entry = {"shape": [1, values.size], "datatype": "FP32", "parameters": parameters}
    head = json.dumps({"inputs": [{"name": "a", **entry}, {"name": "b", **entry}]}).encode()
    headers = {"accept-encoding": accept, "inference-header-content-length": str(len(head))}
    for _ in range(3):  # the third one is recognised
        answer = await http.post(PAIR, content=head + values.tobytes() * 2, headers=headers)
        assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
        assert answer.headers.get("content-encoding", "identity") == accept
        total, difference = answer.json()["outputs"]
        assert (total["name"], total["datatype"], total["shape"]) == ("sum", "FP32", [1, values.size])
        assert total["data"] == (values * 2).tolist() and set(difference["data"]) == {0.0}
    assert converted() == 3


async def test_small_requests_go_nowhere_else(http: httpx.AsyncClient, converted: Callable[[], int]) -> None:
    assert (await http.post(PAIR, json=pair(4))).status_code == 200
    assert converted() == 0


async def test_text_becomes_bytes_as_in_small_json(http: httpx.AsyncClient, converted: Callable[[], int]) -> None:
    text = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["é", ""]}
    answer = await http.post("/v2/models/echo/infer", content=json.dumps({"inputs": [text]}).encode() + PADDING)
    assert answer.json()["outputs"][0]["data"] == ["é", ""]
    assert converted() == 1


GOOD = json.dumps(pair(2))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        GOOD.replace("[0, 1]", "[0, true]"),
        GOOD.replace("FP32", "INT32"),
        GOOD.replace('"b"', '"c"'),
        GOOD[:-1] + ', "outputs": [{"name": "nothing"}]}',
        GOOD[:-1] + ', "parameters": {"timeout": NaN}}',
    ],
)
async def test_refusals_are_those_of_small_json(http: httpx.AsyncClient, text: str) -> None:
    same = {"x-request-id": "same"}
    small = await http.post(PAIR, content=text.encode(), headers=same)
    large = await http.post(PAIR, content=text.encode() + PADDING, headers=same)
    assert small.status_code == 400
    assert (large.status_code, large.json()) == (400, small.json())
    assert large.headers["x-request-id"] == "same"


async def test_header_beyond_the_limit_is_refused_and_not_sent_round_twice(
    http: httpx.AsyncClient, converted: Callable[[], int]
) -> None:
    body = json.dumps(pair(2, id="i" * (5 << 20))).encode()
    answer = await http.post(PAIR, content=body)
    assert answer.status_code == 400 and "send tensors as binary" in answer.json()["error"]
    assert converted() == 1


async def test_json_part_in_front_of_binary_tensors(http: httpx.AsyncClient) -> None:
    document = pair(2)
    del document["inputs"][1]["data"]
    document["inputs"][1]["parameters"] = {"binary_data_size": 8}
    head = json.dumps(document).encode() + PADDING
    body = head + np.array([5, 7], "<f4").tobytes()
    answer = await http.post(PAIR, content=body, headers={"inference-header-content-length": str(len(head))})
    assert answer.json()["outputs"][0]["data"] == [5.0, 8.0]


async def test_the_child_is_replaced_when_it_dies(
    kept_unit: Unit, http: httpx.AsyncClient, converted: Callable[[], int]
) -> None:
    for _ in range(2):
        assert (await http.post(PAIR, content=GOOD.encode() + PADDING)).status_code == 200
        (pid,) = kept_unit.large_json.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: gone(pid))  # type: ignore[misc]
    assert (await http.post(PAIR, json=pair(4))).status_code == 200
    assert converted() == 2


async def test_passed_deadline_is_said(http: httpx.AsyncClient) -> None:
    answer = await http.post(PAIR, content=GOOD.encode() + PADDING, headers={"x-request-timeout-ms": "1"})
    assert answer.status_code == 504 and answer.json()["reason"] == "deadline_exceeded"


async def test_large_load_request_is_taken_apart_there(tmp_path: Path, settings: Settings) -> None:
    def large(parameters: dict[str, Any]) -> bytes:
        return json.dumps({"parameters": parameters}).encode() + PADDING

    explicit = dataclasses.replace(settings, repositories=(tmp_path,), control_mode="explicit")
    file = base64.b64encode(models.double().SerializeToString()).decode()
    config = '{"backend": "onnxruntime"}'
    load = "/v2/repository/models/sent/load"
    async with open_unit(explicit, sink=ListSink()) as unit:
        async with client_of(unit.http_port) as http:
            parameters: dict[str, Any] = {"file:1/model.onnx": file, "config": config}
            answer = await http.post(load, content=large(parameters))
            assert answer.status_code == 200, answer.text
            assert unit.large_json.converted == 1
            x = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
            answer = await http.post("/v2/models/sent/infer", json={"inputs": [x]})
            assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
            for wrong in ("?", 5, None, ["a"]):
                answer = await http.post(load, content=large({**parameters, "file:1/model.onnx": wrong}))
                assert answer.status_code == 400 and "must be a string of base64" in answer.json()["error"]
            answer = await http.post(load, content=b"{" + PADDING)
            assert answer.status_code == 400 and "not have the form of this request" in answer.json()["error"]


async def test_generate_has_bounds_of_its_own(http: httpx.AsyncClient, converted: Callable[[], int]) -> None:
    for body, words in (
        (b'{"x": [1]}' + PADDING, "bytes, at most"),
        (b'{"x": [' + b"[]," * (1 << 16) + b"1]}", "lists and objects, at most 65536"),
    ):
        answer = await http.post("/v2/models/double/generate", content=body)
        assert answer.status_code == 400 and words in answer.json()["error"]
    assert converted() == 0


async def test_large_bodies_are_joined_off_the_loop(http: httpx.AsyncClient) -> None:
    """Binary, compressed, and without any JSON: the loop only sees the whole."""
    values = np.random.default_rng(7).random((1, 3 << 20), "<f4")
    entry = {"shape": list(values.shape), "datatype": "FP32", "parameters": {"binary_data_size": values.nbytes}}
    document = {"inputs": [{"name": "a", **entry}, {"name": "b", **entry}], "outputs": [{"name": "sum"}]}
    document["parameters"] = {"binary_data_output": True}  # type: ignore[assignment]
    head = json.dumps(document).encode()
    body = head + values.tobytes() * 2
    length = {"inference-header-content-length": str(len(head))}
    for content, headers in (
        (body, {}),
        (gzip.compress(body, 1), {"content-encoding": "gzip"}),
        (gzip.compress(body, 0), {"content-encoding": "gzip"}),
    ):
        answer = await http.post(PAIR, content=content, headers={**length, **headers})
        assert answer.status_code == 200 and answer.content.endswith((values * 2).tobytes())
    answer = await http.post(PAIR, content=b" " * (24 << 20))
    assert answer.status_code == 400 and "the JSON part is not an infer message" in answer.json()["error"]


async def test_client_that_leaves_a_large_body_behind_is_forgotten(kept_unit: Unit, http: httpx.AsyncClient) -> None:
    body = b" " * (24 << 20)
    for _ in range(3):
        _, writer = await asyncio.open_connection("127.0.0.1", kept_unit.http_port)
        writer.write(b"POST %b HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (PAIR.encode(), len(body)))
        writer.write(body)
        await writer.drain()
        writer.transport.abort()
    assert (await http.post(PAIR, json=pair(4))).status_code == 200


# --- its bounds, set small ----------------------------------------------------------------------------------------


class Waits:
    """Collects what `submit` hands over."""

    def __init__(self) -> None:
        self.results: list[Converted | InferenceError] = []
        self.came = asyncio.Event()

    def then(self, result: Converted | InferenceError) -> None:
        self.results.append(result)
        self.came.set()

    async def one(self) -> Converted | InferenceError:
        await asyncio.wait_for(self.came.wait(), 60)
        self.came.clear()
        return self.results.pop(0)


async def test_what_waits_is_bounded_in_number_and_bytes() -> None:
    for bounds in ({"max_waiting": 1}, {"max_waiting_bytes": 2 * len(SMALL) - 1}):
        made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, **bounds)  # type: ignore[arg-type]
        waits = Waits()
        made.submit(Task.REQUEST, [SMALL], None, Waits().then)
        leave = made.submit(Task.REQUEST, [SMALL], None, waits.then)
        with pytest.raises(QueueFull):
            made.submit(Task.REQUEST, [SMALL], None, waits.then)
        leave()  # its place is free at once
        made.submit(Task.REQUEST, [SMALL], None, waits.then)
        (body,), length = await waits.one()  # type: ignore[misc]
        assert decode_request("m", "", body, length).inputs[0].array.tolist() == [1.0, 2.0]
        assert waits.results == [] and made.converted == 2, "a text whose caller has left is not converted"
        await asyncio.to_thread(made.close)


async def test_an_unexpected_error_fails_one_text_and_the_next_is_converted(
    large: LargeJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("unexpected")

    for lane in large._lanes:
        monkeypatch.setattr(lane.helper, "ask", fails)
    with pytest.raises(BackendFailed, match="failed on this JSON"):
        await large.convert(Task.REQUEST, [SMALL])
    monkeypatch.undo()
    assert (await large.convert(Task.REQUEST, [SMALL]))[1] > 0


async def test_single_text_may_be_larger_than_what_may_wait() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, max_waiting_bytes=1)
    assert (await made.convert(Task.REQUEST, [SMALL]))[1] > 0
    await asyncio.to_thread(made.close)


async def test_large_texts_wait_in_the_order_of_tiers_and_tenants(large: LargeJson) -> None:
    order: list[str] = []
    every = asyncio.Event()

    def submit(name: str, band: int, tenant: str) -> None:
        def then(result: Converted | InferenceError) -> None:
            assert isinstance(result, tuple)
            order.append(name)
            if len(order) == 6:
                every.set()

        large.submit(Task.REQUEST, [SMALL], None, then, band=band, tenant=tenant)

    submit("gold1", 0, "gold")  # of the most urgent tier: nothing runs beside it
    for name in ("hog1", "hog2", "hog3"):
        submit(name, 2, "hog")
    submit("quiet", 2, "quiet")
    submit("gold2", 0, "gold")
    await asyncio.wait_for(every.wait(), 60)
    assert order == ["gold1", "gold2", "hog1", "quiet", "hog2", "hog3"]


async def test_a_text_that_is_being_converted_holds_up_none_of_a_more_urgent_tier(large: LargeJson) -> None:
    """One text of 64 MiB took the only child for seconds, and its answer again, whoever waited."""
    begun, waiting, gold, silver = Waits(), Waits(), Waits(), Waits()
    large.submit(Task.REQUEST, [SMALL], None, begun.then, band=2)
    await begun.one()
    (pid,) = large.pids
    os.kill(pid, signal.SIGSTOP)  # a text that takes for ever
    large.submit(Task.REQUEST, [SMALL], None, begun.then, band=2, tenant="hog")
    large.submit(Task.REQUEST, [SMALL], None, waiting.then, band=2, tenant="quiet")
    for _ in range(3):  # a call is two conversions, and a text of the hog that waits begins between none of them
        large.submit(Task.REQUEST, [SMALL], None, gold.then, band=0)
        large.submit(Task.REQUEST, [SMALL], None, silver.then, band=1)
        assert isinstance(await gold.one(), tuple) and isinstance(await silver.one(), tuple)
        assert begun.results == waiting.results == [] and len(large.pids) == 2
    os.kill(pid, signal.SIGCONT)
    assert isinstance(await begun.one(), tuple) and isinstance(await waiting.one(), tuple)


async def test_as_many_texts_of_a_tier_are_converted_at_a_time_as_there_are_cores() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, cores=2)
    begun, waiting, gold = [Waits(), Waits()], Waits(), Waits()
    for waits in begun:
        made.submit(Task.REQUEST, [SMALL], None, waits.then, band=2)
    for waits in begun:
        await waits.one()
    pids = made.pids
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # texts that take for ever
    for waits in (*begun, waiting):
        made.submit(Task.REQUEST, [SMALL], None, waits.then, band=2)
    made.submit(Task.REQUEST, [SMALL], None, gold.then, band=0)
    assert isinstance(await gold.one(), tuple), "a more urgent one waits for none of them"
    assert waiting.results == [] and len(made.pids) == 3
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    for waits in (*begun, waiting):
        assert isinstance(await waits.one(), tuple)
    await asyncio.to_thread(made.close)


async def test_a_tier_has_one_long_text_at_a_time() -> None:
    """Each may need 4 GiB."""
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, cores=2)
    long, short = [Waits(), Waits()], Waits()
    for waits in long:
        made.submit(Task.REQUEST, [SMALL, b" " * (9 << 20)], None, waits.then, band=0)
    for waits in long:
        assert isinstance(await waits.one(), tuple)
    assert len(made.pids) == 1
    made.submit(Task.REQUEST, [SMALL, b" " * (9 << 20)], None, long[0].then, band=0)
    made.submit(Task.REQUEST, [SMALL], None, short.then, band=0)
    assert isinstance(await long[0].one(), tuple) and isinstance(await short.one(), tuple)
    assert len(made.pids) == 2
    await asyncio.to_thread(made.close)


async def test_a_text_waits_behind_no_long_one_that_waits_for_another_long_one() -> None:
    """A lane stayed free meanwhile, and texts of later callers, less urgent ones too, went ahead."""
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, cores=2)
    long, short = [Waits(), Waits()], [Waits(), Waits()]
    for waits in short:
        made.submit(Task.REQUEST, [SMALL], None, waits.then)
    for waits in short:
        await waits.one()
    pids = made.pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)  # texts that take for ever
    for first, second in zip(long, short, strict=True):
        made.submit(Task.REQUEST, [SMALL, b" " * (9 << 20)], None, first.then)
        made.submit(Task.REQUEST, [SMALL], None, second.then)
    os.kill(pids[1], signal.SIGCONT)
    for waits in short:
        assert isinstance(await waits.one(), tuple)
    assert long[0].results == long[1].results == [] and made.pids == pids
    os.kill(pids[0], signal.SIGCONT)
    for waits in long:
        assert isinstance(await waits.one(), tuple)
    await asyncio.to_thread(made.close)


async def test_a_long_text_of_a_lower_tier_prepares_the_process_for_a_more_urgent_one(large: LargeJson) -> None:
    """The first urgent text waited for the start of an interpreter."""
    for band, count in ((0, 1), (2, 2)):
        waits = Waits()
        large.submit(Task.REQUEST, [SMALL, b" " * (9 << 20)], None, waits.then, band=band)
        assert isinstance(await waits.one(), tuple)
        await until(lambda count=count: len(large.pids) == count)  # type: ignore[misc]
        assert large.converted == count


async def test_a_tenant_that_fills_what_may_wait_makes_room_for_others() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, max_waiting=3)
    hog = [Waits() for _ in range(4)]
    for each in hog:
        made.submit(Task.REQUEST, [SMALL], None, each.then, band=2, tenant="hog")
    quiet, begun, gold = Waits(), Waits(), Waits()
    with pytest.raises(QueueFull):
        made.submit(Task.REQUEST, [SMALL], None, quiet.then, band=2, tenant="hog")
    made.submit(Task.REQUEST, [SMALL], None, quiet.then, band=2, tenant="quiet")
    made.submit(Task.REQUEST, [SMALL], None, begun.then, band=0, tenant="gold")  # beside the first of the hog
    made.submit(Task.REQUEST, [SMALL], None, gold.then, band=0, tenant="gold")
    assert isinstance(hog[3].results[0], QueueFull) and isinstance(hog[2].results[0], QueueFull)
    assert isinstance(await quiet.one(), tuple) and isinstance(await gold.one(), tuple)
    await asyncio.to_thread(made.close)


async def test_a_text_that_is_late_when_its_turn_comes_is_not_converted() -> None:
    clock = LateTimers(asyncio.get_running_loop())
    made = LargeJson(clock, 64 << 20)
    first, late, last = Waits(), Waits(), Waits()
    made.submit(Task.REQUEST, [SMALL], None, first.then)
    made.submit(Task.REQUEST, [SMALL], None, late.then, deadline=clock.now() + 1e-6)
    made.submit(Task.REQUEST, [SMALL], None, last.then)
    assert isinstance(await last.one(), tuple) and isinstance(await late.one(), DeadlineExceeded)
    assert made.converted == 2
    await asyncio.to_thread(made.close)


class LateTimers(LoopClock):
    """A loop so busy that no timer fires."""

    def call_at(self, when_s: float, callback: Callable[[], None]) -> Timer:
        return super().call_at(when_s + 1e6, callback)


async def test_memory_of_the_child_is_bounded(cold_children: None) -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, memory_bytes=640 << 20)
    body = b'{"inputs":[{"name":"a","shape":[%d],"datatype":"FP32","data":[0%b]}]}' % (
        16 << 20,
        b",0" * ((16 << 20) - 1),
    )
    with pytest.raises(RequestTooLarge, match="too much memory"):
        await made.convert(Task.REQUEST, [body])
    pids = made.pids
    assert (await made.convert(Task.REQUEST, [SMALL]))[1] > 0
    assert made.pids == pids  # it went on
    await asyncio.to_thread(made.close)


async def test_the_child_keeps_its_heap_between_texts(large: LargeJson) -> None:
    """A text of 1 MB cost 2,033 page faults, a third of the time of the child."""
    width = 150_000
    body = b'{"inputs":[{"name":"a","shape":[%d],"datatype":"FP32","data":[0%b]}]}' % (width, b",0.125" * (width - 1))
    for _ in range(3):
        await large.convert(Task.REQUEST, [body])
    (pid,) = large.pids
    before = page_faults(pid)
    for _ in range(5):
        await large.convert(Task.REQUEST, [body])
    assert page_faults(pid) - before < 5 * 200


def page_faults(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[7])


async def test_binary_form_of_a_request_is_bounded_as_bodies_are() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 100)
    body = b'{"inputs":[{"name":"a","shape":[20],"datatype":"FP32","data":[%b]}]}' % b",".join([b"0"] * 20)
    with pytest.raises(RequestTooLarge, match="bytes as binary data, at most 100 are accepted"):
        await made.convert(Task.REQUEST, [body])
    await asyncio.to_thread(made.close)


async def test_time_of_one_text_is_bounded() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, timeout_s=0.0)
    with pytest.raises(RequestTooLarge, match="took more than 0 s"):
        await made.convert(Task.REQUEST, [SMALL])
    assert made.pids == []
    await asyncio.to_thread(made.close)


async def test_child_that_dies_at_work_fails_that_text_only(large: LargeJson) -> None:
    await large.convert(Task.REQUEST, [SMALL])
    (pid,) = large.pids
    os.kill(pid, signal.SIGSTOP)
    waits = Waits()
    large.submit(Task.REQUEST, [SMALL], None, waits.then)
    os.kill(pid, signal.SIGKILL)
    result = await waits.one()
    assert isinstance(result, BackendFailed | tuple)  # a tuple if the thread had not begun: then another child did it
    assert (await large.convert(Task.REQUEST, [SMALL]))[1] > 0


async def test_deadline_counts_while_waiting(large: LargeJson) -> None:
    waits = Waits()
    large.submit(Task.REQUEST, [SMALL], None, waits.then, deadline=0.0)
    result = await waits.one()
    assert isinstance(result, DeadlineExceeded) and result.stage == "json"


async def test_idle_child_ends() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20, idle_s=0.0)
    await made.convert(Task.REQUEST, [SMALL])
    while made.pids:
        await asyncio.sleep(0)
    await made.convert(Task.REQUEST, [SMALL])
    await asyncio.to_thread(made.close)


async def test_nothing_is_taken_once_it_is_closed() -> None:
    made = LargeJson(LoopClock(asyncio.get_running_loop()), 64 << 20)
    await made.convert(Task.REQUEST, [SMALL])
    (pid,) = made.pids
    await asyncio.to_thread(made.close)
    assert made.pids == [] and not Path(f"/proc/{pid}").exists()
    with pytest.raises(ServerStopping):
        made.submit(Task.REQUEST, [SMALL], None, lambda result: None)
