"""How a server starts and stops as a person sees it: tables, ports, failures, the drain."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
from fake_backend import FakeBackend

from oriel_inference.app import open_unit
from oriel_inference.catalog import Entry
from oriel_inference.model import ModelState
from oriel_inference.models.start_report import MAX_ROWS, models_table, ports_table
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.load import LoadedVersion
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from ..waiting import until, wait_until
from . import models
from .clients import client_of
from .gated import INFER, ROW
from .hostile_models import load

LONG = "broken/1/model.onnx is not a whole ONNX file: a field is longer than the file, the upload may be incomplete"


def ready(name: str, provider: str = "CPUExecutionProvider", instances: int = 2) -> Entry:
    serving: Any = SimpleNamespace(provider=provider, spec=SimpleNamespace(instances=instances))
    return Entry(name=name, version=1, state=ModelState.READY, serving=serving)


def failed(name: str, reason: str = LONG, version: int = 0) -> Entry:
    return Entry(name=name, version=version, state=ModelState.UNAVAILABLE, reason=reason)


def test_the_table_of_models_has_the_reason_behind_each_line() -> None:
    assert models_table([failed("broken", version=1), ready("resnet50"), failed("wrong", "no\nversions")]) == (
        "Model     Version  Status       Runs on\n"
        f"broken    1        UNAVAILABLE           {LONG}\n"
        "resnet50  1        READY        CPU x 2\n"
        "wrong     -        UNAVAILABLE           no versions"
    )


def test_of_very_many_models_those_that_failed_are_shown() -> None:
    entries = [ready(f"m{n:04}") for n in range(MAX_ROWS + 50)] + [failed("zz")]
    table = models_table(entries)
    assert "zz" in table and table.endswith("... and 51 more") and table.count("\n") == MAX_ROWS + 1
    assert models_table([]) == "no models are loaded"


def test_the_table_of_ports() -> None:
    assert ports_table([("HTTP", "http://127.0.0.1:8000")]) == "Port  Address\nHTTP  http://127.0.0.1:8000"


# --- flags that change how the server starts ----------------------------------------------------------------------


async def test_exit_on_error_names_the_models_and_the_reason(settings: Settings) -> None:
    with pytest.RaisesGroup(StartFailed, flatten_subgroups=True) as stopped:
        async with open_unit(replace(settings, exit_on_error=True)):
            pass
    (failure,) = stopped.value.exceptions
    assert "1 of the models cannot serve: broken; broken/1/model.onnx" in str(failure)


async def test_ports_that_are_not_allowed_stay_closed(settings: Settings) -> None:
    async with open_unit(replace(settings, grpc_port=None, metrics_port=None, server_id="mine")) as unit:
        assert (unit.grpc_port, unit.metrics_port) == (0, 0)
        async with client_of(unit.http_port) as client:
            assert (await client.get("/v2")).json()["name"] == "mine"
    async with open_unit(replace(settings, http_port=None, server_id="mine")) as unit:
        assert unit.http_port == 0

        def metadata() -> str:
            with triton_grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
                return str(client.get_server_metadata().name)

        assert await asyncio.to_thread(metadata) == "mine"


async def test_the_log_starts_as_the_flags_say(settings: Settings) -> None:
    wanted = {"log_verbose_level": 2, "log_warning": False, "log_format": "ISO8601"}
    async with open_unit(replace(settings, log=wanted, log_file="server.log")) as unit:
        shown = unit.surface.log.shown()
    assert shown == {**shown, **wanted, "log_file": "server.log", "log_error": True}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of grpcio, closing a channel
async def test_a_grpc_connection_that_has_reached_its_age_ends(settings: Settings) -> None:
    async with open_unit(replace(settings, grpc_max_age_ms=50)) as unit:

        def closed() -> None:
            with grpc.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
                states: list[grpc.ChannelConnectivity] = []
                channel.subscribe(states.append, try_to_connect=True)
                channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
                wait_until(lambda: states and states[-1] is grpc.ChannelConnectivity.IDLE)

        await asyncio.to_thread(closed)


async def test_configurations_may_have_to_be_complete(settings: Settings) -> None:
    strict = replace(settings, load_defaults=LoadDefaults(auto_complete=False))
    async with open_unit(strict) as unit:
        state = {entry.name: entry for entry in unit.catalog.index()}
        assert state["double"].state is ModelState.READY
        assert (
            state["pair"].reason == "pair/config.pbtxt: input: is missing, and --disable-auto-complete-config is given"
        )


async def test_python_models_may_have_to_be_complete_too(settings: Settings, tmp_path: Path) -> None:
    models.put(tmp_path, "code", None, 'backend: "python"')
    (tmp_path / "code/1/model.py").write_text("raise SystemExit('must not be run')")
    strict = replace(settings, repositories=(tmp_path,), load_defaults=LoadDefaults(auto_complete=False))
    async with open_unit(strict) as unit:
        (entry,) = unit.catalog.index()
    assert entry.reason == "code/config.pbtxt: input: is missing, and --disable-auto-complete-config is given"


@pytest.mark.parametrize("size", [1, 16, 0])
def test_the_operator_says_how_large_auto_completed_batches_are(tmp_path: Path, size: int) -> None:
    models.put(tmp_path, "double", models.two_inputs(), None)
    (pair,) = load(tmp_path, defaults=LoadDefaults(max_batch_size=size, intra_op_threads=1)).values()
    assert isinstance(pair, LoadedVersion)
    assert pair.config.max_batch_size == size and pair.config.HasField("dynamic_batching") == (size > 1)
    assert [*([-1] if size else []), *pair.spec.inputs[0].dims] == [-1, -1]
    assert pair.units == 1
    pair.close()


# --- a process of its own -----------------------------------------------------------------------------------------


@dataclass
class Server:
    process: asyncio.subprocess.Process
    port: int
    log: str


@asynccontextmanager
async def server(root: Path, *words: str) -> AsyncIterator[Server]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "oriel_cli.main", "inference", "--model-repository", str(root)),
        *("--http-port=0", "--allow-grpc=false", "--allow-metrics=false", *words),
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    log = ""
    try:
        while "model version(s) serve" not in log:
            line = await process.stderr.readline()
            assert line, log
            log += line.decode()
        port = int(log.rpartition("http://127.0.0.1:")[2].split()[0])
        yield Server(process, port, log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.fixture(scope="module")
def slow_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("slow")
    models.put(root, "slow", models.slow(), None)
    models.put(root, "broken", None, 'backend: "none"')
    return root


async def ask_and_stop(running: Server, count: int = 6) -> list[httpx.Response | BaseException]:
    """Send requests that need a run each, and SIGTERM when the first is answered: the others are then in flight."""
    body = np.ones((4, 512), np.float32).tobytes()
    head = b'{"inputs":[{"name":"x","shape":[4,512],"datatype":"FP32","parameters":{"binary_data_size":8192}}]}'
    headers = {"inference-header-content-length": str(len(head))}
    async with client_of(running.port) as client:
        calls = [
            asyncio.ensure_future(client.post("/v2/models/slow/infer", content=head + body, headers=headers))
            for _ in range(count)
        ]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        running.process.send_signal(signal.SIGTERM)
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_a_stop_drains_and_the_log_shows_the_tables(slow_repository: Path) -> None:
    async with server(slow_repository, "--exit-timeout-secs=20", "--http-thread-count=2") as running:
        assert "\nslow    1        READY" in running.log and "\nbroken  -        UNAVAILABLE" in running.log
        assert running.log.count("--http-thread-count has no effect") == 1
        answers = await ask_and_stop(running)
        assert [answer.status_code for answer in answers if isinstance(answer, httpx.Response)] == [200] * 6
        assert await asyncio.wait_for(running.process.wait(), 240) == 0


async def test_without_time_to_drain_a_stop_cuts(settings: Settings, tmp_path: Path, fake: FakeBackend) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        hasty = replace(settings, repositories=(tmp_path,), cores=1, drain_s=0.0)
        async with open_unit(hasty, backends=lambda _: fake, sink=ListSink()) as unit:
            started.set_result(unit)
            await stop.wait()

    serving = asyncio.create_task(serve())
    unit = await started
    fake.gate.close()
    async with client_of(unit.http_port) as client:
        calls = [asyncio.ensure_future(client.post(INFER, json=ROW)) for _ in range(6)]
        batcher = unit.catalog.get("double").batcher
        await until(lambda: unit.surface.under_way() == 6 and batcher.running)
        stop.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert all(not isinstance(answer, httpx.Response) or answer.status_code == 503 for answer in answers)
        fake.gate.open()
    await serving
