"""Keeps a set of units running.

Start: all at once; each must answer its readiness URL. A unit that dies before all are ready ends everything: the
reason is on stderr, printed by the unit itself. Afterwards a unit that dies is started again, after 0.2 s doubling to
5 s. Stop: in the order of the list, SIGTERM to the unit, SIGKILL to its process group when it has ended or the grace
is over; a unit that takes longer than a second is named with its own report and the time it has left. Each unit
leads a session of its own, so a Ctrl-C in the terminal reaches only the supervisor.

Should the supervisor itself be killed, the kernel closes the write end of the lifeline pipe and every unit sees it.
Processes are owned here and nowhere else; the loop is the single writer.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oriel_cli import probe
from oriel_cli.units import UnitSpec
from oriel_wire.engine.process import LIFELINE_VARIABLE
from oriel_wire.errors import StartFailed

__all__ = ["Supervisor", "Timings", "Unit"]


REAP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Time limits of a supervisor, in seconds."""

    start_s: float = 180.0
    prepare_s: float = 120.0
    probe_every_s: float = 0.05
    probe_timeout_s: float = 2.0
    first_delay_s: float = 0.2
    longest_delay_s: float = 5.0
    calm_after_s: float = 30.0
    grace_s: float = 30.0
    least_grace_s: float = 1.0
    say_after_s: float = 1.0
    say_every_s: float = 5.0


class Supervisor:
    """Runs `specs`; `say` gets one line for each event a person should see."""

    def __init__(
        self,
        specs: Sequence[UnitSpec],
        *,
        say: Callable[[str], None],
        environ: Mapping[str, str],
        timings: Timings | None = None,
    ) -> None:
        self._timings = timings or Timings()
        self._say = say
        self._lifeline, self._lifeline_held = os.pipe()
        shared = {**environ, LIFELINE_VARIABLE: str(self._lifeline)}
        self.units = [Unit(spec, shared, self._lifeline, self._timings) for spec in specs]

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
                for unit in self.units:
                    starting.create_task(unit.start())
        except* StartFailed as failed:
            raise failed.exceptions[0] from None
        await ready()
        async with asyncio.TaskGroup() as keeping:
            for unit in self.units:
                keeping.create_task(self._keep(unit))

    async def _keep(self, unit: "Unit") -> None:
        delay_s = self._timings.first_delay_s
        while True:
            ended = await unit.ended()
            if unit.lived_s >= self._timings.calm_after_s:
                delay_s = self._timings.first_delay_s
            self._say(f"{unit.name} {ended}; starting it again in {delay_s:.1f} s")
            await asyncio.sleep(delay_s)
            delay_s = min(delay_s * 2, self._timings.longest_delay_s)
            unit.restarts += 1
            try:
                await unit.start()
            except StartFailed:
                # The reason is on stderr; ended() returns at once and the next try waits longer.
                continue
            except OSError as refused:
                self._say(f"{unit.name} cannot be started: {refused.strerror}")
                continue
            self._say(f"{unit.name} is ready again (pid {unit.pid})")

    async def _stop(self) -> None:
        deadline = time.monotonic() + self._timings.grace_s
        names = ", then ".join(unit.name for unit in self.units)
        self._say(f"stopping {names}: at most {self._timings.grace_s:.0f} s, a second Ctrl-C ends them at once")
        for unit in self.units:
            # A unit that used the whole grace must not cost those behind it their own orderly end.
            await unit.stop(max(deadline, time.monotonic() + self._timings.least_grace_s), self._say)


