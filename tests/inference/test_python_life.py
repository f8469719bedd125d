"""The processes of a Python model from load to unload: new versions, failed starts, restarts and ends."""

import asyncio
import dataclasses
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http.aio

from oriel_inference.app import open_unit
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.backends.python.launch import PythonLimits
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.catalog import UNTRIED
from oriel_inference.errors import BackendFailed, DeadlineExceeded, InferenceError, LoadFailed, ModelNotReady, Outcome
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import pipe_gate, until
from . import models
from .clients import client_of
from .python_calls import BEHAVE, HANGS, body, put
from .python_instances import ModelCall, execute, one_instance, opened

TRIED = Path(__file__).parents[2] / "benchmarks/peers/inference/triton_model.py"
LIFE = """
backend: "python" max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
WARM = """
model_warmup [ { name: "first" batch_size: 1 inputs {
    key: "text" value { data_type: TYPE_STRING dims: [ 1 ] input_data_file: "hello" } } } ]
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "trace"
    path.touch()
    monkeypatch.setenv("TRACE", str(path))
    return path


def put_life(root: Path, text: str, config: str = LIFE) -> None:
    folder = put(root, "life", "life", config)
    (folder / "1/words.py").write_text(f"TEXT = {text!r}\n")
    (folder / "warmup").mkdir(exist_ok=True)
    (folder / "warmup/hello").write_bytes(b"\x05\0\0\0hello")


async def ask(port: int, text: str) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        answer = await client.post(f"http://127.0.0.1:{port}/v2/models/life/infer", json=body(text))
        return answer.json()["outputs"][0]["data"][0] if answer.status_code == 200 else answer.json()["error"]


async def test_a_new_version_of_the_code_takes_over_without_a_gap(tmp_path: Path, trace: Path) -> None:
    root = tmp_path / "models"
    put_life(root, "hello", LIFE + WARM)
    settings = Settings(
        repositories=(root,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        control_mode="explicit",
        load_models=("*",),
        load_defaults=LoadDefaults(python_environment=("TRACE",)),
    )
    with pipe_gate(tmp_path / "gate") as finish_slow:
        async with open_unit(settings, sink=ListSink()) as unit:
            assert trace.read_text().splitlines() == ["initialize life_0_0 hello", "execute hello"]
            slow = asyncio.create_task(ask(unit.http_port, "slow"))
            await until(lambda: "execute slow" in trace.read_text())
            put_life(root, "good day", LIFE + WARM)
            await unit.surface.control.load("life")
            assert await ask(unit.http_port, "x") == "good day"
            assert not slow.done()
            finish_slow()
            assert await slow == "hello"
            await until(lambda: "finalize" in trace.read_text())
            assert not list(root.rglob("__pycache__")), "the repository would look changed to whoever follows it"
            await unit.surface.control.unload("life")
            await until(lambda: trace.read_text().count("finalize") == 2)


async def test_the_benchs_model_for_triton_runs_unchanged(tmp_path: Path) -> None:
    folder = models.put(tmp_path, "tiny", models.double(("n", 16)), 'backend: "python"\n' + """
        max_batch_size: 64
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 16 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
        dynamic_batching { }
        parameters { key: "intra_op_thread_count" value { string_value: "1" } }
    """)  # fmt: skip
    shutil.copy(TRIED, folder / "1/model.py")
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=2)
    kind = tritonclient.http.aio
    async with open_unit(settings, sink=ListSink()) as unit:
        async with kind.InferenceServerClient(f"127.0.0.1:{unit.http_port}") as client:

            async def one(value: int) -> float:
                given = kind.InferInput("x", [2, 16], "FP32")
                given.set_data_from_numpy(np.full((2, 16), value, np.float32))
                result = await client.infer("tiny", [given])
                return float(result.as_numpy("y")[1, 15])

            assert await asyncio.gather(*map(one, range(20))) == [2.0 * value for value in range(20)]
        assert unit.catalog.get("tiny").batcher.statistics.executions < 20


# One session by itself ------------------------------------------------------------------------------------------------


@pytest.fixture
async def closing() -> AsyncIterator[list[PythonSession]]:
    sessions: list[PythonSession] = []
    yield sessions
    for session in sessions:
        await asyncio.to_thread(session.close)


async def test_calls_get_the_time_until_the_next_restart(tmp_path: Path, closing: list[Any]) -> None:
    """They waited for their deadlines, while only the call that a process died of heard of it."""
    session = await opened(tmp_path, backoff_s=0.1)
    closing.append(session)
    for _ in range(2):  # the first restart is immediate
        found = await execute(session, "exit 1")
        assert isinstance(found, BackendFailed) and "exit code 1" in found.message
    found = await execute(session, "too early")
    assert isinstance(found, ModelNotReady) and 0 < found.retry_s < 0.2, found
    await until(lambda: session._executions is not None)
    assert await execute(session, "fine") == "fine"
    model = Path(session.launch.file)
    source = model.read_text()
    model.write_text("raise RuntimeError('half an upload')")
    dying = ModelCall("exit 1")
    session.execute(dying)
    await until(lambda: dying.result is not None)
    waiting = ModelCall("after all")
    session.execute(waiting)
    assert isinstance(await waiting.said(), ModelNotReady), "it could not be started again, and is tried once more"
    assert dying.back.is_set()
    model.write_text(source)
    await until(lambda: session._executions is not None)
    assert await execute(session, "at last") == "at last"


