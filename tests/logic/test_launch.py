"""Fork servers with interpreters of their own. A virtual environment without pip is made in a moment."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import venv
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from oriel_logic.errors import ServiceBroken
from oriel_logic.loading.sources import handler_files
from oriel_logic.services.context import Work
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import WorkerPool
from oriel_logic.workers.worker import PoolLimits
from oriel_wire.context import CallContext

CallMaker = Callable[..., CallContext]
START_S = 120.0
STANDARD = """
    import sys
    from oriel_logic import service, Refused

    @service
    def where(request):
        return sys.prefix

    def prefix(): return sys.prefix
    def has(name): __import__(name)
    def refuse(): raise Refused("not this one")
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> str:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return str(tmp_path / "bare/bin/python")


@pytest.fixture
async def pool_with(services: Callable[..., Path]) -> AsyncIterator[Callable[..., Awaitable[WorkerPool]]]:
    async with AsyncExitStack() as opened:

        async def start(python: str, **files: str) -> WorkerPool:
            folder = services(**files)
            limits = PoolLimits(workers=1)

            def launch() -> ForkServer:
                return ForkServer.launch(handler_files([folder]), python=python, max_frame_bytes=limits.max_frame_bytes)

            made = WorkerPool(launch(), limits, launch=launch)
            opened.push_async_callback(made.close)
            await made.start()
            return made

        yield start


async def value(pool: WorkerPool, call: CallContext, name: str, *arguments: Any) -> Any:
    reference = f"function:oriel_services.jobs:{name}"
    return (await pool.call(Work(reference, arguments, call, name))).value


async def test_a_bare_environment_runs_workers_and_sees_nothing_of_ours(
    pool_with: Any, bare_python: str, call: CallMaker
) -> None:
    pool = await pool_with(bare_python, jobs=STANDARD, maths="import starlette\n")
    await pool.wait_ready()
    assert pool.problems == {"maths": "line 1: ModuleNotFoundError: No module named 'starlette'"}
    assert await value(pool, call(), "prefix") == str(Path(bare_python).parents[1])
    with pytest.raises(Exception, match="its log says why"):
        await value(pool, call(), "has", "starlette")
    assert pool.definitions["jobs"].target is None and pool.definitions["jobs"].runs_in_worker("")


async def test_an_interpreter_that_cannot_run_workers_says_why(pool_with: Any, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\nexec {sys.executable} -c "$(sed \'s/^OLDEST = .*/OLDEST = (9, 9)/\' "$1")" "$2"\n')
    old.chmod(0o755)
    pool = await pool_with(str(old), jobs=STANDARD)
    with pytest.raises(ServiceBroken, match=r"workers need 9\.9 or newer"):
        await pool.wait_ready()
    assert not pool.is_ready


HANGS = """
import os
from oriel_logic import service

def hang():
    {close}
    gate = os.open({gate!r}, os.O_WRONLY)
    os.write(gate, b"here")
    while True:
        pass

{where}
@service
class Hangs:
    def setup(self):
        hang()

    def predict(self, request):
        return 1
"""
KILLED = """
import sys, time
from pathlib import Path
from oriel_logic.loading.sources import handler_files
from oriel_logic.workers.launch import ForkServer

server = ForkServer.launch(handler_files([Path(sys.argv[1])]), max_frame_bytes=1 << 20)
kept = server.spawn(1)
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["import", "setup", "setup without descriptors"])
def test_what_hangs_ends_with_a_logic_process_that_is_killed(
    services: Callable[..., Path], tmp_path: Path, where: str
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    close = "os.closerange(3, 1024)" if "without" in where else ""
    folder = services(hangs=HANGS.format(gate=str(gate), close=close, where="hang()" if where == "import" else ""))
    reading = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], start_new_session=True) as logic:
            try:
                assert select.select([reading], [], [], START_S)[0] and os.read(reading, 10) == b"here"
            finally:
                logic.kill()
        assert select.select([reading], [], [], START_S)[0], "it runs on"
        assert os.read(reading, 10) == b""
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(logic.pid, signal.SIGKILL)


async def test_a_fork_server_whose_import_hangs_is_closed_at_once(services: Callable[..., Path]) -> None:
    server = ForkServer.launch(handler_files([services(hangs="while True: pass\n")]), max_frame_bytes=1 << 20)
    process = server._process
    server.close()
    assert process.code == -signal.SIGKILL
