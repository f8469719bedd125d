"""The environment of a Python model's process, and that nothing of it is left when it ends."""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from oriel_inference.app import open_unit
from oriel_inference.backends.python import process
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.backends.python.frames import decode
from oriel_inference.backends.python.launch import Launch, model_environment
from oriel_inference.backends.python.messages import Cancel, Message
from oriel_inference.backends.python.process import ModelProcess
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.model import ModelState
from oriel_inference.repository.defaults import from_backend_config
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from ..waiting import gone, until
from .python_calls import BEHAVE, put, say
from .python_instances import ModelCall, execute, one_instance, opened


@pytest.fixture
async def closing() -> AsyncIterator[list[PythonSession]]:
    sessions: list[PythonSession] = []
    yield sessions
    for session in sessions:
        await asyncio.to_thread(session.close)


class Server:
    """The command, in a process of its own."""

    def __init__(self, root: Path, *arguments: str, variables: dict[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(root)]
        command += ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", *arguments]
        path = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(variables or {}), "PYTHONPATH": path}
        )

    def port(self) -> int:
        """Once it serves."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "ready: HTTP" in line:
                return int(line.split("HTTP ")[1].split(",")[0])
        raise AssertionError("the server ended")

    async def ask(self, *texts: str) -> list[str]:
        base = f"http://127.0.0.1:{await asyncio.to_thread(self.port)}/v2"
        async with httpx.AsyncClient(base_url=base, trust_env=False, timeout=60) as client:
            return [await say(client, text) for text in texts]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    started: list[Server] = []
    yield started
    for server in started:
        server.process.kill()
        server.process.communicate()


# What it is given -----------------------------------------------------------------------------------------------------


async def test_a_model_gets_the_variables_it_needs_and_those_the_operator_names(
    tmp_path: Path, closing: list[PythonSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = {"DATABASE_PASSWORD": "s3cret", "AWS_SECRET_ACCESS_KEY": "s3cret", "https_proxy": "http://me:s3cret@x"}
    also = {"LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": "", "MY_MODEL_A": "a", "MY_MODEL_B": "b", "OTHER": "o"}
    for name, value in {**secrets, **also}.items():
        monkeypatch.setenv(name, value)
    defaults, _ = from_backend_config(["python,environment=MY_MODEL_*,NOT_SET"])
    session = await opened(tmp_path, environment=defaults.python_environment)
    closing.append(session)
    text = await execute(session, "variables")
    found = json.loads(text)
    assert "s3cret" not in text and "OTHER" not in found
    assert {name: found.get(name) for name in also if name != "OTHER"} == {
        "LC_ALL": "C.UTF-8",
        "CUDA_VISIBLE_DEVICES": "",
        "MY_MODEL_A": "a",
        "MY_MODEL_B": "b",
    }
    assert found["PATH"] == os.environ["PATH"] and found["OMP_NUM_THREADS"]


def test_all_variables_but_the_supervisors_can_be_asked_for() -> None:
    server = {"ORIEL_LIFELINE_FD": "7", "ANY": "1", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/x"}
    found = model_environment(server, ("*",), threads=2, path="/here")
    assert found["ANY"] == "1" and found["OMP_NUM_THREADS"] == "3" and found["MKL_NUM_THREADS"] == "2"
    assert (found["PYTHONPATH"], found["ORIEL_PYTHONPATH"]) == ("/here", "/x") and "ORIEL_LIFELINE_FD" not in found


@pytest.mark.parametrize("value", ["", "A,,B", "TOKEN=s3cret", "a b", "*A", "A**", "x" * 300])
def test_only_names_of_variables_are_taken(value: str) -> None:
    with pytest.raises(StartFailed, match="takes names") as refused:
        from_backend_config([f"python,environment={value}"])
    assert "s3cret" not in str(refused.value)


# What it says ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def lines() -> Iterator[list[str]]:
    """What the session logs, whatever another server of this process wants to see of it."""
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("oriel_inference.backends.python.session")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


async def test_a_model_that_logs_without_end_gets_its_share_of_the_log(
    tmp_path: Path, closing: list[PythonSession], lines: list[str]
) -> None:
    session = await opened(tmp_path)
    closing.append(session)
    began = time.monotonic()
    assert await execute(session, "flood 5000") == "flooded"

    def shown() -> int:
        return sum("flood " in line for line in lines)

    # One line per second says how many were left out; the last one comes after the flood.
    await until(lambda: shown() + sum(int(each.split()[-4]) for each in lines if "lines left out" in each) == 5000)
    assert shown() <= 200 * (time.monotonic() - began + 1) and shown() < 5000
    assert any("an error all the same" in line for line in lines)


# What is left of it ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["serves", "hang", "deaf"])
async def test_a_killed_server_takes_along_its_models_processes_and_what_they_have_started(
    tmp_path: Path, servers: list[Server], how: str
) -> None:
    config = BEHAVE + f'parameters {{ key: "spawn" value {{ string_value: "{tmp_path / "child"}" }} }}'
    if how != "serves":
        config += f'parameters {{ key: "{how}" value: {{ string_value: "1" }} }}'
    root = tmp_path / "models"
    put(root, "behave", "behave", config)
    servers.append(Server(root))
    pids = [int(pid) for pid in await servers[0].ask("pid")] if how == "serves" else []
    written = tmp_path / "child"
    await until(lambda: written.exists() and written.read_text())
    grandchild = int(written.read_text())
    if how == "deaf":  # it has left its group and closed its lifeline, so that nothing but its parent's end reaches it
        stat = Path(f"/proc/{grandchild}/stat").read_text()
        pids = [int(stat.rpartition(")")[2].split()[1])]
        await until(lambda: len(os.listdir(f"/proc/{pids[0]}/fd")) == 2)  # its sockets
        os.kill(grandchild, signal.SIGKILL)
    assert not any(gone(pid) for pid in pids)
    servers[0].process.kill()
    await until(lambda: all(gone(pid) for pid in (grandchild, *pids)))


async def test_what_a_model_has_started_ends_with_it_however_it_ends(
    tmp_path: Path, closing: list[PythonSession]
) -> None:
    session = await opened(tmp_path, backoff_s=0.01, grace_s=0.1)
    closing.append(session)
    crashed = int(await execute(session, "spawn"))
    await execute(session, "exit 1")
    await until(lambda: gone(crashed))
    timed_out, hanging = int(await execute(session, "spawn")), ModelCall("hang")
    session.execute(hanging)
    assert not gone(timed_out)
    session.caller_left(hanging, 0)
    await until(lambda: gone(timed_out) and hanging.back.is_set())
    unloaded = int(await execute(session, "spawn"))
    assert not gone(unloaded)
    await asyncio.to_thread(session.close)
    await until(lambda: gone(unloaded))


async def test_a_load_under_way_does_not_hold_the_servers_end_up(tmp_path: Path) -> None:
    put(tmp_path, "behave", "behave", BEHAVE + 'parameters { key: "hang" value: { string_value: "1" } }')
    settings = Settings(
        repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, drain_s=3600.0, control_mode="explicit"
    )
    async with httpx.AsyncClient(trust_env=False, timeout=240) as client:
        async with open_unit(settings, sink=ListSink()) as unit:
            address = f"http://127.0.0.1:{unit.http_port}/v2/repository/models/behave/load"
            loading = asyncio.create_task(client.post(address))
            await until(lambda: [entry for entry in unit.catalog.index() if entry.state is ModelState.LOADING])
        assert "the server is stopping" in (await loading).json()["error"]


async def test_a_session_that_nobody_took_ends_with_the_backend(tmp_path: Path) -> None:
    path = put(tmp_path, "behave", "behave", BEHAVE) / "1/model.py"
    backend = PythonBackend(lambda *asked: None)
    (session,) = await asyncio.to_thread(backend.open_all, one_instance(path, BEHAVE))
    pid = session.pid
    assert pid is not None
    backend.stop()
    await backend.close()
    assert gone(pid)


class Gate:
    """Holds the thread that starts processes up, after or before it has one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        self.child: Any = None
        start = process._start

        def held(*given: Any) -> Any:
            if not before:
                self.child = start(*given)
            self.entered.set()
            assert self.open.wait(240)
            if before:
                self.child = start(*given)
            return self.child

        monkeypatch.setattr(process, "_start", held)


