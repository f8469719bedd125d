"""The inference server as a whole: stopping, failed starts, the process."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import httpx
import pytest
from fake_backend import FakeBackend

from oriel_cli.up.units import free_ports
from oriel_inference.app import open_unit
from oriel_inference.errors import ServerStopping
from oriel_inference.servers.repository_api import GrpcRepository
from oriel_inference.settings import Settings
from oriel_wire.engine import listener
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until
from . import models
from .clients import client_of
from .gated import INFER, ROW, batcher_of, gated

OWN = (("grpc.use_local_subchannel_pool", 1),)


async def test_stopping_answers_what_is_in_flight(tmp_path: Path, fake: FakeBackend) -> None:
    answered = []
    async with asyncio.TaskGroup() as group:
        async with gated(tmp_path, fake) as (_, client):
            long = group.create_task(client.post(INFER, json=ROW))
            await asyncio.to_thread(fake.gate.wait_for_runs, 1)
            threading.Timer(0.1, fake.gate.open).start()
            async with asyncio.timeout(60):
                answered.append(await long)
    assert [answer.status_code for answer in answered] == [200]
    assert all(session.closed for session in fake.sessions)


async def test_not_ready_until_the_models_are_loaded(tmp_path: Path, fake: FakeBackend) -> None:
    fake.gate.close()
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    (port,) = free_ports("127.0.0.1", 1)  # outside the range that other tests' port 0 comes from
    settings = Settings(repositories=(tmp_path,), http_port=port, grpc_port=0, metrics_port=0)

    async def ask() -> None:
        async with client_of(port) as client:
            await asyncio.to_thread(fake.gate.wait_for_runs, 1)  # the warm-up
            assert (await client.get("/v2/health/live")).status_code == 200
            assert (await client.get("/v2/health/ready")).status_code == 400
            assert (await client.post(INFER, json=ROW)).status_code == 503
            fake.gate.open()

    async with asyncio.TaskGroup() as group:
        group.create_task(ask())
        async with open_unit(settings, backends=lambda _: fake, sink=ListSink()) as unit:
            assert unit.surface.readiness()[0]


async def test_repository_that_is_no_folder_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="is not a folder: pass --model-repository"):
        async with open_unit(Settings(repositories=(tmp_path / "nowhere",))):
            pass


@pytest.mark.parametrize("port", ["http_port", "grpc_port", "metrics_port"])
async def test_busy_port_stops_the_start_and_leaves_no_socket_open(tmp_path: Path, port: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        ports = {**free, port: taken.getsockname()[1]}
        with pytest.raises(StartFailed, match=f"is in use .*--{port.replace('_', '-')}"):
            async with open_unit(Settings(repositories=(tmp_path,), **ports), sink=ListSink()):
                pass


async def test_same_name_in_two_repositories_is_refused_in_both(tmp_path: Path, repository: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    settings = Settings(repositories=(repository, tmp_path), http_port=0, grpc_port=0, metrics_port=0)
    async with open_unit(settings, sink=ListSink()) as unit:
        (entry,) = [each for each in unit.catalog.index() if each.name == "double"]
        assert entry.reason == "model 'double' is in more than one model repository"
        assert unit.catalog.get("echo")


async def test_new_connections_hear_503_while_it_stops_and_nothing_fails(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "LAME_DUCK_S", 60.0)  # until it is cancelled
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with open_unit(settings, sink=ListSink()) as unit:
            started.set_result(unit)
            await stop.wait()

    serving = asyncio.create_task(serve())
    unit = await started
    stop.set()
    while not unit.surface.stopping:
        await asyncio.sleep(0)
    for path, status in (("/v2/health/ready", 503), ("/v2/health/ready", 503), (INFER, 200)):
        async with client_of(unit.http_port) as client:
            answer = await (client.post(path, json=ROW) if status == 200 else client.get(path))
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_both_listeners_answer_until_the_last_call_of_either_has_ended(
    settings: Settings, tmp_path: Path, fake: FakeBackend, protocol: str
) -> None:
    """A gateway got connections refused while the server still had calls to finish."""
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    gated_settings = replace(settings, repositories=(tmp_path,), drain_s=3600.0, strict_readiness=True)

    async def serve() -> None:
        async with open_unit(gated_settings, backends=lambda _: fake, sink=ListSink()) as unit:
            started.set_result(unit)
            await stop.wait()

    fake.gate.open()
    serving = asyncio.create_task(serve())
    unit = await started
    fake.gate.close()
    async with client_of(unit.http_port) as client, grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        message = v2_pb2.ModelInferRequest(model_name="double")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        message.raw_input_contents.append(bytes(16))
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        held = asyncio.ensure_future(
            client.post(INFER, json=ROW) if protocol == "http" else infer(message.SerializeToString())
        )
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        stop.set()
        await until(lambda: unit.surface.stopping)
        for _ in range(4):
            await asyncio.sleep(2 * listener.LAME_DUCK_S)
            async with client_of(unit.http_port) as other, client_of(unit.metrics_port) as admin:
                assert (await other.get("/v2/health/live")).status_code == 200
                ready = await admin.get("/health/ready")
                assert (ready.status_code, ready.json()["reason"]) == (
                    503,
                    "the server is shutting down, 1 call(s) in progress",
                )
            async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}", options=OWN) as other_channel:
                await other_channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"", timeout=60)
        fake.gate.open()
        await held
    async with asyncio.timeout(60):
        await serving


async def test_a_drain_shorter_than_the_queue_answers_gold_and_refuses_bronze(
    tmp_path: Path, fake: FakeBackend
) -> None:
    """Calls that still waited at its end were cut off without an answer. A spot node leaves little time."""
    stop, started, answered = asyncio.Event(), asyncio.get_running_loop().create_future(), list[str]()
    config = models.DOUBLE.replace("max_batch_size: 8", "max_batch_size: 1")
    models.put(tmp_path, "double", models.double(), config)
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=1, drain_s=3.0)

    async def serve() -> None:
        async with open_unit(settings, backends=lambda _: fake, sink=ListSink()) as unit:
            started.set_result(unit)
            await stop.wait()

    serving = asyncio.create_task(serve())
    unit = await started
    fake.gate.close()

    async def ask(client: httpx.AsyncClient, name: str, priority: int) -> httpx.Response:
        answer = await client.post(INFER, json=ROW, headers={"x-oriel-priority": str(priority)})
        answered.append(name)
        return answer

    async with client_of(unit.http_port) as client:
        calls = {"first": asyncio.create_task(ask(client, "first", 0))}
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        for waiting, (name, priority) in enumerate((("bronze", 2), ("later bronze", 2), ("gold", 0)), 1):
            calls[name] = asyncio.create_task(ask(client, name, priority))
            await until(lambda count=waiting: batcher_of(unit).pending == count)
        stop.set()
        await until(lambda: unit.surface.stopping)
        fake.gate.step(2)
        refused = await calls["later bronze"]
        assert answered == ["first", "gold", "later bronze"]
        assert refused.status_code == 503 and "shutting down" in refused.text
        fake.gate.open()  # what runs ends
        assert [(await calls[name]).status_code for name in ("first", "gold", "bronze")] == [200, 200, 200]
    async with asyncio.timeout(60):
        await serving


def test_process_serves_and_stops_on_sigterm(repository: Path) -> None:
    oriel = str(Path(sys.executable).with_name("oriel"))
    flags = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    process = subprocess.Popen(
        [oriel, "inference", "--model-repository", str(repository), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if ": HTTP " in line:
                break
        serves = re.search(r"serving, but not ready \(model 'broken' is not ready\): HTTP (\d+), ", lines[-1])
        assert serves, lines
        assert re.search(r"model double version 1 is ready on CPUExecutionProvider", "".join(lines))
        with httpx.Client(base_url=f"http://127.0.0.1:{serves[1]}", trust_env=False, timeout=60) as client:
            assert client.post(INFER, json=ROW).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 0


async def test_a_server_that_stops_lists_no_model_over_grpc() -> None:
    """A gateway uses a server that is not ready as long as a model of it is."""
    index = GrpcRepository(SimpleNamespace(stopping=True)).handlers()["RepositoryIndex"]  # type: ignore[arg-type]
    with pytest.raises(ServerStopping):
        await index(v2_pb2.RepositoryIndexRequest())
