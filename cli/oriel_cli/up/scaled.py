"""The processes of one pool of the gateway, started and stopped as its demand asks for.

Each process keeps its ports for as long as `oriel up` runs: the gateway knows all of them as addresses of the pool, and
finds out by probes which ones serve. One process that is not needed waits as a spare with its imports done (`spare`).
"""

import asyncio
import time
from collections.abc import Callable, Sequence

from oriel_cli.up.unit import Timings, Unit
from oriel_wire.errors import StartFailed


class ScaledUnit:
    """Runs as many of `units` as are wanted, the first ones first. Single writer: the loop.

    needs: the processes that these call; one of them runs as long as any of these runs.
    changed: called whenever the number of running, starting or stopping processes has changed.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        say: Callable[[str], None],
        changed: Callable[["ScaledUnit"], None],
        timings: Timings,
    ) -> None:
        self.units = units
        self.name = units[0].name
        self.pool = units[0].spec.pool
        self.minimum = units[0].spec.minimum
        self.needs: ScaledUnit | None = None
        self._say = say
        self._changed = changed
        self._timings = timings
        self._demanded = self._needed = 0
        self._served = asyncio.Event()  # set while one of the processes is ready
        # for each unit: set while it is wanted; set while it is not
        self._turns = [(asyncio.Event(), asyncio.Event()) for _ in units]
        for _, unwanted in self._turns:
            unwanted.set()
        self._news = asyncio.Event()
        self._shown = "asleep"

    def count(self, *states: str) -> int:
        """Return how many of the processes are in one of these states of `Unit`."""
        return sum(unit.state in states for unit in self.units)

    @property
    def summary(self) -> str:
        """Describe the state in words: `asleep`, or how many processes run, start and stop."""
        parts = [("running", "ready"), ("starting", "starting"), ("starting again", "restarting")]
        numbers = [(words, self.count(state)) for words, state in [*parts, ("stopping", "stopping")]]
        return ", ".join(f"{number} {words}" for words, number in numbers if number) or "asleep"

    def want(self, count: int) -> None:
        """Run as many processes as the pool's demand asks for, within the bounds of the pool."""
        self._demanded = max(self.minimum, min(len(self.units), count))
        self._assign()

    def wake(self) -> None:
        """Run at least one process."""
        self.want(max(1, self._demanded))

    def _assign(self) -> None:
        wanted = max(self._demanded, self._needed)
        if self.needs is not None:
            # also while the last of these stops: it answers calls that have begun
            self.needs._needed = min(max(wanted, self.count("starting", "ready", "restarting", "stopping")), 1)
            self.needs._assign()
        running = [index for index, (is_wanted, _) in enumerate(self._turns) if is_wanted.is_set()]
        for index in running[wanted:]:
            self._turn(index, False)
        idle = [index for index in range(len(self.units)) if index not in running]
        idle.sort(key=self._readiness)
        for index in idle[: max(0, wanted - len(running))]:
            self._turn(index, True)

    def _readiness(self, index: int) -> int:
        """Order the processes that do not run: a spare is up first, one that still stops last."""
        unit = self.units[index]
        return 0 if unit.has_spare else 2 if unit.state == "stopping" else 1

    def _turn(self, index: int, on: bool) -> None:
        wanted, unwanted = self._turns[index]
        (unwanted.clear if on else unwanted.set)()
        (wanted.set if on else wanted.clear)()

    async def run(self) -> None:
        """Start and stop the processes; does not return."""
        async with asyncio.TaskGroup() as group:
            for unit, turn in zip(self.units, self._turns, strict=True):
                group.create_task(self._follow(unit, *turn))
            group.create_task(self._keep_spare())

    async def _follow(self, unit: Unit, wanted: asyncio.Event, unwanted: asyncio.Event) -> None:
        delay_s = self._timings.first_delay_s
        while True:
            if not wanted.is_set():
                unit.rest()
                self._note()
            await wanted.wait()
            if self.needs is not None:
                await self.needs._served.wait()
            if not wanted.is_set():
                continue
            try:
                starting = asyncio.ensure_future(unit.start())
                await asyncio.sleep(0)
                self._note()
                await starting
            except StartFailed:
                pass  # the reason is on stderr
            except OSError as refused:
                self._say(f"{unit.name} cannot be started: {refused.strerror}")
            else:
                self._note()
                ended = asyncio.ensure_future(unit.exited())
                off = asyncio.ensure_future(unwanted.wait())
                try:
                    await asyncio.wait((ended, off), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    off.cancel()
                    if not ended.done():
                        ended.cancel()
                if not ended.done():
                    await self._stop(unit)
                    delay_s = self._timings.first_delay_s
                    continue
                await self._again(unit, ended.result(), delay_s)
                calm = unit.served_s >= self._timings.calm_after_s
                delay_s = self._timings.first_delay_s if calm else min(delay_s * 2, self._timings.longest_delay_s)
                continue
            await self._again(unit, await unit.exited(), delay_s)
            delay_s = min(delay_s * 2, self._timings.longest_delay_s)

    async def _again(self, unit: Unit, ended: str, delay_s: float) -> None:
        self._say(f"{unit.name} {ended}; starting it again in {delay_s:.1f} s")
        self._note()
        await asyncio.sleep(delay_s)

    async def _stop(self, unit: Unit) -> None:
        stopping = asyncio.ensure_future(unit.stop(time.monotonic() + self._timings.grace_s, self._say))
        try:
            await asyncio.sleep(0)
            self._note()
            await stopping
        finally:
            stopping.cancel()
        self._note()

    def _note(self) -> None:
        """Notify those that wait for a change of the processes' states."""
        (self._served.set if self.count("ready") else self._served.clear)()
        if self.needs is not None:
            self._assign()
        self._news.set()
        if self.summary != self._shown:
            self._shown = self.summary
            self._changed(self)

    async def _keep_spare(self) -> None:
        """Keep one spare process, but start none while another process starts: the spare's imports would slow that one
        down.
        """
        while True:
            turns = zip(self.units, self._turns, strict=True)
            idle = [unit for unit, (wanted, _) in turns if unit.state in ("asleep", "spare") and not wanted.is_set()]
            if idle and not self.count("starting", "preparing") and not any(unit.has_spare for unit in idle):
                try:
                    await idle[0].keep_spare()
                except OSError as refused:
                    self._say(f"no spare process for {self.name}: {refused.strerror}")
            self._news.clear()
            try:
                async with asyncio.timeout(self._timings.say_every_s):
                    await self._news.wait()
            except TimeoutError:
                pass  # check from time to time that the spare process is still alive
