"""Logging settings over both protocols, and what they do to the log."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit, open_unit
from oriel_inference.errors import InvalidRequest, NotSupported
from oriel_inference.log_settings import LogSettings
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2

from . import models

LOG = "/v2/logging"
PIPE = """
platform: "ensemble" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } ]
ensemble_scheduling { step [ { model_name: "double" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } ] }
"""


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def say() -> None:
    log = logging.getLogger("oriel_inference.somewhere")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        log.log(level, logging.getLevelName(level))


def test_settings_choose_lines_and_leave_no_trace(lines: Lines) -> None:
    settings = LogSettings()
    for change, expected in (
        ({}, ["INFO", "WARNING", "ERROR"]),
        ({"log_info": False}, ["WARNING", "ERROR"]),
        ({"log_warning": False, "log_info": True}, ["INFO", "ERROR"]),
        ({"log_error": False, "log_info": False}, []),
        ({"log_verbose_level": 2}, ["DEBUG"]),
        ({"log_verbose_level": 0, "log_error": True}, ["ERROR"]),
    ):
        lines.found.clear()
        settings.change(change)
        say()
        assert lines.found == expected, change
    settings.close()
    lines.found.clear()
    say()
    assert lines.found == ["INFO", "WARNING", "ERROR"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"log_info": 1},
        {"log_verbose_level": -1},
        {"log_verbose_level": True},
        {"log_verbose_level": 2**40},
        {"log_format": "xml"},
        {"log_format": []},
        {"log_error": None},
        {"nothing": True},
    ],
)
def test_wrong_settings_change_nothing(wrong: dict[str, object]) -> None:
    settings = LogSettings()
    before = settings.shown()
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        settings.change({"log_info": not before["log_info"], **wrong})
    with pytest.raises(NotSupported, match="--log-file"):
        settings.change({"log_file": "/tmp/x"})
    assert settings.shown() == before
    settings.close()


async def test_over_http(http: httpx.AsyncClient) -> None:
    before = (await http.get(LOG)).json()
    assert set(before) == {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}
    answer = await http.post(LOG, json={"log_verbose_level": 3, "log_format": "ISO8601"})
    assert answer.status_code == 200 and answer.json() == {**before, "log_verbose_level": 3, "log_format": "ISO8601"}
    assert (await http.post(LOG, content=b"")).json() == answer.json() == (await http.get(LOG)).json()
    for body, status in ((b"[]", 400), (b"{", 400), (b'{"log_info":"yes"}', 400), (b'{"log_file":"x"}', 501)):
        refused = await http.post(LOG, content=body)
        assert refused.status_code == status and refused.json()["error"]
    assert (await http.delete(LOG)).status_code == 405


def with_tritonclients(unit: Unit) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{unit.http_port}") as client:
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
        assert client.get_log_settings()["log_error"] is True
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        assert client.get_log_settings().settings["log_verbose_level"].uint32_param == 1
        changed = client.update_log_settings({"log_verbose_level": 0, "log_info": False, "log_format": "default"})
        assert changed.settings["log_info"].bool_param is False
        assert changed.settings["log_format"].string_param == "default"
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            client.update_log_settings({"log_file": "x"})


async def test_tritonclients(unit: Unit) -> None:
    await asyncio.to_thread(with_tritonclients, unit)
    assert unit.surface.log.shown()["log_info"] is False


async def test_setting_without_a_value_is_refused(kept_unit: Unit) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{kept_unit.grpc_port}") as channel:
        call = channel.unary_unary(f"/{SERVICE}/LogSettings", v2_pb2.LogSettingsRequest.SerializeToString)
        request = v2_pb2.LogSettingsRequest()
        request.settings["log_info"].SetInParent()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(request)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_verbose_lines_follow_a_request_and_stop_when_switched_off(
    lines: Lines, unit: Unit, http: httpx.AsyncClient
) -> None:
    """They are switched at run time, as Triton's are; a text from outside forges no line."""
    body = {"id": "mine\nforged", "inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}

    async def infer(name: str, path: str = "/v2/models/double/infer") -> list[str]:
        lines.found.clear()
        await http.post(path, json=body, headers={"x-request-id": name, "x-request-timeout-ms": "5000"})
        return [line for line in lines.found if name in line]

    assert await infer("quiet") == []
    await http.post(LOG, json={"log_verbose_level": 1})
    for name in ("first", "known-text"):
        received, queued, batched, executed, answered = await infer(name)
        assert f"request {name}: received over http" in received and "5000.0 ms left" in received
        assert "for model double version 1, 1 rows" in queued and "mine" in queued and "\n" not in queued
        assert "model double version 1: batch of 1 requests, 1 rows" in batched
        assert "model double version 1: executed 1 rows" in executed and "1 of 1 wait" in executed
        assert f"request {name}: answered by model double version 1" in answered
    assert "refused by its head with status 404" in (await infer("lost", "/v2/models/absent/infer"))[0]
    body["inputs"] = []
    assert "invalid" in (await infer("wrong"))[-1]
    await http.post(LOG, json={"log_verbose_level": 0})
    assert await infer("quiet-again") == []


async def test_steps_of_an_ensemble_say_whose_they_are(lines: Lines, tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    models.put(tmp_path, "pipe", None, PIPE)
    settings = Settings(
        repositories=(tmp_path,), http_port=0, grpc_port=None, metrics_port=None, log={"log_verbose_level": 1}
    )
    async with open_unit(settings, sink=ListSink()) as unit:
        base = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            given = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
            await client.post("/v2/models/pipe/infer", json={"inputs": [given]}, headers={"x-request-id": "whose"})
    assert [line for line in lines.found if "model double version 1: executed" in line and "whose" in line]


async def test_a_server_that_cannot_start_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    settings = Settings(repositories=(tmp_path,), access_log=str(tmp_path / "absent" / "log"))
    before = [list(handler.filters) for handler in logging.getLogger().handlers]
    with pytest.raises(StartFailed):
        async with open_unit(settings, sink=ListSink()):
            raise AssertionError("it started")
    assert [list(handler.filters) for handler in logging.getLogger().handlers] == before
