"""Keeps a set of units running.

Start: all at once; each must answer its readiness URL. A unit that dies before all are ready ends everything: the
reason is on stderr, printed by the unit itself. Afterwards a unit that dies is started again, after 0.2 s doubling to
5 s, and after 0.2 s again once it has been ready for 30 s. Stop: in the order of the list; if the gateway had no call,
those behind it end together once it has ended. SIGTERM to the unit, SIGKILL to its process group when it has ended or
the grace is over; a unit that takes longer than a second is named with its own report and the time it has left. Each
unit leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor.

Units with a `pool` are not started but scaled: `scaled` runs as many of them as the gateway's scaler asks for.

Should the supervisor itself be killed, the kernel closes the write end of the lifeline pipe and every unit sees it.
Processes are owned here and nowhere else; the loop is the single writer.
"""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from itertools import groupby
from typing import Any

from oriel_cli import probe
from oriel_cli.up.forks import Forks
from oriel_cli.up.scaled import ScaledUnit
from oriel_cli.up.unit import Timings, Unit
from oriel_cli.up.units import UnitSpec
from oriel_wire.errors import StartFailed
from oriel_wire.process.process import LIFELINE_VARIABLE


class Supervisor:
    """Runs `specs`; `say` gets one line for each event a person should see, `changed` a unit whose numbers changed.

    scaler: follows the demand for the scaled units.
    forks: the processes that were forked for these units.
    """

    def __init__(
        self,
        specs: Sequence[UnitSpec],
        *,
        say: Callable[[str], None],
        environ: Mapping[str, str],
        timings: Timings | None = None,
        changed: Callable[[ScaledUnit], None] = lambda unit: None,
        scaler: Callable[[Sequence[ScaledUnit]], Coroutine[Any, Any, None]] | None = None,
        forks: Forks | None = None,
    ) -> None:
        self._timings = timings or Timings()
        self._say = say
        forks = forks or Forks(lifeline=os.pipe(), pids={})
        self._lifeline, self._lifeline_held = forks.lifeline
        shared = {**environ, LIFELINE_VARIABLE: str(self._lifeline)}
        self.units = [Unit(spec, shared, self._lifeline, self._timings, forks.pids.get(spec.name, 0)) for spec in specs]
        self._always = [unit for unit in self.units if not unit.spec.pool]
        self._scaler = scaler
        self.scaled = [
            ScaledUnit(
                [unit for unit in self.units if unit.spec.pool == pool],
                say=say,
                changed=changed,
                timings=self._timings,
            )
            for pool in dict.fromkeys(unit.spec.pool for unit in self.units if unit.spec.pool)
        ]
        by_pool = {scaled.pool: scaled for scaled in self.scaled}
        for scaled in self.scaled:
            scaled.needs = by_pool.get(scaled.units[0].spec.needs)

    async def run(self, stop: asyncio.Event, ready: Callable[[], Awaitable[None]]) -> None:
        """Start all, call `ready` once, keep them running until `stop`; nothing is left running on return.

        Raises StartFailed when a unit cannot start. Cancelled: process groups are killed at once.
        """
        patient = True
        try:
            await _until(stop, self._serve(ready))
        except asyncio.CancelledError:
            patient = False
            raise
        finally:
            try:
                if patient:
                    await self._stop()
            finally:
                for unit in self.units:
                    unit.kill()
                os.close(self._lifeline_held)
                os.close(self._lifeline)
                await asyncio.gather(*(unit.reap() for unit in self.units))

    async def _serve(self, ready: Callable[[], Awaitable[None]]) -> None:
        try:
            async with asyncio.TaskGroup() as starting:
                for unit in self._always:
                    starting.create_task(unit.start())
                for scaled in self.scaled:
                    starting.create_task(scaled.units[0].prepare())
        except* StartFailed as failed:
            raise failed.exceptions[0] from None
        await ready()
        async with asyncio.TaskGroup() as keeping:
            for unit in self._always:
                keeping.create_task(self._keep(unit))
            for scaled in self.scaled:
                keeping.create_task(scaled.run())
            if self._scaler is not None:
                keeping.create_task(self._scaler(self.scaled))

    async def _keep(self, unit: "Unit") -> None:
        delay_s = self._timings.first_delay_s
        while True:
            ended = await unit.exited()
            if unit.served_s >= self._timings.calm_after_s:
                delay_s = self._timings.first_delay_s
            self._say(f"{unit.name} {ended}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, self._timings.longest_delay_s)
            try:
                await unit.start()
            except StartFailed:
                # The reason is on stderr. `exited` returns at once, and the next try waits longer.
                continue
            except OSError as refused:
                self._say(f"{unit.name} cannot be started: {refused.strerror}")
                continue
            self._say(f"{unit.name} is ready again (pid {unit.pid})")

    async def _stop(self) -> None:
        deadline = time.monotonic() + self._timings.grace_s
        names = ", then ".join(unit.name for unit in self.units if unit.pid or not unit.spec.pool)
        self._say(f"stopping {names}: at most {self._timings.grace_s:.0f} s, a second Ctrl-C ends them at once")
        turns = [list(units) for _, units in groupby(self.units, key=lambda unit: unit.spec.pool or unit.name)]
        if await self._idle():
            turns[1:] = [self.units[len(turns[0]) :]]  # until the gateway has ended, new calls need the others
        for units in turns:
            # A unit that used the whole grace must not take the time of those behind it to stop in an orderly way.
            until = max(deadline, time.monotonic() + self._timings.least_grace_s)
            await asyncio.gather(*(unit.stop(until, self._say) for unit in units))

    async def _idle(self) -> bool:
        """Return whether the gateway has no call, so that the units behind it may stop together."""
        admin = self.units[0].spec.addresses.get("admin")
        found = None
        if admin is not None and self.units[0].state == "ready":
            found = await probe.get(admin.host, admin.port, "/queues", timeout_s=self._timings.idle_s)
        pools = found.document if found is not None else None
        return isinstance(pools, dict) and bool(pools) and not any(pool.get("calls", 1) for pool in pools.values())


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until it ends or `stop` is set; its error passes through."""
    task = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
    finally:
        stopped.cancel()
        task.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