class Keeping(ThreadPoolExecutor):
    """Knows what it was given last."""

    last: Future[Any]

    def submit(self, *given: Any, **more: Any) -> Future[Any]:
        self.last = super().submit(*given, **more)
        return self.last


LAUNCH = Launch(file="", model="m", version="1", config="", args={}, decoupled=False, threads=1, inputs=(), outputs=())


def child(on_end: Callable[[str], None]) -> ModelProcess[Message]:
    return ModelProcess(
        LAUNCH,
        module="oriel_inference.backends.python.child",
        decode=decode,
        max_body_bytes=1 << 20,
        on_message=lambda message, body: None,
        on_end=on_end,
    )


async def test_a_start_called_off_the_moment_the_process_is_there_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cold_children: None
) -> None:
    gate, loop, told = Gate(monkeypatch, before=False), asyncio.get_running_loop(), threading.Event()
    descriptors = set(os.listdir("/proc/self/fd"))
    ended: list[str] = []
    with Keeping(1) as starter:
        monkeypatch.setattr(process, "_starter", starter)
        made = child(ended.append)
        starting = asyncio.create_task(made.start())
        await asyncio.to_thread(gate.entered.wait, 240)
        # Both are to be seen in one turn of the loop: that there is a process, then that it is not wanted.
        starter.last.add_done_callback(lambda _: loop.call_soon_threadsafe(made.kill, "called off"))
        starter.last.add_done_callback(lambda _: told.set())
        gate.open.set()
        told.wait(240)
        await starting
        await until(lambda: ended)
        assert gate.child.code is not None
    await until(lambda: len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["cancel", "kill"])
async def test_a_start_called_off_while_the_process_is_made_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cold_children: None, before: bool, how: str
) -> None:
    gate = Gate(monkeypatch, before=before)
    descriptors = set(os.listdir("/proc/self/fd"))
    ended: list[str] = []
    made = child(ended.append)
    starting = asyncio.create_task(made.start())
    await asyncio.to_thread(gate.entered.wait, 240)
    if how == "cancel":
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    else:
        made.kill("called off")
    assert not ended, "there may be a process yet"
    gate.open.set()
    if how == "kill":
        await starting
    await until(lambda: ended)
    assert gate.child.code is not None, "it was taken notice of"
    await until(lambda: len(set(os.listdir("/proc/self/fd")) - descriptors) <= 1)  # listdir's own


async def test_a_process_whose_socket_has_just_closed_receives_nothing_and_ends() -> None:
    """A child that dies closes its socket before the loop hears of its death; a batch may be sent in between."""
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    it = child(ended.set_result)
    await it.start()
    for stream in (it._work, it._control):
        stream.close()
        await until(lambda stream=stream: not stream.is_open)  # type: ignore[misc]
    await asyncio.sleep(0)
    it.send(Cancel(1))
    it.tell(Cancel(1))
    assert "9" in await ended
