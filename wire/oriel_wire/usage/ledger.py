"""Writes what a server's book of usage has gained, each second, to the usage ledger; and ships sealed segments.

The loop reads the counters, one thread writes them. A write that fails is tried again with the next second's: nothing
is counted twice, because the lines are kept until they are on the disk. More than MAX_HELD_LINES are not kept; what was
lost is counted.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import Location, ObjectWriter
from oriel_wire.objects.errors import ClientUnusable, ObjectStoreError
from oriel_wire.objects.opening import open_writer
from oriel_wire.usage.files import UsageFiles, minute_of
from oriel_wire.usage.lines import LedgerCounts, UsageLine, merge

_log = logging.getLogger(__name__)
T = TypeVar("T")

APPEND_S = 0.95  # with the time of the write itself, no more than a second is lost
MAX_HELD_LINES = 100_000
SHIP_RETRY_S = 10.0
STOP_S = 10.0


class Shipping(NamedTuple):
    """A place for sealed segments. prefix: begins their keys in the store."""

    store: ObjectWriter
    prefix: str = ""


class UsageLedger:
    """The ledger of one server. Single writer: the loop.

    read: returns what was used since its last call, as lines of the given minute.
    ship_to: the store of sealed segments, None keeps them on this machine.
    folder: the folder of its segments. instance: the first part of their names.
    """

    def __init__(
        self,
        folder: Path,
        unit: str,
        read: Callable[[str], list[UsageLine]],
        *,
        ship_to: Shipping | None = None,
        now_s: Callable[[], float] = time.time,
        max_held: int = MAX_HELD_LINES,
    ) -> None:
        self.folder = folder
        self._unit = unit
        self._read = read
        self._ship_to = ship_to
        self._now_s = now_s
        self._max_held = max_held
        self.instance = uuid4().hex[:16]
        self._files: UsageFiles | None = None
        self._thread = ThreadPoolExecutor(1, "oriel-usage")
        self._held: list[UsageLine] = []
        self._pruned_hour = ""
        self._ship_after_s = 0.0
        self._closed = False
        self._writing = asyncio.Lock()
        self.counts = LedgerCounts()

    async def run(self) -> None:
        """Write each second until the ledger is closed. Close it before this is cancelled."""
        self._hold([UsageLine(kind="start", minute=minute_of(self._now_s()), unit=self._unit)])
        while not self._closed:
            due = time.monotonic() + APPEND_S
            await self.write()
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def write(self) -> None:
        """Write what was used since the last time, and ship what is sealed. Does not raise."""
        async with self._writing:
            if not self._closed:
                await self._write()

    async def _write(self) -> None:
        minute = minute_of(self._now_s())
        self._hold(self._read(minute))
        lines, self._held = self._held, []
        try:
            await self._in_thread(lambda: self._append(minute, lines))
        except OSError as error:
            if not self.counts.write_failures:
                _log.error("usage is not recorded now: %s cannot be written (%s)", self.folder, error.strerror)
            self.counts.write_failures += 1
            self.counts.write_error = f"{self.folder} ({error.strerror})"
            self._hold(lines)
            return
        self.counts.write_error = ""
        await self._ship()

    async def close(self) -> None:
        """Write and seal what is left, and ship it if the store answers in time."""
        async with self._writing:
            self._closed = True
            await self._finish()

    async def _finish(self) -> None:
        minute = minute_of(self._now_s())
        self._hold([*self._read(minute), UsageLine(kind="stop", minute=minute, unit=self._unit)])
        try:
            await self._in_thread(lambda: self._append(minute, self._held, seal=True))
        except OSError as error:
            _log.error("the usage of the last seconds is not recorded: %s", error)
        self._ship_after_s = 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._ship()
        if self._ship_to is not None:
            await self._ship_to.store.close()
        self._thread.shutdown()

    def _hold(self, lines: list[UsageLine]) -> None:
        self._held += lines
        if len(self._held) > self._max_held:
            self._held = merge(self._held)
        if (beyond := len(self._held) - self._max_held) > 0:
            if not self.counts.lost_lines:
                _log.error("usage is lost: over %d lines wait until %s can be written", self._max_held, self.folder)
            self.counts.lost_lines += beyond
            del self._held[:beyond]

    def _append(self, minute: str, lines: list[UsageLine], *, seal: bool = False) -> None:
        files = self._files
        if files is None:
            files = self._files = UsageFiles(self.folder, self.instance)
            if files.recovered:
                _log.warning(
                    "usage of a crashed server is recovered to its last write, %.1f s ago (it wrote each second): %s",
                    files.lost_s,
                    ", ".join(files.recovered[:8]),
                )
        # Lines that had to be kept may be of earlier minutes; a segment has the lines of one.
        for each in sorted({line.minute for line in lines}) or [minute]:
            files.append(each, [line for line in lines if line.minute == each])
            lines[:] = [line for line in lines if line.minute != each]
        if seal:
            files.seal()
        if minute[:13] != self._pruned_hour:
            self._pruned_hour = minute[:13]
            if deleted := files.prune():
                self.counts.lost_segments += deleted
                _log.warning("usage: %d old segments were deleted, because the folder is full", deleted)

    async def _ship(self) -> None:
        """Send sealed segments to the store, and delete what it has confirmed."""
        ship_to, files = self._ship_to, self._files
        if ship_to is None or files is None or self._now_s() < self._ship_after_s:
            return
        try:
            for path in await self._in_thread(files.sealed_segments):
                data = await self._in_thread(path.read_bytes)
                await ship_to.store.put(ship_to.prefix + files.key(path), data)
                await self._in_thread(partial(path.unlink, missing_ok=True))
        except FileNotFoundError:
            pass  # another server with the same folder has shipped it
        except (ObjectStoreError, OSError) as error:
            if not self.counts.ship_failures:
                _log.error("usage could not be sent to the store: %s; trying again", error)
            self.counts.ship_failures += 1
            self._ship_after_s = self._now_s() + SHIP_RETRY_S

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def open_ledger(
    folder: Path, unit: str, read: Callable[[str], list[UsageLine]], *, store: Location | None = None
) -> UsageLedger:
    """Return a ledger. store: takes its segments. Raises StartFailed if there can be no client for it."""
    if store is None:
        return UsageLedger(folder, unit, read)
    try:
        return UsageLedger(folder, unit, read, ship_to=Shipping(open_writer(store), store.prefix))
    except ClientUnusable as error:
        raise StartFailed(f"--usage-store: {error}") from error