async def test_a_call_waits_while_another_instance_may_come_back(tmp_path: Path, closing: list[Any]) -> None:
    session, other = await opened(tmp_path / "one", backoff_s=0.1), await opened(tmp_path / "two")
    closing += [session, other]
    session.siblings = (session, other)
    for _ in range(2):
        dying = ModelCall("exit 1")
        session.execute(dying)
        await until(lambda: dying.result is not None)  # noqa: B023
        if not session._deaths:
            await dying.back.wait()
    assert not dying.back.is_set(), "an instance without a process takes no calls from the other one"
    await dying.back.wait()
    assert await execute(session, "fine") == "fine"


async def test_answers_and_batches_larger_than_a_message_are_refused(tmp_path: Path, closing: list[Any]) -> None:
    session = await opened(tmp_path, max_body_bytes=2000)
    closing.append(session)
    found = await execute(session, "x" * 3000)
    assert isinstance(found, BackendFailed) and "more than fit into one message" in found.message
    assert await execute(session, "x" * 1000) == "x" * 1000
    found = await execute(session, "large 3000")
    assert found.outcome is Outcome.BACKEND_FAILED and "the model's answer is too large" in found.message
    assert await execute(session, "still here") == "still here"


async def test_an_answer_that_cannot_be_read_leaves_its_bytes_to_nobody(tmp_path: Path, closing: list[Any]) -> None:
    """The next request of the batch got the output of the one before it."""
    session = await opened(tmp_path)
    closing.append(session)
    batch = ModelCall("dims secret", "public")
    session.execute(batch)
    assert await batch.said() == "public"


async def test_a_hanging_model_ends_with_its_session(tmp_path: Path) -> None:
    session = await opened(tmp_path, finalize_s=0.2)
    asked = ModelCall("hang")
    session.execute(asked)
    pid = session.pid
    await asyncio.to_thread(session.close)
    assert isinstance(asked.result, InferenceError) and asked.back.is_set()
    assert isinstance(await execute(session, "x"), InferenceError)
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, 0)


async def test_a_model_that_hangs_in_initialize_is_given_up(
    tmp_path: Path, closing: list[PythonSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    initialize = PythonSession.initialize

    async def hurried(session: PythonSession) -> None:  # it was imported, however slow the machine is
        closing.append(session)
        session._limits = dataclasses.replace(session._limits, start_s=0.1)
        await initialize(session)

    monkeypatch.setattr(PythonSession, "initialize", hurried)
    with pytest.raises(LoadFailed, match=r"the model was not initialised within 0\.1 s"):
        await opened(tmp_path, BEHAVE + 'parameters { key: "hang" value: { string_value: "1" } }')


async def test_a_process_that_dies_between_the_steps_of_its_start_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A regression: nobody noticed that the process had ended; the load waited for the whole time limit and was called
    slow.
    """
    initialize = PythonSession.initialize

    async def after_its_end(session: PythonSession) -> None:
        session.kill("killed by the test")
        assert session._gone is not None
        await session._gone
        await initialize(session)

    monkeypatch.setattr(PythonSession, "initialize", after_its_end)
    with pytest.raises(LoadFailed, match=r"the model's process died \(killed by the test\)"):
        await opened(tmp_path)


async def test_a_start_can_be_called_off(tmp_path: Path) -> None:
    path = put(tmp_path, "behave", "behave", BEHAVE) / "1/model.py"
    path.write_text(HANGS)
    backend = PythonBackend(lambda *asked: None, PythonLimits())
    loading = asyncio.create_task(asyncio.to_thread(backend.open_all, one_instance(path, BEHAVE)))
    await until(lambda: any(session.pid for session in backend._starting))
    backend.stop()
    with pytest.raises(LoadFailed, match="the server is stopping"):
        await loading


async def test_what_a_child_says_out_of_turn_ends_it(tmp_path: Path, closing: list[Any]) -> None:
    session = await opened(tmp_path)
    closing.append(session)
    found = await execute(session, "lie")
    assert isinstance(found, BackendFailed) and "cannot be read" in found.message
    os.kill(session.pid or 0, signal.SIGCONT)
    assert await execute(session, "fine") == "fine"


async def test_what_waits_for_a_process_is_sent_without_those_whose_time_is_over(
    tmp_path: Path, closing: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    session = await opened(tmp_path)
    closing.append(session)
    dying = ModelCall("exit 1")
    session.execute(dying)
    await until(lambda: dying.result is not None)
    late, gone, mixed = ModelCall("late"), ModelCall("gone"), Mixed("late too", "in time")
    late.requests = (dataclasses.replace(late.requests[0], deadline=time.monotonic()),)
    for each in (late, gone, mixed):
        session.execute(each)
    session.caller_left(gone, 0)
    await mixed.back.wait()
    assert isinstance(late.result, DeadlineExceeded) and late.back.is_set() and gone.back.is_set()
    assert isinstance(mixed.results[0], DeadlineExceeded) and mixed.results[1][0][0, 0] == b"in time"
    assert seen.read_text().splitlines() == ["exit 1", "in time"]


class Mixed(ModelCall):
    """Two requests, the first one without time."""

    def __init__(self, late: str, text: str) -> None:
        super().__init__(text)
        gone = dataclasses.replace(ModelCall(late).requests[0], deadline=time.monotonic())
        self.requests = (gone, *self.requests)  # type: ignore[assignment]
        self.results: dict[int, Any] = {}

    def answer(self, index: int, result: Any) -> None:
        self.results[index] = result


async def test_a_version_whose_execute_was_never_tried_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A regression: a newer version with an error in `execute` replaced a good one, and nothing showed that."""
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }\noutput { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
    good = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy())])
                for r in requests]
