"""One worker process as the loop sees it: a socket on which one job goes out and one answer comes back."""

import asyncio
import os
import signal
from typing import Protocol, cast

from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, Unframer
from oriel_logic.workers.job import Job

__all__ = ["Owner", "Worker"]


class Owner(Protocol):
    """Who is told. `gone` comes exactly once, last."""

    def ready(self, worker: "Worker", frame: Frame) -> None: ...
    def answered(self, worker: "Worker", job: Job, frame: Frame) -> None: ...
    def gone(self, worker: "Worker", job: Job | None) -> None: ...


class Worker(asyncio.Protocol):
    """`job` is what it works on; `is_ready` once its services are set up; `pid` 0 until known."""

    def __init__(self, owner: Owner, token: int, *, limit_bytes: int) -> None:
        self.token = token
        self.pid = 0
        self.is_ready = False
        self.job: Job | None = None
        self._owner = owner
        self._unframer = Unframer(limit_bytes)
        self._transport: asyncio.Transport | None = None
        self._overrun: asyncio.TimerHandle | None = None

    @property
    def is_connected(self) -> bool:
        """Whether `gone` will come."""
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def begin(self, job: Job, *, kill_after_s: float) -> None:
        """Send `job`; the process is killed if no answer comes within `kill_after_s`."""
        assert self._transport is not None and self.job is None
        self.job = job
        job.started = True
        self._overrun = asyncio.get_running_loop().call_later(kill_after_s, self.kill)
        self._transport.write(job.frame)

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._unframer.feed(data)
        except (FrameTooLarge, ValueError):
            self.kill()  # it does not speak our protocol any more
            return
        for frame in frames:
            if frame.kind is Kind.READY:
                self.is_ready = True
                self._owner.ready(self, frame)
            elif self.job is not None:
                job, self.job = self.job, None
                self._rest()
                self._owner.answered(self, job, frame)

    def connection_lost(self, error: Exception | None) -> None:
        job, self.job = self.job, None
        self._rest()
        self._owner.gone(self, job)

    def kill(self) -> None:
        """End the process at once. `gone` follows."""
        if self.pid:
            try:
                os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.pid = 0
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Let an idle process go: it leaves when its socket ends."""
        if self._transport is not None:
            self._transport.abort()

    def _rest(self) -> None:
        if self._overrun is not None:
            self._overrun.cancel()
            self._overrun = None
