"""PROMISES R16 and R17: a server whose models lie in a bucket, while the bucket dies, lies and is written badly.

moto's server is the store, and a bad network lies between it and the inference server. All the while a client calls the
model; every call has to be answered, by a version that was whole.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_objects import MemoryObjects
from object_stores import ObjectServer, object_server, point_to

from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import ClientLimits
from oriel_wire.objects.opening import open_client
from oriel_wire.observe.trace import ListSink

from ..conftest import Run
from ..waiting import until
from . import models
from .bad_network import BadNetwork
from .exposed import read
from .remote_models import model, outages_end_soon

ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 1, 1, 1]}]}
OUTAGE_S = 0.2
BETWEEN_S = 0.02  # two calls of the caller


@pytest.fixture
def server(run: Run) -> Iterator[ObjectServer]:
    with object_server("s3", run) as running:
        yield running


@pytest.fixture
def read_s() -> float:
    """How long a client of the store waits for an answer."""
    return 60.0


@pytest.fixture
async def network(server: ObjectServer, monkeypatch: pytest.MonkeyPatch, read_s: float) -> AsyncIterator[BadNetwork]:
    outages_end_soon(monkeypatch, outage_s=OUTAGE_S)
    quick = partial(open_client, limits=ClientLimits(read_s=read_s))
    monkeypatch.setattr("oriel_inference.stores.opening.open_client", quick)
    async with BadNetwork(server.port) as network:
        point_to(monkeypatch, server, network.port)
        yield network


class Caller:
    """Calls the model all the time. values: what it answered, each followed by another only."""

    def __init__(self, unit: Any, client: httpx.AsyncClient) -> None:
        self.unit, self._client = unit, client
        self.values: list[float] = []
        self.calls = 0

    async def run(self) -> None:
        while True:
            answer = await self._client.post("/v2/models/double/infer", json=ROW)
            assert answer.status_code == 200, answer.text
            value = float(answer.json()["outputs"][0]["data"][0])
            if not self.values or self.values[-1] != value:
                self.values.append(value)
            self.calls += 1
            await asyncio.sleep(BETWEEN_S)

    async def until(self, holds: Any) -> None:
        """`holds` may be asked again and again; the server has to be ready all the while."""

        async def held() -> bool:
            ready = await self._client.get("/v2/health/ready")
            assert ready.status_code == 200, ready.text
            return bool(await holds())

        await until(held)

    async def until_value(self, value: float) -> None:
        async def answered() -> bool:
            return self.values[-1:] == [value]

        await self.until(answered)

    async def up(self) -> bool:
        return bool((await read(self.unit)).value("oriel_model_repository_up"))

    async def down(self) -> bool:
        return not await self.up()

    async def reasons(self) -> list[str]:
        index = await self._client.post("/v2/repository/index", json={})
        return [each["reason"] for each in index.json() if each.get("reason")]

    async def until_reason(self, text: str) -> None:
        async def named() -> bool:
            return any(text in reason for reason in await self.reasons())

        await self.until(named)


@contextlib.asynccontextmanager
async def calling(url: str | tuple[Path | str, ...], cache: Path, **more: Any) -> AsyncIterator[Caller]:
    more = {"control_mode": "poll", "poll_s": 0.05, **more}
    ports = {"http_port": 0, "grpc_port": None, "metrics_port": 0}
    urls = (url,) if isinstance(url, str) else url
    settings = Settings(repositories=urls, model_cache=cache, cores=2, drain_s=5.0, **ports, **more)
    async with open_unit(settings, sink=ListSink()) as unit:
        address = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
            caller = Caller(unit, client)
            task = asyncio.create_task(caller.run())
            try:
                yield caller
                calls = caller.calls

                async def more_calls() -> bool:
                    return caller.calls > calls

                await caller.until(more_calls)
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task


def upload(server: ObjectServer, name: str, factor: float, version: int = 1) -> None:
    server.put(f"{name}/double/config.pbtxt", models.DOUBLE.encode())
    server.put(f"{name}/double/{version}/model.onnx", model(factor))


# R16 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "read_s"), [("dead", 60.0), ("silent", 3.0), ("errors", 60.0)])
async def test_an_outage_of_the_store_takes_nothing_down(
    server: ObjectServer, network: BadNetwork, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    upload(server, f"outage-{mode}", 2)
    url = f"{server.url}/outage-{mode}"
    async with calling(url, tmp_path) as caller:
        await caller.until_value(2)
        await caller.until(caller.up)  # a poll may have taken longer than `read_s`
        network.mode = mode
        network.drop()
        await caller.until(caller.down)
        assert "the model repository cannot be read; loaded models continue to serve" in caplog.text
        asked, began = network.asked, time.monotonic()

        async def asked_again() -> bool:
            return network.asked >= asked + 2

        await caller.until(asked_again)
        # Polls come every 50 ms.
        assert network.asked - asked <= 1 + (time.monotonic() - began) / OUTAGE_S
        assert caller.values == [2]
    # A restart meanwhile serves from the cache, and says that it cannot see the store.
    caplog.clear()
    async with calling(url, tmp_path) as caller:
        await caller.until_value(2)
        assert await caller.down()
        assert "starting with 1 model(s) from the cache" in caplog.text
        network.mode = "good"
        await caller.until(caller.up)
        upload(server, f"outage-{mode}", 3, version=2)
        await caller.until_value(3)
        assert caller.values == [2, 3]
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR and each.exc_info]


async def test_a_cold_start_without_the_store_says_why(
    server: ObjectServer, network: BadNetwork, tmp_path: Path
) -> None:
    network.mode = "dead"
    ports: dict[str, Any] = {"http_port": 0, "grpc_port": None, "metrics_port": None}
    settings = Settings(repositories=(f"{server.url}/cold",), model_cache=tmp_path, **ports)
    with pytest.raises(BaseException) as caught:
        async with open_unit(settings, sink=ListSink()):
            pass
    failure = caught.value
    while isinstance(failure, BaseExceptionGroup):
        (failure,) = failure.exceptions
    assert isinstance(failure, StartFailed) and "s3://repository" in str(failure)


async def test_a_slow_store_slows_nobody(server: ObjectServer, network: BadNetwork, tmp_path: Path) -> None:
    upload(server, "slow", 2)
    async with calling(f"{server.url}/slow", tmp_path) as caller:
        await caller.until_value(2)
        network.mode = "slow"
        upload(server, "slow", 3, version=2)
        await caller.until_value(3)
        assert caller.values == [2, 3]


# R17 ---------------------------------------------------------------------------------------------------------------


async def test_bad_uploads_are_named_and_whole_ones_taken_up(
    server: ObjectServer, network: BadNetwork, tmp_path: Path
) -> None:
    upload(server, "bad", 2)
    folder = "bad/double"
    three, four = model(3), model(4)
    async with calling(f"{server.url}/bad", tmp_path) as caller:
        await caller.until_value(2)
        # Half of it: what the folder itself announces is not there yet.
        sums = f"{sha256(three).hexdigest()}  model.onnx\n{sha256(b'!').hexdigest()}  notes.txt\n"
        server.put(f"{folder}/2/SHA256SUMS", sums.encode())
        server.put(f"{folder}/2/model.onnx", three[:-20])
        await caller.until_reason("double/2 is incomplete: notes.txt, named in SHA256SUMS, is missing")
        # Then other bytes than announced.
        server.put(f"{folder}/2/notes.txt", b"!")
        await caller.until_reason("double/2/model.onnx does not agree with its line in SHA256SUMS")
        server.put(f"{folder}/2/model.onnx", three)
        await caller.until_value(3)
        # Nothing announced, and no model.
        server.put(f"{folder}/3/model.onnx", b"not a model")
        await caller.until_reason("double/3/model.onnx")
        server.put(f"{folder}/3/model.onnx", four)
        await caller.until_value(4)
        # The serving version itself is overwritten with rubbish, and fixed.
        server.put(f"{folder}/3/model.onnx", b"rubbish")
        await caller.until_reason("double/3/model.onnx")
        server.put(f"{folder}/3/model.onnx", model(5))
        await caller.until_value(5)
        assert caller.values == [2, 3, 4, 5]


async def test_python_models_of_a_bucket_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass TritonPythonModel: pass\n"
    config = 'backend: "python"\ninput { name: "x" data_type: TYPE_FP32 dims: 4 }\n'
    config += 'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
    objects = MemoryObjects(
        {
            "r/double/config.pbtxt": models.DOUBLE.encode(),
            "r/double/1/model.onnx": model(2),
            "r/code/config.pbtxt": config.encode(),
            "r/code/1/model.py": code.encode(),
        }
    )
    monkeypatch.setattr("oriel_inference.stores.opening.open_client", lambda location: objects)
    async with calling("s3://bucket/r", tmp_path / "cache", strict_readiness=False) as caller:
        await caller.until_value(2)
        (reason,) = await caller.reasons()
        assert "Python models run only from a folder of this machine: the right to write to an object store" in reason
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("mode", ["poll", "demand"])
@pytest.mark.parametrize("policy", ["", "latest { num_versions: 2 }", "specific { versions: [ 2, 3 ] }", "all {}"])
async def test_a_start_without_the_store_serves_the_newest_version_that_works(
    tmp_path: Path, policy: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PROMISES R39: a corrupt newest version, the store away, then a new process with the cache of the one before."""
    outages_end_soon(monkeypatch, outage_s=OUTAGE_S)
    config = models.DOUBLE + (f"version_policy {{ {policy} }}" if policy else "")
    objects = MemoryObjects({"r/double/config.pbtxt": config.encode(), "r/double/2/model.onnx": model(2)})
    monkeypatch.setattr("oriel_inference.stores.opening.open_client", lambda location: objects)
    async with calling("s3://bucket/r", tmp_path, control_mode=mode) as caller:
        await caller.until_value(2)
        objects.put("r/double/3/model.onnx", b"not a model")
        await caller.until_reason("double/3/model.onnx")
        assert caller.values == [2]
    objects.down = True
    async with calling("s3://bucket/r", tmp_path, control_mode=mode) as caller:
        await caller.until_value(2)
        reasons = await caller.reasons()
        assert "serves in place of version 3, which is unavailable" in reasons
        assert any("double/3/model.onnx" in reason for reason in reasons)
        objects.down = False
        objects.put("r/double/3/model.onnx", model(3))
        await caller.until_value(3)
        assert caller.values == [2, 3]
        assert not (await read(caller.unit)).where("oriel_model_fallback")