"""
    bad = good.replace("return [", "return 1 / 0, [")
    sample = 'model_warmup { name: "one" inputs { key: "x" value { data_type: TYPE_FP32 dims: 1 zero_data: true } } }'
    row = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}]}
    root = tmp_path / "models"
    models.put(root, "code", None, tensors)
    (root / "code/1/model.py").write_text(good)
    settings = Settings(repositories=(root,), http_port=0, grpc_port=None, metrics_port=None, control_mode="poll")
    async with (
        open_unit(dataclasses.replace(settings, poll_s=0.05, cores=2), sink=ListSink()) as unit,
        client_of(unit.http_port) as client,
    ):

        async def lines() -> dict[str, tuple[str, str]]:
            index = await client.post("/v2/repository/index", json={})
            return {each["version"]: (each["state"], each["reason"]) for each in index.json()}

        def put_version(version: int, code: str) -> None:
            """Whole at once: it is polled."""
            (tmp_path / "new").mkdir()
            (tmp_path / "new/model.py").write_text(code)
            (tmp_path / "new").rename(root / f"code/{version}")

        async def replaced() -> bool:
            return list(await lines()) == ["2"]

        async def third() -> bool:
            return "3" in await lines()

        assert await lines() == {"1": ("READY", UNTRIED)}
        assert (await client.post("/v2/models/code/infer", json=row)).status_code == 200
        assert await lines() == {"1": ("READY", "")}
        put_version(2, bad)
        await until(replaced)
        assert await lines() == {"2": ("READY", UNTRIED)}
        assert f"model code version 2 is {UNTRIED}" in caplog.text
        failed = await client.post("/v2/models/code/infer", json=row)
        assert failed.status_code == 500 and ".py" not in failed.text and "ZeroDivision" not in failed.text
        traces = [getattr(each, "traceback", "") for each in caplog.records]
        assert any(
            each.endswith("ZeroDivisionError: division by zero")
            and re.search(r'File ".*/code/2/model.py", line 5, in execute$', each, re.MULTILINE)
            for each in traces
        )
        assert (await lines())["2"] == ("READY", UNTRIED)
        # With a sample it is tried, and replaces nothing.
        (tmp_path / "config").write_text(tensors + sample)
        (tmp_path / "config").replace(root / "code/config.pbtxt")
        put_version(3, bad)
        await until(third)
        found = await lines()
        assert found["3"][0] == "UNAVAILABLE" and "model_warmup[0]: the warm-up failed" in found["3"][1]


INSTALL = "install it beside the server, or into an environment that EXECUTION_ENV_PATH names: docs/python-models.md"


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("import json\nimport nmupy\n", f"model.py, line 2: No module named 'nmupy': {INSTALL}"),
        ("import json\nfrom . import helper\n", f"helper.py, line 3: No module named 'nmupy': {INSTALL}"),
        ("from .lost import x\n", "model.py, line 1: No module named '1.lost'"),
        ("class TritonPythonModel\n    pass\n", "model.py, line 1: "),
        ("import json\njson.loads('{')\n", "model.py, line 2: Expecting property name"),
    ],
)
async def test_a_load_error_names_the_models_own_file_and_line(tmp_path: Path, code: str, where: str) -> None:
    tensors = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }\noutput { name: "y" data_type: TYPE_FP32 dims: 1 }\n'
    models.put(tmp_path, "code", None, 'backend: "python"\n' + tensors)
    (tmp_path / "code/1/model.py").write_text(code)
    (tmp_path / "code/1/helper.py").write_text("\n\nimport nmupy\n")
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=None, metrics_port=None)
    async with open_unit(settings, sink=ListSink()) as unit:
        (entry,) = unit.catalog.index()
        assert entry.reason.startswith(f"the model's code failed: {where}"), entry.reason
        assert str(tmp_path) not in entry.reason
