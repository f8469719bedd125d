"""R11 over gRPC: a server ends under load, and only calls that find no connection fail."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_inference.app import open_unit
from oriel_inference.servers import stream
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..gateway.grpc_endpoints import MESSAGE, house
from ..gateway.stack import GOLD
from ..inference import models
from ..waiting import until

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
CHANNELS, CALLERS, STREAMS, AGE_MS = 4, 32, 8, 400
# What the asyncio client reports for a stream on which a write failed before it had read the stream's status: the
# caller tries again until it gets a status.
HIDDEN = "Internal error from Core"


@dataclass
class Load:
    """Callers that each begin a call when their last has ended, until one of them fails."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)

    async def call(self, channel: aio.Channel, message: bytes, metadata: tuple[tuple[str, str], ...]) -> None:
        infer = channel.unary_unary(INFER)
        await self._until_failed(lambda: infer(message, metadata=metadata, timeout=240))

    async def stream(self, channel: aio.Channel, message: bytes, metadata: tuple[tuple[str, str], ...]) -> None:
        """Open a stream for three messages, again and again."""
        streamed = channel.stream_stream(STREAM)

        async def three() -> None:
            answers = [each async for each in streamed(iter([message] * 3), metadata=metadata, timeout=240)]
            assert len(answers) == 3

        await self._until_failed(three)

    async def _until_failed(self, once: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await once()
            except aio.AioRpcError as error:
                if error.details() == HIDDEN:
                    continue
                self.failed.append(f"{error.code().name}: {error.details()}")
                return
            self.answered += 1

    async def reaches(self, count: int) -> None:
        """Wait until so many more calls were answered."""
        count += self.answered
        await until(lambda: self.failed or self.answered >= count)
        assert not self.failed


@asynccontextmanager
async def load(
    port: int, message: bytes, metadata: tuple[tuple[str, str], ...] = (), streams: int = 0
) -> AsyncIterator[Load]:
    """Run 32 callers, and `streams` callers of streams, on 4 connections; all of them have ended when the block
    ends.
    """
    calls = Load()
    options = (("grpc.use_local_subchannel_pool", 1),)
    channels = [aio.insecure_channel(f"127.0.0.1:{port}", options=options) for _ in range(CHANNELS)]
    async with asyncio.timeout(240):
        tasks = [asyncio.ensure_future(calls.call(channels[n % CHANNELS], message, metadata)) for n in range(CALLERS)]
        tasks += [
            asyncio.ensure_future(calls.stream(channels[n % CHANNELS], message, metadata)) for n in range(streams)
        ]
        yield calls
        await asyncio.gather(*tasks)
    for channel in channels:
        await channel.close()


@pytest.fixture(autouse=True)
def no_stream_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tell a pause of a busy machine from the end of all calls."""
    monkeypatch.setattr(stream, "QUIET_S", 60.0)


def check_refused(calls: Load) -> None:
    """Check that every caller ended because, in the end, nobody could connect."""
    others = {each for each in calls.failed if "failed to connect to all addresses" not in each}
    assert not others and len(calls.failed) == CALLERS + STREAMS


@pytest.mark.long
async def test_a_gateway_that_ends_under_load_fails_no_call() -> None:
    """Calls that have just arrived, or that were sent before their client knew of the end, are answered."""
    async with house() as it:
        it.steps[:] = [0.002] * 100_000
        async with load(it.ingress.port, MESSAGE, (("x-api-key", GOLD),), STREAMS) as calls:
            await calls.reaches(500)
            it.core.draining = True
            await it.ingress.drain(120.0)
        check_refused(calls)


async def test_an_inference_server_that_ends_under_load_fails_no_call(tmp_path: Path) -> None:
    """Calls in its first moment are answered, none is cancelled, and a stream that is in use goes on."""
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    settings = Settings(
        repositories=(tmp_path,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        drain_s=120.0,
        grpc_max_age_ms=AGE_MS,
    )
    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 4])
    row = np.ones(4, np.float32).tobytes()
    message = service_pb2.ModelInferRequest(model_name="double", inputs=[tensor], raw_input_contents=[row])
    stop, started = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def serve() -> None:
        async with open_unit(settings, sink=ListSink()) as unit:
            started.set_result(unit)
            await stop.wait()

    serving = asyncio.ensure_future(serve())
    unit = await started
    async with load(unit.grpc_port, message.SerializeToString(), streams=STREAMS) as calls:
        channel = aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}")
        used = channel.stream_stream(STREAM)()
        await calls.reaches(500)
        for turn in range(4):
            if turn == 1:
                stop.set()
                while not unit.surface.stopping:
                    await asyncio.sleep(0)
            await used.write(message.SerializeToString())
            answer = service_pb2.ModelStreamInferResponse.FromString(await used.read())
            assert answer.infer_response.model_name == "double" and not answer.error_message
        await used.done_writing()
        assert await used.read() is aio.EOF and await used.code() is grpc.StatusCode.OK
        await serving
        await channel.close()
    check_refused(calls)
