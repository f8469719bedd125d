"""Units that are scaled by demand: real processes, with a test in the place of the gateway's scaler."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from oriel_cli.up.scaled import ScaledUnit
from oriel_cli.up.supervisor import Supervisor
from oriel_cli.up.unit import Timings
from oriel_cli.up.units import UnitSpec

from ..waiting import until
from .supervised import QUICK, alive, check_killed, gone, spec

SPARE = "import os, sys; os.read(0, 1) and os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def processes(pool: str, count: int, *how: str, minimum: int = 0, needs: str = "") -> list[UnitSpec]:
    found = []
    for number in range(1, count + 1):
        one = spec(f"{pool}-{number}" if number > 1 else pool, *how)
        spare = [sys.executable, "-S", "-c", SPARE, *one.argv[1:]]
        found.append(replace(one, pool=pool, minimum=minimum, needs=needs, spare=spare))
    return found


class Scaled:
    """A supervisor of scaled units. shown: the summaries of each, in order."""

    def __init__(self, *specs: UnitSpec, timings: Timings = QUICK) -> None:
        self.said: list[str] = []
        self.shown: dict[str, list[str]] = {}
        self.units: dict[str, ScaledUnit] = {}
        self.stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.supervisor = Supervisor(
            specs, say=self._say, environ=environ, timings=timings, changed=self._show, scaler=self._scale
        )

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._changed.set()

    def _show(self, unit: ScaledUnit) -> None:
        self.shown.setdefault(unit.name, []).append(unit.summary)
        self._changed.set()

    async def _scale(self, units: Sequence[ScaledUnit]) -> None:
        self.units = {unit.name: unit for unit in units}
        self._begun.set()
        await asyncio.Event().wait()

    async def until(self, name: str, summary: str) -> None:
        while self.units[name].summary != summary:
            self._changed.clear()
            await self._changed.wait()

    async def until_spare(self, name: str) -> int:
        """Wait for the spare process; returns its process id."""
        units = self.units[name].units
        spare = await until(lambda: next((unit._spare for unit in units if unit.has_spare), None))
        return int(spare.pid)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async def ready() -> None:
            pass

        task = asyncio.create_task(self.supervisor.run(self.stop, ready))
        try:
            await self._begun.wait()
            yield
        finally:
            self.stop.set()
            await task


async def test_nothing_runs_before_it_is_wanted_but_a_spare_that_is_used_first() -> None:
    scaled = Scaled(*processes("one", 2))
    async with scaled.running():
        unit = scaled.units["one"]
        assert unit.summary == "asleep" and not any(each.pid for each in unit.units)
        spare = await scaled.until_spare("one")
        unit.wake()
        await scaled.until("one", "1 running")
        assert [each.pid for each in unit.units if each.pid] == [spare]
        other = await scaled.until_spare("one")
        assert other != spare
        unit.want(0)
        await scaled.until("one", "asleep")
        assert not alive(spare) and alive(other)
    assert not alive(other)
    assert scaled.shown["one"][:3] == ["1 starting", "1 running", "1 stopping"]


async def test_the_number_follows_what_is_wanted_within_bounds() -> None:
    scaled = Scaled(*processes("one", 3, minimum=1))
    async with scaled.running():
        unit = scaled.units["one"]
        unit.want(9)
        await scaled.until("one", "3 running")
        unit.want(0)
        await scaled.until("one", "1 running")


async def test_a_spare_that_was_killed_is_replaced_by_a_usual_start() -> None:
    scaled = Scaled(*processes("one", 1))
    async with scaled.running():
        spare = await scaled.until_spare("one")
        os.kill(spare, signal.SIGKILL)
        await gone(spare)
        scaled.units["one"].wake()
        await scaled.until("one", "1 running")


async def test_a_scaled_process_that_dies_is_started_again_while_it_is_wanted() -> None:
    scaled = Scaled(*processes("one", 1))
    async with scaled.running():
        unit = scaled.units["one"]
        unit.wake()
        await scaled.until("one", "1 running")
        first = unit.units[0].pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: any("was killed by SIGKILL" in line for line in scaled.said))
        await scaled.until("one", "1 running")
        assert unit.units[0].pid != first


async def test_a_process_that_cannot_start_is_tried_again_and_given_up_with_the_demand() -> None:
    scaled = Scaled(*processes("one", 1, "fail"))
    async with scaled.running():
        unit = scaled.units["one"]
        unit.wake()
        await until(lambda: sum("starting it again" in line for line in scaled.said) >= 2)
        unit.want(0)
        await scaled.until("one", "asleep")


async def test_what_a_unit_calls_runs_as_long_as_that_unit() -> None:
    """Services call models themselves: the gateway does not see that a model is needed."""
    scaled = Scaled(*processes("caller", 1, needs="called"), *processes("called", 1))
    async with scaled.running():
        scaled.units["caller"].wake()
        await scaled.until("caller", "1 running")
        assert scaled.units["called"].summary == "1 running"
        scaled.units["called"].want(0)
        assert scaled.units["called"].summary == "1 running"
        scaled.units["caller"].want(0)
        await scaled.until("called", "asleep")


async def test_what_a_unit_calls_runs_until_that_unit_has_stopped(tmp_path: Path) -> None:
    """A service that finished its last call was left without its model: both units were stopped in one moment."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    scaled = Scaled(*processes("caller", 1, "slow", str(gate), needs="called"), *processes("called", 1))
    async with scaled.running():
        scaled.units["caller"].wake()
        await scaled.until("caller", "1 running")
        scaled.units["caller"].want(0)
        await scaled.until("caller", "1 stopping")
        assert scaled.units["called"].summary == "1 running"
        await asyncio.to_thread(gate.write_bytes, b"x")
        await scaled.until("called", "asleep")
        assert scaled.units["caller"].summary == "asleep"


KILLED = """
import asyncio, os, sys
sys.path[:0] = {path!r}
from oriel_cli.up.supervisor import Supervisor
from tests.cli.test_scaled import processes

async def scale(units):
    (unit,) = units
    unit.wake()
    while not (unit.count("ready") and any(each.has_spare for each in unit.units)):
        await asyncio.sleep(0.01)
    print(*(each.pid or each._spare.pid for each in unit.units), flush=True)

async def main():
    supervisor = Supervisor(processes("one", 2), say=print, environ=os.environ, scaler=scale)
    async def ready():
        pass
    await supervisor.run(asyncio.Event(), ready)
asyncio.run(main())
"""


async def test_scaled_and_spare_processes_end_when_the_supervisor_is_killed() -> None:
    await check_killed(KILLED)
