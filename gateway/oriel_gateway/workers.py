"""The parent of the workers of a gateway: it owns their sockets, keeps their ledger, and starts a dead one again.

Each worker listens on sockets of its own at the same addresses (SO_REUSEPORT), over which the kernel spreads
connections. The parent keeps them open: connections that wait for a worker that has died wait for the next one.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Final

import msgspec

from oriel_gateway.admin.guard import admin_token
from oriel_gateway.admin.workers import STREAM, WorkersAdmin
from oriel_gateway.limits.memory_ledger import MemoryLedger
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.limits.worker_link import parent_link
from oriel_gateway.observe.usage import Usage
from oriel_gateway.settings import Settings
from oriel_policies.bounds.ledger_rules import SharedSums
from oriel_wire.errors import StartFailed
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.logs import error_descriptor
from oriel_wire.process.process import BACKLOG, LIFELINE_VARIABLE, listen
from oriel_wire.process.questions import Answering
from oriel_wire.process.start import ChildProcess
from oriel_wire.process.worker import VARIABLE, Worker
from oriel_wire.usage.files import lines_since, minute_of

_log = logging.getLogger(__name__)
AGAIN_S: Final = 1.0  # between two starts of a worker that dies
_REFUSED: Final = 2  # exit code of a process that cannot start


async def serve_with_workers(
    settings: Settings,
    check: Callable[[Settings], Awaitable[None]],
    environment: Mapping[str, str],
    stop: asyncio.Event,
) -> None:
    """Serve by workers until `stop` is set, then let them drain. Raises StartFailed before anything is served.

    check: raises StartFailed if the documents are not for these settings, so that one process says it.
    environment: the variables of the workers.
    """
    token = admin_token(settings.admin_host, pages=settings.admin_pages)
    await check(replace(settings, worker=Worker(index=0, count=settings.workers)))
    admin_socket = listen(settings.admin_host, settings.admin_port, "gateway admin")
    public = _public_sockets(settings)
    file = QuotaFile(settings.quota_file if settings.limiter == "embedded" else None)
    await file.prepare()
    ledger = MemoryLedger(lambda: time() * 1e6, file)
    await asyncio.to_thread(_remember_use, settings, ledger)
    with tempfile.TemporaryDirectory(prefix="oriel-workers-") as folder:
        workers = Workers(settings.workers, public, Path(folder), ledger, environment)
        admin, ended = WorkersAdmin(workers.paths, lambda: stop.is_set()), asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, workers.signal, signal.SIGHUP)
        try:
            async with asyncio.TaskGroup() as group:
                limits = ControlLimits(streams=frozenset({STREAM}))
                group.create_task(serve_control(admin.app(token), admin_socket, ended, limits=limits))
                running = asyncio.gather(*[workers.keep(index, stop) for index in range(settings.workers)])
                stopping = group.create_task(workers.stop(stop))
                try:
                    await running
                finally:
                    stopping.cancel()
                    ended.set()
        finally:
            workers.kill()
            await admin.close()
            await file.close()


class Workers:
    """The workers of a gateway. Single writer: the parent's loop.

    paths: the sockets on which they serve their admin pages, by their numbers.
    """

    def __init__(
        self,
        count: int,
        public: Sequence[Mapping[str, socket.socket]],
        folder: Path,
        ledger: MemoryLedger,
        environment: Mapping[str, str],
    ) -> None:
        self._count = count
        self._ledger = ledger
        self._environment = {name: value for name, value in environment.items() if name != LIFELINE_VARIABLE}
        self._children: dict[int, ChildProcess] = {}
        self._meeting = asyncio.Barrier(count)
        self._sockets: list[dict[str, socket.socket]] = []
        self.paths = [folder / f"{index}.sock" for index in range(count)]
        for path, sockets in zip(self.paths, public, strict=True):
            admin = socket.socket(socket.AF_UNIX)
            admin.bind(str(path))
            admin.listen(BACKLOG)
            admin.setblocking(False)
            self._sockets.append({**sockets, "gateway admin": admin})

    async def keep(self, index: int, stop: asyncio.Event) -> None:
        """Run a worker, and the next one when it has died, until `stop` is set. Raises StartFailed for the first."""
        number = 0
        while not stop.is_set():
            number += 1
            holder = f"worker-{index}-{number}"
            link = await self._start(index, holder)
            child = self._children[index]
            await link.ended.wait()
            code = await asyncio.to_thread(child.wait)
            child.kill()
            del self._children[index]
            self._ledger.forget(holder)
            if stop.is_set():
                return
            if code == _REFUSED and number == 1:
                raise StartFailed(f"worker {index} could not start: see the line above")
            _log.error("worker %d ended with %d: starting another one; the others serve meanwhile", index, code)
            await asyncio.sleep(AGAIN_S)

    async def _start(self, index: int, holder: str) -> Answering:
        ours, theirs = socket.socketpair()
        with theirs:
            sockets = {name: sock.fileno() for name, sock in self._sockets[index].items()}
            worker = Worker(index=index, count=self._count, link=theirs.fileno(), sockets=sockets)
            output = error_descriptor()
            self._children[index] = ChildProcess(
                [sys.executable, *sys.orig_argv[1:]],
                environment={**self._environment, VARIABLE: msgspec.json.encode(worker).decode()},
                descriptors=(worker.link, *sockets.values()),
                stdout=None,
                stderr=output,
            )
        ours.setblocking(False)
        return await parent_link(ours, self._ledger.seat(holder), self._meeting)

    async def stop(self, stop: asyncio.Event) -> None:
        """Let all workers drain when `stop` is set."""
        await stop.wait()
        self.signal(signal.SIGTERM)

    def signal(self, number: int) -> None:
        """Send a signal to all workers."""
        for child in self._children.values():
            if child.code is None:
                os.kill(child.pid, number)

    def kill(self) -> None:
        """End what still runs, and close the sockets."""
        for child in self._children.values():
            child.kill()
        for sock in (sock for sockets in self._sockets for sock in sockets.values()):
            sock.close()


def _public_sockets(settings: Settings) -> list[dict[str, socket.socket]]:
    """Return the sockets of each worker for callers, by name. Raises StartFailed."""
    wanted = [
        ("gateway HTTP", settings.host, settings.http_port),
        ("gateway gRPC", settings.host, settings.grpc_port),
    ]
    if settings.ticket_keys:
        wanted.append(("gateway internal", settings.internal_host, settings.internal_port))
    if settings.scaler_port:
        wanted.append(("gateway scaler", settings.host, settings.scaler_port))
    found: list[dict[str, socket.socket]] = [{} for _ in range(settings.workers)]
    for what, host, port in wanted:
        with listen(host, port, what) as alone:  # refuses a port of others, also of another gateway with workers
            port = alone.getsockname()[1]
        for sockets in found:
            sockets[what] = listen(host, port, what, shared=True)
    return found


def _remember_use(settings: Settings, ledger: MemoryLedger) -> None:
    """Put what tenants used this month, before this start, into the ledger. Blocks."""
    if settings.usage_folder is None or settings.limiter != "embedded":
        return
    usage, month = Usage(), minute_of(time())[:7]
    usage.unshared = {}
    try:
        usage.read_ledger(lines_since(settings.usage_folder, f"{month}-01"), share=True)
    except OSError as error:
        _log.error("usage from before this start is not counted, because it cannot be read: %s", error)
    ledger.use[month] = sums = SharedSums(int(usage.since.timestamp()))
    sums.whole |= usage.unshared
