"""The access log: one JSON line per request, whatever becomes of it, and never in a request's way."""

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import pytest
from fake_backend import FakeBackend
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from oriel_inference.app import Unit, open_unit
from oriel_inference.errors import Outcome
from oriel_inference.model import TensorInfo
from oriel_inference.servers import access_log
from oriel_inference.servers.access_log import AccessLog
from oriel_inference.settings import Settings
from oriel_wire.context import read_headers
from oriel_wire.errors import StartFailed
from oriel_wire.observe.line_log import json_line
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until
from .clients import client_of
from .conftest import settings_of
from .exposed import read
from .gated import gated
from .grpc_calls import infer, ones
from .streams import said, stream
from .thread_unit import unit_in_thread

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"
IDENTITY = {
    "x-request-id": "find-me",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
    "x-oriel-tier": "gold",
    "x-oriel-tenant": "acme",
}
FIELDS = [
    *(
        "level",
        "message",
        "time",
        "trace_id",
        "request_id",
        "model",
        "version",
        "tier",
        "tenant",
        "protocol",
        "status",
        "reason",
        "rows",
    ),
    *("queue_ms", "compute_ms", "duration_ms", "bytes"),
]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "access.json"


@pytest.fixture(scope="module")
def logged(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Unit, Path]]:
    path = tmp_path_factory.mktemp("log") / "access.json"
    with unit_in_thread(dataclasses.replace(settings_of(repository), access_log=str(path))) as running:
        yield running, path


