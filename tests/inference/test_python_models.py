"""Python models in processes of their own: what they are given, what they may answer, and how they may fail."""

import asyncio
import base64
import json
import logging
import math
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tritonclient.grpc.aio
import tritonclient.http.aio

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.catalog import UNTRIED
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models
from .python_calls import BEHAVE, HANGS, IMPATIENT, SOURCES, ask, put, say

ADD_SUB = """
backend: "python" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
instance_group [ { count: 2 kind: KIND_CPU } ]
"""
AROUND = """
platform: "ensemble" max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "behave" model_version: -1
  input_map { key: "text" value: "text" } output_map { key: "said" value: "said" } } ] }
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("python-models")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit(root: Path) -> AsyncIterator[Unit]:
    put(root, "behave", "behave", BEHAVE)
    put(root, "impatient", "behave", IMPATIENT)
    put(root, "add_sub", "add_sub", ADD_SUB)
    models.put(root, "double", models.double(), models.DOUBLE)
    models.put(root, "around", None, AROUND)
    settings = Settings(
        repositories=(root,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        cores=2,
        drain_s=5.0,
        control_mode="explicit",
        load_models=("behave", "impatient", "add_sub", "double", "around"),
    )
    async with open_unit(settings, sink=ListSink()) as running:
        assert not [entry for entry in running.catalog.index() if entry.reason not in ("", UNTRIED)]
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    base = f"http://127.0.0.1:{unit.http_port}/v2"
    async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
        yield client


async def test_a_model_in_the_documented_style_answers_both_protocols(cold_children: None, unit: Unit) -> None:
    one, two = np.arange(4, dtype=np.float32)[None], np.ones((1, 4), np.float32)
    for kind, port in ((tritonclient.http.aio, unit.http_port), (tritonclient.grpc.aio, unit.grpc_port)):
        async with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
            inputs = [kind.InferInput(name, [1, 4], "FP32") for name in ("INPUT0", "INPUT1")]
            inputs[0].set_data_from_numpy(one)
            inputs[1].set_data_from_numpy(two)
            result = await client.infer("add_sub", inputs, outputs=[kind.InferRequestedOutput("OUTPUT1")])
            assert result.as_numpy("OUTPUT1").tolist() == [[-1.0, 0.0, 1.0, 2.0]]
            assert result.as_numpy("OUTPUT0") is None
            result = await client.infer("add_sub", inputs)
            assert result.as_numpy("OUTPUT0").tolist() == [[1.0, 2.0, 3.0, 4.0]]


async def test_metadata_and_configuration_name_the_backend(http: httpx.AsyncClient) -> None:
    assert (await http.get("/models/add_sub")).json()["platform"] == "python"
    config = (await http.get("/models/add_sub/config")).json()
    assert config["backend"] == "python"
    assert config["instance_group"][0]["name"] == "add_sub_0" and "version_policy" in config


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux says it")
async def test_statistics_say_what_the_processes_occupy(http: httpx.AsyncClient, unit: Unit) -> None:
    """Both instances of add_sub; of a model inside the server nobody knows it."""

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    (stats,) = (await http.get("/models/add_sub/stats")).json()["model_stats"]
    (found,) = stats["memory_usage"]
    assert found["type"] == "CPU"
    sessions = unit.catalog.get("add_sub").sessions
    assert len(sessions) == 2 and all(isinstance(session, PythonSession) for session in sessions)
    known = sum(resident(session.pid) for session in sessions if isinstance(session, PythonSession) and session.pid)
    assert abs(int(found["byte_size"]) - known) < known / 4
    (stats,) = (await http.get("/models/double/stats")).json()["model_stats"]
    assert not stats["memory_usage"]


async def test_what_a_model_has_loaded_is_not_walked_again_and_again(http: httpx.AsyncClient) -> None:
    assert await say(http, "walked") == "0"


async def test_a_request_carries_what_its_client_said(http: httpx.AsyncClient, root: Path) -> None:
    parameters = {"mood": "good", "level": 3, "sequence_id": 7, "sequence_start": True, "timeout": 9_000_000}
    answer = await ask(http, "about", id="r-1", parameters=parameters, outputs=[{"name": "said"}])
    found = json.loads(answer.json()["outputs"][0]["data"][0])
    assert answer.json()["parameters"] == {"kept": True, "how": "well"}
    folder = found.pop("folder")
    assert Path(folder) == root / "behave/1"
    assert found == {
        "id": "r-1",
        "parameters": {"mood": "good", "level": 3},
        "outputs": ["said"],
        "correlation": 7,
        "flags": 1,
        "timeout": 9_000_000,
        "model": "behave",
        "version": 1,
        "args": {
            "model_instance_kind": "CPU",
            "model_instance_name": "behave_0_0",
            "model_instance_device_id": "0",
            "model_repository": str(root / "behave"),
            "model_version": "1",
            "model_name": "behave",
        },
    }


async def test_a_request_carries_the_context_of_its_trace(http: httpx.AsyncClient) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    answer = await ask(http, "trace", headers={"traceparent": f"00-{trace}-00f067aa0ba902b7-01"})
    context = json.loads(answer.json()["outputs"][0]["data"][0])
    assert re.fullmatch(f"00-{trace}-[0-9a-f]{{16}}-0[0-3]", context["traceparent"])


async def test_execute_gets_the_requests_of_a_batch_one_by_one(http: httpx.AsyncClient) -> None:
    sizes = await asyncio.gather(*(say(http, "size") for _ in range(9)))
    assert max(map(int, sizes)) > 1


async def test_an_error_of_one_request_is_its_own(http: httpx.AsyncClient) -> None:
    words = ["size", "error NOT_FOUND", "size", "none"]
    answers = await asyncio.gather(*(ask(http, word) for word in [*words, *words]))
    assert [answer.status_code for answer in answers] == [200, 404, 200, 500] * 2
    said = answers[1].json()
    assert said.pop("request_id") == answers[1].headers["x-request-id"]
    assert said == {"error": "it is NOT_FOUND", "reason": "model_says_not_found"}
    assert "for this one it returned None" in answers[3].json()["error"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("UNKNOWN", 400), ("INTERNAL", 500), ("INVALID_ARG", 400), ("UNAVAILABLE", 503), ("UNSUPPORTED", 501),
     ("ALREADY_EXISTS", 400), ("CANCELLED", 400)],
)  # fmt: skip
async def test_error_codes_are_those_of_the_protocol(http: httpx.AsyncClient, code: str, status: int) -> None:
    answer = await ask(http, f"error {code}")
    assert (answer.status_code, answer.json()["error"]) == (status, f"it is {code}")


@pytest.mark.parametrize("parameters", [{"n": 2**64}, {"n": -(2**63) - 1}, {"s": "x" * 70_000}, {"x" * 70_000: 1}])
async def test_parameters_that_do_not_fit_fail_nobody_else(http: httpx.AsyncClient, parameters: dict[str, Any]) -> None:
    answers = await asyncio.gather(ask(http, "size"), ask(http, "size", parameters=parameters), ask(http, "size"))
    assert [answer.status_code for answer in answers] == [200, 400, 200]
    assert len(answers[1].json()["error"]) <= 500


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("complain the cat is out", "the cat is out"),
        ("raise the dog", "the model failed: the server's log says why"),
        ("short", "execute returned 0 responses for 1 requests"),
        ("missing TRITONSERVER_TELEPORT", "pb_utils.TRITONSERVER_TELEPORT is not supported by this server"),
    ],
)
async def test_what_a_model_does_wrong_is_said(http: httpx.AsyncClient, text: str, error: str) -> None:
    answer = await ask(http, text)
    assert answer.status_code == 500 and answer.json()["reason"] == "backend_failed"
    assert answer.json()["error"].startswith(error)
    assert "the dog" not in answer.text, "the text of an error that is not meant for clients may hold secrets"


async def test_outputs_may_be_left_out_and_senders_used(http: httpx.AsyncClient) -> None:
    assert (await ask(http, "nothing")).json().get("outputs", []) == []
    assert await say(http, "sender") == "sent"


async def test_text_keeps_its_bytes(unit: Unit) -> None:
    client_kind = tritonclient.grpc.aio
    async with client_kind.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        given = client_kind.InferInput("text", [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([["grüße 🐦".encode()]], dtype=np.object_))
        result = await client.infer("behave", [given])
        assert result.as_numpy("said")[0, 0].decode() == "grüße 🐦"


async def test_the_remaining_time_is_visible(http: httpx.AsyncClient) -> None:
    answer = await ask(http, "remaining", headers={"x-oriel-timeout-ms": "60000"})
    assert 0.0 < float(answer.json()["outputs"][0]["data"][0]) <= 60.0


async def test_a_passed_deadline_is_seen_in_execute(http: httpx.AsyncClient) -> None:
    answer = await ask(http, "left", headers={"x-oriel-timeout-ms": "1500"})
    assert (answer.status_code, answer.json()["reason"]) == (504, "deadline_exceeded")
    seen = ""
    async with asyncio.timeout(60):
        while not seen:
            seen = await say(http, "seen")
    assert float(seen.split()[1]) <= 0.0


async def test_a_caller_that_leaves_is_seen_in_execute(http: httpx.AsyncClient, unit: Unit) -> None:
    before = await say(http, "seen")
    batcher = unit.catalog.get("behave").batcher
    task = asyncio.create_task(ask(http, "left"))
    await until(lambda: batcher.running)
    task.cancel()
    seen = before
    async with asyncio.timeout(60):
        while seen == before:
            seen = await say(http, "seen")
    assert float(seen.split()[1]) > 1.0


@pytest.mark.parametrize(("text", "how"), [("exit 3", "exit code 3"), ("segv", "signal 11")])
async def test_a_crash_fails_its_calls_and_the_model_comes_back(
    http: httpx.AsyncClient, unit: Unit, text: str, how: str
) -> None:
    before = await say(http, "pid")
    answer = await ask(http, text)
    assert answer.status_code == 500 and answer.json()["reason"] == "backend_failed"
    assert f"the process of model 'behave' died ({how})" in answer.json()["error"]
    ready = (await http.get("/models/behave/ready")).status_code
    assert ready == 200 and (await http.post("/models/double/infer", json=double())).status_code == 200
    assert await say(http, "pid") != before


def double() -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}]}


async def test_a_process_killed_while_idle_comes_back(http: httpx.AsyncClient) -> None:
    before = await say(http, "pid")
    os.kill(int(before), signal.SIGKILL)
    for _ in range(3):
        answer = await ask(http, "pid")
        if answer.status_code == 200:
            break
    assert answer.json()["outputs"][0]["data"][0] != before


async def test_a_batch_nobody_waits_for_is_killed_if_it_goes_on(http: httpx.AsyncClient) -> None:
    before = await say(http, "pid", "impatient")
    answer = await ask(http, "hang", {"x-oriel-timeout-ms": "1500"}, "impatient")
    assert answer.status_code == 504
    assert await say(http, "pid", "impatient") != before
    with pytest.raises(ProcessLookupError):
        os.kill(int(before), 0)


async def test_output_and_log_lines_carry_the_models_name(
    http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="oriel_inference"):
        await http.post("/logging", json={"log_info": True})
        await say(http, "log the weather")
        await until(lambda: "printed the weather" in caplog.text)
    lines = {record.getMessage(): record.levelname for record in caplog.records}
    assert lines["model behave: the weather"] == "WARNING"
    assert lines["model behave: printed the weather"] == "INFO"


@pytest.mark.parametrize(
    ("parameter", "reason"),
    [
        (
            'parameters { key: "fail" value: { string_value: "1" } }',
            "code failed: model.py, line {line}: no weights here",
        ),
        (
            'parameters { key: "path" value: { string_value: "1" } }',
            "code failed: model.py, line {line}: [Errno 2] No such file or directory: 'weights.bin'",
        ),
        (
            'parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "/opt/env.tar.gz" } }',
            "EXECUTION_ENV_PATH env.tar.gz: it must hold bin/python",
        ),
    ],
)
async def test_a_model_that_cannot_start_says_why(
    http: httpx.AsyncClient, root: Path, parameter: str, reason: str
) -> None:
    put(root, "broken", "behave", BEHAVE + parameter)
    answer = await http.post("/repository/models/broken/load")
    error = re.sub(r"model\.py, line \d+", "model.py, line {line}", answer.json()["error"])
    assert answer.status_code == 400 and reason in error


async def test_a_model_that_takes_too_long_to_start_says_why(http: httpx.AsyncClient, root: Path) -> None:
    limit = 'parameters { key: "oriel.start_timeout_s" value: { string_value: "0.5" } }'
    put(root, "slow", "behave", BEHAVE + limit)
    (root / "slow/1/model.py").write_text(HANGS)
    answer = await http.post("/repository/models/slow/load")
    assert answer.status_code == 400 and "the model was not imported within 0.5 s" in answer.json()["error"]


async def test_code_sent_with_a_request_is_not_run(http: httpx.AsyncClient) -> None:
    source = (SOURCES / "add_sub.py").read_bytes()
    parameters = {
        "config": json.dumps({"backend": "python", "max_batch_size": 8}),
        "file:1/model.py": base64.b64encode(source).decode(),
    }
    answer = await http.post("/repository/models/sent/load", json={"parameters": parameters})
    assert answer.status_code == 400 and "only from a folder of this machine" in answer.json()["error"]


async def test_statistics_count_python_models_as_others(http: httpx.AsyncClient) -> None:
    await say(http, "pid")
    (found,) = (await http.get("/models/behave/stats")).json()["model_stats"]
    assert found["inference_stats"]["success"]["count"] > 0
    assert found["inference_stats"]["compute_infer"]["ns"] > 0


@pytest.mark.parametrize("shape", [[7, 1], [], [0, 1], [1, 2], [1], [1, 1, 1]])
async def test_an_output_of_another_shape_is_passed_on(http: httpx.AsyncClient, unit: Unit, shape: list[int]) -> None:
    """Nothing splits it: each request has an answer of its own. It used to be refused."""
    (output,) = (await ask(http, f"shape {shape}")).json()["outputs"]
    assert output["shape"] == shape and output["data"] == ["x"] * math.prod(shape)
    client = tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}")
    given = tritonclient.grpc.aio.InferInput("text", [1, 1], "BYTES")
    given.set_data_from_numpy(np.array([[f"shape {shape}".encode()]], dtype=object))
    found = (await client.infer("behave", [given])).as_numpy("said")
    assert found is not None and list(found.shape) == shape
    await client.close()


async def test_an_output_of_another_datatype_is_passed_on(http: httpx.AsyncClient, unit: Unit) -> None:
    """It used to be refused. The second request is a known one, whose answers are encoded without a response."""
    for _ in range(3):
        (output,) = (await ask(http, "number")).json()["outputs"]
        assert (output["datatype"], output["shape"], output["data"]) == ("FP32", [1, 1], [1.5])
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        given = tritonclient.grpc.aio.InferInput("text", [1, 1], "BYTES")
        given.set_data_from_numpy(np.array([[b"number"]], dtype=object))
        for _ in range(3):
            assert (await client.infer("behave", [given])).as_numpy("said") == [[1.5]]


async def test_a_step_of_an_ensemble_keeps_to_its_datatypes(http: httpx.AsyncClient) -> None:
    answer = await ask(http, "number", model="around")
    assert answer.status_code == 500 and "its output 'said' is FP32, not BYTES" in answer.json()["error"]
    assert await say(http, "sender", model="around") == "sent"


async def test_classes_of_an_output_of_another_shape_are_refused(http: httpx.AsyncClient) -> None:
    answer = await ask(http, "shape []", outputs=[{"name": "said", "parameters": {"classification": 2}}])
    assert answer.status_code == 400 and "classes need numbers" in answer.json()["error"]
