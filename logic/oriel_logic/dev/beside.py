"""Runs `oriel inference` beside a service that is being written, for as long as the service runs.

The process leads its own session, so that a Ctrl-C in the terminal reaches only us: it ends after the service's last
request. If we are killed, it sees the end of its lifeline pipe and stops by itself.
"""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from time import monotonic

import msgspec

from oriel_wire.engine.client import HttpClient, HttpResponse
from oriel_wire.errors import StartFailed, UpstreamError
from oriel_wire.process.process import LIFELINE_VARIABLE

Address = tuple[str, int]
Ports = Mapping[str, int]  # name (http, grpc, metrics) -> port
HOST = "127.0.0.1"
START_S = 180.0
PROBE_S = 2.0
PROBE_EVERY_S = 0.05
STOP_S = 10.0


@asynccontextmanager
async def inference_server(repository: Path, ports: Ports, *, start_s: float = START_S) -> AsyncIterator[None]:
    """Run an inference server of `repository` on `ports` while the block lasts; its log goes to stderr.

    Raises StartFailed if it ends before it is ready.
    Cancelled: it is ended at once.
    """
    lifeline, held = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *command(repository, ports),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=sys.__stderr__.fileno() if sys.__stderr__ else asyncio.subprocess.DEVNULL,
        env={"ORIEL_LOG_LEVEL": "WARNING", **os.environ, LIFELINE_VARIABLE: str(lifeline)},
        pass_fds=(lifeline,),
        start_new_session=True,
    )
    os.close(lifeline)
    try:
        await ready(process, ports, start_s)
        yield
        with suppress(ProcessLookupError):
            process.terminate()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await process.wait()
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        os.close(held)


def command(repository: Path, ports: Ports) -> list[str]:
    words = [sys.executable, "-P", "-m", "oriel_cli.main", "inference", "--model-repository", str(repository)]
    return [*words, *(word for name, port in ports.items() for word in (f"--{name}-port", str(port)))]


def free_ports() -> Ports:
    """Return three free ports."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(3)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return dict(zip(("http", "grpc", "metrics"), ports, strict=True))


async def ready(process: asyncio.subprocess.Process, ports: Ports, start_s: float) -> None:
    """Wait until every model is ready or has failed; a broken model does not prevent the start."""
    end = monotonic() + start_s
    while process.returncode is None:
        if await is_up((HOST, ports["http"])):
            return
        if monotonic() > end:
            raise StartFailed(f"the inference server is not ready after {start_s:.0f} s: see its lines above")
        await asyncio.sleep(PROBE_EVERY_S)
    raise StartFailed("the inference server could not start: see its line above")


async def is_up(address: Address) -> bool:
    answer = await ask(address, "GET", "/v2/health/ready")
    if answer is None:
        return False
    models = await models_of(address)
    return answer.status == 200 or (bool(models) and all(each.is_settled for each in models or ()))


class Listed(msgspec.Struct):
    """A model of an inference server. state: READY, UNAVAILABLE, LOADING, ...; reason: why it is not READY."""

    name: str
    state: str = "READY"
    reason: str = ""

    @property
    def is_settled(self) -> bool:
        """Return whether it is ready or has failed. An unavailable one without a reason has not been loaded yet."""
        return self.state == "READY" or (self.state == "UNAVAILABLE" and bool(self.reason))


async def models_of(address: Address) -> list[Listed] | None:
    """Return the models of an inference server; None if it cannot be reached or does not list them."""
    answer = await ask(address, "POST", "/v2/repository/index", b"{}")
    with suppress(msgspec.MsgspecError):
        if answer is not None and answer.status == 200:
            return msgspec.json.decode(answer.body, type=list[Listed])
    return None


async def ask(address: Address, method: str, path: str, body: bytes = b"") -> HttpResponse | None:
    client = HttpClient(host=address[0], port=address[1])
    try:
        headers = [("content-type", "application/json")]
        return await client.request(method, path, headers, body, deadline=monotonic() + PROBE_S)
    except UpstreamError:
        return None
    finally:
        await client.close()