class Tail:
    """The lines that a test adds to the log of the server that all of them use."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._before = len(path.read_text().splitlines())

    async def lines(self, count: int) -> list[dict[str, Any]]:
        def found() -> list[str]:
            return self._path.read_text().splitlines()[self._before :]

        await until(lambda: len(found()) >= count)
        assert len(found()) == count
        return [json.loads(line) for line in found()]


@pytest.fixture
def unit(logged: tuple[Unit, Path]) -> Unit:
    return logged[0]


@pytest.fixture
def tail(logged: tuple[Unit, Path]) -> Tail:
    return Tail(logged[1])


async def lines(unit: Unit, log: Path | None = None) -> list[dict[str, Any]]:
    """Everything so far; ends the log."""
    writer = unit.surface.meter.log
    assert writer is not None
    await asyncio.to_thread(unit.surface.meter.close)
    await until(lambda: not writer._thread.is_alive())
    return [json.loads(line) for line in log.read_text().splitlines()] if log is not None else []


async def test_line_of_an_answer(http: httpx.AsyncClient, logged: tuple[Unit, Path], tail: Tail) -> None:
    before = datetime.now(UTC)
    answer = await http.post(INFER, json=ONES, headers={**IDENTITY, "authorization": "Bearer secret"})
    (line,) = await tail.lines(1)
    assert list(line) == FIELDS
    assert line["request_id"] == "find-me" and line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert (line["model"], line["version"], line["tier"], line["tenant"]) == ("double", "1", "gold", "acme")
    assert (line["protocol"], line["status"], line["reason"], line["rows"]) == ("http", 200, "ok", 1)
    assert line["bytes"] == len(answer.request.content)
    assert 0 <= line["queue_ms"] <= line["duration_ms"] and 0 <= line["compute_ms"] <= line["duration_ms"]
    assert before - timedelta(seconds=1) <= datetime.fromisoformat(line["time"]) <= datetime.now(UTC)
    text = logged[1].read_text()
    assert "secret" not in text and "Bearer" not in text


async def test_every_way_to_end_has_its_line(http: httpx.AsyncClient, tail: Tail) -> None:
    bad = {"inputs": [{"name": "index", "shape": [1, 1], "datatype": "INT64", "data": [9]}]}
    expected = []
    for path, body, headers, outcome in (
        (INFER, {"inputs": []}, {}, Outcome.INVALID_REQUEST),
        (INFER, ONES, {"x-oriel-timeout-ms": "0"}, Outcome.DEADLINE_EXCEEDED),
        ("/v2/models/lookup/infer", bad, {}, Outcome.INVALID_REQUEST),
        ("/v2/models/absent/infer", ONES, {}, Outcome.UNKNOWN_MODEL),
        ("/v2/models/broken/infer", ONES, {}, Outcome.NO_AVAILABLE_VERSION),
        (INFER, ONES, {"content-encoding": "br"}, Outcome.NOT_SUPPORTED),
        ("/v2/models/double/generate", {"x": [1, 2, 3, 4]}, {}, Outcome.OK),
        ("/nowhere", ONES, {}, Outcome.NOT_FOUND),
    ):
        answer = await http.post(path, json=body, headers={"x-request-id": f"r{len(expected)}", **headers})
        expected.append((answer.headers["x-request-id"], answer.status_code, outcome.value))
    found = [(line["request_id"], line["status"], line["reason"]) for line in await tail.lines(8)]
    assert found == expected


async def test_grpc_and_stream_messages_have_lines_with_their_codes(unit: Unit, tail: Tail) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        await infer(channel)(ones(), metadata=tuple(IDENTITY.items()))
        with pytest.raises(grpc.aio.AioRpcError):
            await infer(channel)(ones("absent"))
        await said(stream(channel, request_iterator=[ones(), ones("absent")]))
    found = [(each["protocol"], each["model"], each["status"], each["reason"]) for each in await tail.lines(4)]
    assert sorted(found) == [
        ("grpc", "absent", 5, "unknown_model"),
        ("grpc", "double", 0, "ok"),
        ("grpc_stream", "absent", 5, "unknown_model"),
        ("grpc_stream", "double", 0, "ok"),
    ]


async def test_grpc_message_that_is_refused_before_it_has_a_model_is_counted_and_named(unit: Unit, tail: Tail) -> None:
    """What is no message has no name; a name is known as soon as it can be read."""
    before, none, few = await read(unit), b"\xff\xff\xff", ones()
    few.raw_input_contents[0] = b"\0" * 15
    many = ones()
    for number in range(1025):
        many.parameters[f"p{number}"].bool_param = True
    known = ones()
    known.ClearField("id")
    wrong = v2_pb2.ModelInferRequest.FromString(known.SerializeToString())
    wrong.raw_input_contents[0] = b"\0" * 15
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        for data in (none, few.SerializeToString(), many.SerializeToString()):
            with pytest.raises(grpc.aio.AioRpcError):
                await call(data)
        await call(known.SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError):
            await call(wrong.SerializeToString())
    found = [(each["model"], each["status"], each["reason"]) for each in await tail.lines(5)]
    assert found == [
        ("", 3, "invalid_request"),
        ("double", 3, "invalid_request"),
        ("double", 3, "invalid_request"),
        ("double", 0, "ok"),
        ("double", 3, "invalid_request"),
    ]
    counted = await read(unit)
    for model, times in (("", 1), ("double", 3)):
        labels = {"model": model, "version": "", "tier": "", "reason": "invalid_request"}
        (value,) = counted.where("oriel_requests_total", **labels).values()
        assert value - sum(before.where("oriel_requests_total", **labels).values()) == times


async def test_caller_that_leaves_has_its_line(tmp_path: Path, log: Path) -> None:
    info = TensorInfo(name="x", datatype="FP32", shape=(-1, 4))
    fake = FakeBackend((info,), (dataclasses.replace(info, name="y"),))
    async with gated(tmp_path, fake, access_log=str(log)) as (unit, client):
        batcher = unit.catalog.get("double").batcher
        for number in (1, 2):  # a request that is decoded, then one that is recognised
            gone = asyncio.create_task(client.post(INFER, json=ONES))
            await asyncio.to_thread(fake.gate.wait_for_runs, 1)
            gone.cancel()
            await until(lambda number=number: batcher.statistics.failures[Outcome.CALLER_LEFT] == number)
            fake.gate.step()
            await until(lambda: not batcher.running)
            answered = asyncio.create_task(client.post(INFER, json=ONES))
            fake.gate.step()
            assert (await answered).status_code == 200
        reasons = [(line["reason"], line["compute_ms"] is None) for line in await lines(unit, log)]
    assert reasons == [("caller_left", True), ("ok", False)] * 2


async def test_surprises_and_bodies_that_do_not_unpack_have_their_lines(
    unit: Unit, http: httpx.AsyncClient, tail: Tail, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = await http.post(INFER, content=b"junk", headers={"content-encoding": "gzip", "x-request-id": "r0"})
    assert packed.status_code == 400

    def surprise(*_: Any, **__: Any) -> None:
        raise RuntimeError("surprise")

    monkeypatch.setattr(unit.surface.dataplane, "now", surprise)
    assert (await http.post(INFER, json=ONES, headers={"x-request-id": "r1"})).status_code == 500
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await infer(channel)(ones())
        await said(stream(channel, request_iterator=[ones()]))
    found = [(line["protocol"], line["status"], line["reason"]) for line in await tail.lines(4)]
    assert found == [
        ("http", 400, "invalid_request"),
        ("http", 500, "backend_failed"),
        ("grpc", 13, "backend_failed"),
        ("grpc_stream", 13, "backend_failed"),
    ]


async def test_name_from_outside_forges_no_line(unit: Unit, tail: Tail) -> None:
    name = 'x"}\n{"reason":"ok"}\u2028\x00' + "y" * 500
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await infer(channel)(ones(name))
    (line,) = await tail.lines(1)
    assert line["model"] == name[:128] and line["reason"] == "unknown_model"


async def test_broken_framing_has_its_line(unit: Unit, tail: Tail) -> None:
    labels = {"model": "", "version": "", "tier": "", "reason": "invalid_request"}
    before = sum((await read(unit)).where("oriel_requests_total", **labels).values())
    reader, writer = await asyncio.open_connection("127.0.0.1", unit.http_port)
    writer.write(b"POST /v2 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: junk\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 400")
    writer.close()
    (line,) = await tail.lines(1)
    assert (line["status"], line["reason"], line["duration_ms"]) == (400, "invalid_request", None)
    assert (await read(unit)).value("oriel_requests_total", **labels) == before + 1


async def test_a_server_writes_to_standard_output(settings: Settings, capfd: pytest.CaptureFixture[str]) -> None:
    async with open_unit(dataclasses.replace(settings, access_log="-"), sink=ListSink()) as unit:
        async with client_of(unit.http_port) as client:
            await client.post("/v2/models/none/infer")
        await lines(unit)
    (line,) = capfd.readouterr().out.splitlines()
    assert json.loads(line)["reason"] == "unknown_model"


# --- the log by itself --------------------------------------------------------------------------------------------


CTX = read_headers({}.get, trusted=False).at(0.0, 1.0)


def note(log: AccessLog, number: int) -> None:
    log.refused(replace(CTX, request_id=f"r{number}"), Outcome.INVALID_REQUEST, "m", 0.0, "http", 7)


@given(st.text(), st.sampled_from(list(Outcome)))
def test_every_line_is_one_json_object_in_ascii(model: str, outcome: Outcome) -> None:
    note = access_log._of_call(CTX, model[: access_log.MAX_NAME], "grpc", outcome), 5.0
    (text,) = json_line(access_log._dated(note, 1e9)).decode("ascii").splitlines()
    line = json.loads(text)
    assert list(line) == FIELDS[2:]
    assert line["model"] == model[:128] and line["reason"] == outcome.value
    assert line["compute_ms"] is None and line["time"] == "2001-09-09T01:46:45.000+00:00"


def test_what_does_not_fit_into_the_queue_is_counted_and_lost(log: Path) -> None:
    writer = AccessLog(str(log), max_queued=3, delay_s=60.0)
    for number in range(5):
        note(writer, number)
    assert writer.dropped == 2
    writer.close()
    assert [json.loads(line)["request_id"] for line in log.read_text().splitlines()] == ["r0", "r1", "r2"]


def test_file_may_be_renamed_at_any_time(log: Path) -> None:
    writer = AccessLog(str(log), delay_s=60.0)
    note(writer, 0)
    writer._flush()
    log.rename(log.with_suffix(".old"))
    note(writer, 1)
    writer.close()
    assert json.loads(log.with_suffix(".old").read_text())["request_id"] == "r0"
    assert json.loads(log.read_text())["request_id"] == "r1"


def test_file_that_cannot_be_written_costs_lines_and_nothing_else(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AccessLog(str(log), delay_s=60.0)
    note(writer, 0)
    monkeypatch.setattr(writer, "_path", str(log / "no folder"))
    writer._flush()
    note(writer, 1)
    writer._flush()
    assert writer.dropped == 2 and len(caplog.records) == 1, "said once a minute"
    monkeypatch.undo()
    note(writer, 2)
    writer.close()
    assert json.loads(log.read_text())["request_id"] == "r2"


def test_reader_that_is_stuck_holds_up_only_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, stuck = threading.Event(), threading.Event()
    writer = AccessLog(str(tmp_path / "log"), max_queued=2, delay_s=0.0, close_s=0.05)

    def append(data: bytes) -> None:
        entered.set()
        stuck.wait(120)

    monkeypatch.setattr(writer, "_append", append)
    note(writer, 0)
    assert entered.wait(120)
    for number in range(5):
        note(writer, number)
    assert writer.dropped == 3
    writer.close()
    stuck.set()


@pytest.mark.parametrize("path", ["nowhere/log", "."])
def test_log_that_cannot_be_opened_stops_the_start(tmp_path: Path, path: str) -> None:
    with pytest.raises(StartFailed, match="--access-log: .* cannot be written"):
        AccessLog(str(tmp_path / path))
