"""The parent of the workers of a gateway: it owns their sockets, keeps their ledger, and starts a dead one again.

Each worker listens on sockets of its own at the same addresses (SO_REUSEPORT), over which the kernel spreads
connections. When one has died, its sockets are replaced by ones that get no connections before the next one serves.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import time
from typing import Final

import msgspec

from oriel_gateway.admin.guard import admin_token
from oriel_gateway.admin.workers import STREAM, WorkersAdmin
from oriel_gateway.limits.memory_ledger import MemoryLedger
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.limits.worker_link import Together, parent_link
from oriel_gateway.observe.usage import Usage
from oriel_gateway.settings import Settings
from oriel_policies.bounds.ledger_rules import SharedSums
from oriel_wire.errors import StartFailed
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.logs import error_descriptor
from oriel_wire.process.process import LIFELINE_VARIABLE, listen
from oriel_wire.process.questions import Answering
from oriel_wire.process.start import ChildProcess
from oriel_wire.process.worker import VARIABLE, Worker
from oriel_wire.usage.files import lines_since, minute_of

_log = logging.getLogger(__name__)
ADMIN: Final = "gateway admin"
AGAIN_S: Final = 1.0  # between two starts of a worker that dies; twice as long each time that it has not served
MOST_AGAIN_S: Final = 30.0


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
    with _folder() as folder:
        paths = [Path(folder) / f"{index}.sock" for index in range(settings.workers)]
        admin, ended = WorkersAdmin(paths, stop.is_set, lambda: workers.together.started), asyncio.Event()
        workers = Workers(paths, public, ledger, environment, admin.ended)
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

    paths: the sockets on which they serve their admin pages, by their numbers. public: those for callers.
    environment: their variables. ended: called with the number of one that has ended. Raises StartFailed.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        public: Sequence[Mapping[str, socket.socket]],
        ledger: MemoryLedger,
        environment: Mapping[str, str],
        ended: Callable[[int], None],
    ) -> None:
        self._paths = paths
        self._ended = ended
        self._ledger = ledger
        self._environment = {name: value for name, value in environment.items() if name != LIFELINE_VARIABLE}
        self._children: dict[int, ChildProcess] = {}
        self.together = Together(len(paths))
        self._sockets = [{**sockets, ADMIN: _bound(path)} for path, sockets in zip(paths, public, strict=True)]

    async def keep(self, index: int, stop: asyncio.Event) -> None:
        """Run a worker, and the next one when it has died, until `stop` is set.

        Raises StartFailed if the first one ends before it serves.
        """
        number, again_s = 0, AGAIN_S
        while not stop.is_set():
            number += 1
            holder = f"worker-{index}-{number}"
            link = await self._start(index, holder)
            child = self._children[index]
            await link.ended.wait()
            if not stop.is_set():
                self._renew(index)
            code = await asyncio.to_thread(child.wait)
            child.kill()
            del self._children[index]
            self._ledger.forget(holder)
            self._ended(index)
            served = self.together.forget(holder)
            if stop.is_set():
                return
            if not served and number == 1:
                raise StartFailed(f"worker {index} ended with {code} before it served: see the lines above")
            again_s = AGAIN_S if served else min(2 * again_s, MOST_AGAIN_S)
            _log.error(
                "worker %d (process %d) ended with %d: starting another one; the others serve meanwhile",
                *(index, child.pid, code),
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), again_s)

    def _renew(self, index: int) -> None:
        """Replace the sockets of a worker that has died: the kernel gives their connections to the other workers."""
        sockets = self._sockets[index]
        for name, sock in sockets.items():
            address = sock.getsockname()
            sock.close()
            if name == ADMIN:
                self._paths[index].unlink(missing_ok=True)
                sockets[name] = _bound(self._paths[index])
            else:
                sockets[name] = listen(address[0], address[1], name, shared=True, opened=False)

    async def _start(self, index: int, holder: str) -> Answering:
        ours, theirs = socket.socketpair()
        with theirs:
            sockets = {name: sock.fileno() for name, sock in self._sockets[index].items()}
            worker = Worker(index=index, count=len(self._paths), link=theirs.fileno(), sockets=sockets)
            output = error_descriptor()
            self._children[index] = ChildProcess(
                [sys.executable, *sys.orig_argv[1:]],
                environment={**self._environment, VARIABLE: msgspec.json.encode(worker).decode()},
                descriptors=(worker.link, *sockets.values()),
                stdout=None,
                stderr=output,
            )
        ours.setblocking(False)
        return await parent_link(ours, self._ledger.seat(holder), holder, self.together)

    async def stop(self, stop: asyncio.Event) -> None:
        """Let all workers drain when `stop` is set; then they alone have the sockets, and close them in their time."""
        await stop.wait()
        self.signal(signal.SIGTERM)
        for sock in (sock for sockets in self._sockets for sock in sockets.values()):
            sock.close()

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


def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder for this user's eyes alone. Raises StartFailed."""
    try:
        return tempfile.TemporaryDirectory(prefix="oriel-workers-")
    except OSError as error:
        raise StartFailed(f"workers need a folder for their sockets ({error}): set TMPDIR to one") from error


def _bound(path: Path) -> socket.socket:
    """Return a socket at `path` that does not listen yet. Raises StartFailed."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        reason = f"the workers' socket {path} cannot be made ({error}): set TMPDIR to another folder"
        raise StartFailed(reason) from error
    sock.setblocking(False)
    return sock


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