class Unit:
    """One supervised process, over all its lives."""

    def __init__(self, spec: UnitSpec, environ: Mapping[str, str], lifeline: int, timings: Timings) -> None:
        self.spec = spec
        self.name = spec.name
        self.state = "stopped"
        self.restarts = 0
        self._environ = {**environ, **spec.environ}
        self._lifeline = lifeline
        self._timings = timings
        self._process: asyncio.subprocess.Process | None = None
        self._prepared = not spec.prepare
        self._started_s = 0.0
        self.lived_s = 0.0

    @property
    def pid(self) -> int:
        """Of the running process; 0 when there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises StartFailed when it ends or is killed before that."""
        if not self._prepared:
            self.state = "preparing"
            await self._prepare()
            self._prepared = True
        self.state = "starting"
        self._started_s = time.monotonic()
        self._process = await self._spawn(self.spec.argv)
        await self._until_ready(self._process)
        self.state = "ready"

    async def ended(self) -> str:
        """Wait until the process is gone, kill what it left in its group, and say how it ended."""
        if self._process is None:
            return "did not start"
        code = await self._process.wait()
        self.kill()
        self._process = None
        self.state = "restarting"
        self.lived_s = time.monotonic() - self._started_s
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    async def stop(self, deadline: float, say: Callable[[str], None]) -> None:
        """SIGTERM, wait until `deadline` (monotonic), SIGKILL to the whole group.

        say: gets a line about what the stop waits for.
        """
        process = self._process
        if process is None:
            return
        self.state = "stopping"
        try:
            if process.returncode is None:
                process.terminate()
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._until_ended(process, deadline, say)
        except (TimeoutError, ProcessLookupError):
            pass
        self.kill()
        await process.wait()
        self._process = None
        self.state = "stopped"

    async def _until_ended(
        self, process: asyncio.subprocess.Process, deadline: float, say: Callable[[str], None]
    ) -> None:
        ended = asyncio.ensure_future(process.wait())
        pause_s = self._timings.say_after_s
        try:
            while not (await asyncio.wait((ended,), timeout=pause_s))[0]:
                pause_s = self._timings.say_every_s
                label, path = self.spec.ready
                address = self.spec.addresses[label]
                answer = await probe.get(address.host, address.port, path, timeout_s=self._timings.probe_timeout_s)
                document = answer.document if answer is not None and isinstance(answer.document, dict) else {}
                if ended.done():
                    return
                reason = str(document.get("reason") or "it does not answer any more")
                say(f"waiting for {self.name}, at most {deadline - time.monotonic():.0f} s more: {reason}")
        finally:
            ended.cancel()

    def kill(self) -> None:
        """Send SIGKILL to what is left of the process group."""
        if self._process is not None:
            _kill_group(self._process.pid)

    async def reap(self) -> None:
        """Collect the exit status of a killed process, so that no zombie stays."""
        if self._process is not None:
            try:
                async with asyncio.timeout(REAP_S):
                    await self._process.wait()
            except TimeoutError:
                # Stuck in the kernel; it dies with its system call, and nobody can hurry it.
                return
            self._process = None

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that the unit reports; empty if it serves none or does not answer."""
        if self.spec.models is None:
            return []
        label, path = self.spec.models
        address = self.spec.addresses[label]
        answer = await probe.get(address.host, address.port, path, timeout_s=self._timings.probe_timeout_s)
        if answer is None or answer.status != 200 or not isinstance(answer.document, list):
            return []
        return [model for model in answer.document if isinstance(model, dict)]

    async def _prepare(self) -> None:
        process = await self._spawn(self.spec.prepare)
        try:
            async with asyncio.timeout(self._timings.prepare_s):
                code = await process.wait()
        except TimeoutError:
            raise StartFailed(f"preparing {self.name} took longer than {self._timings.prepare_s:.0f} s") from None
        finally:
            _kill_group(process.pid)
        if code != 0:
            raise StartFailed(f"{self.name} could not be prepared: see the line above")

    async def _spawn(self, argv: Sequence[str]) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else asyncio.subprocess.DEVNULL,
            env=self._environ,
            pass_fds=(self._lifeline,),
            start_new_session=True,
        )

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        label, path = self.spec.ready
        address = self.spec.addresses[label]
        deadline = time.monotonic() + self._timings.start_s
        reason = "it does not answer"
        while process.returncode is None:
            answer = await probe.get(address.host, address.port, path, timeout_s=self._timings.probe_timeout_s)
            if answer is not None and answer.status == 200:
                return
            if answer is not None and isinstance(answer.document, dict):
                reason = str(answer.document.get("reason") or reason)
            if time.monotonic() > deadline:
                self.kill()
                raise StartFailed(f"{self.name} is not ready after {self._timings.start_s:.0f} s: {reason}")
            await asyncio.sleep(self._timings.probe_every_s)
        raise StartFailed(f"{self.name} could not start: see the line above")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # Gone already; macOS says EPERM when only zombies are left.
        pass


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
