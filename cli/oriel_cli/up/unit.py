"""One supervised process, over all its lives."""

import asyncio
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oriel_cli import probe
from oriel_cli.up.units import UnitSpec
from oriel_wire.errors import StartFailed
from oriel_wire.process.forked import Forked
from oriel_wire.process.logs import error_descriptor

REAP_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Time limits of a supervisor, in seconds."""

    start_s: float = 180.0
    prepare_s: float = 120.0
    probe_every_s: float = 0.02
    probe_timeout_s: float = 2.0
    first_delay_s: float = 0.2
    longest_delay_s: float = 5.0
    calm_after_s: float = 30.0
    grace_s: float = 30.0
    least_grace_s: float = 1.0
    say_after_s: float = 1.0
    idle_s: float = 2.0
    say_every_s: float = 5.0


class Unit:
    """One supervised process, over all its lives. forked: id of a process that is its first one; 0 for none."""

    def __init__(
        self, spec: UnitSpec, environ: Mapping[str, str], lifeline: int, timings: Timings, forked: int = 0
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self._resting = self.state = "asleep" if spec.pool else "stopped"
        self._environ = {**environ, **spec.environ}
        self._lifeline = lifeline
        self._timings = timings
        self._forked = forked
        self._process: asyncio.subprocess.Process | Forked | None = None
        self._spare: asyncio.subprocess.Process | None = None
        self._spawning = asyncio.Lock()
        self._prepared = not spec.prepare
        self._ready_since_s = math.inf
        self.served_s = -math.inf

    @property
    def pid(self) -> int:
        """Return the id of the running process; 0 if there is none."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process and wait until it is ready. Raises StartFailed when it ends or is killed before that."""
        await self.prepare()
        async with self._spawning:
            self.state = "starting"
            self._ready_since_s = math.inf
            if self._forked:
                self._process, self._forked = Forked(self._forked), 0
            else:
                self._process = self._started_spare() or await self._spawn(self.spec.argv)
        await self._until_ready(self._process)
        self._ready_since_s = time.monotonic()
        self.state = "ready"

    async def prepare(self) -> None:
        """Run the command that comes before the first start, unless it has been run. Raises StartFailed."""
        if not self._prepared:
            self.state = "preparing"
            await self._prepare()
            self._prepared = True
            self.state = self._resting

    @property
    def has_spare(self) -> bool:
        """Return whether a spare process waits, which `start` will use."""
        return self._spare is not None and self._spare.returncode is None

    async def keep_spare(self) -> None:
        """Start a spare process that does its imports and waits for `start`, unless there is one or the unit runs."""
        async with self._spawning:
            if self.state in ("asleep", "spare") and not self.has_spare:
                self._spare = await self._spawn(self.spec.spare, stdin=asyncio.subprocess.PIPE)
                self.state = "spare"

    def _started_spare(self) -> asyncio.subprocess.Process | None:
        spare, self._spare = self._spare, None
        if spare is None or spare.returncode is not None:
            return None
        assert spare.stdin is not None
        spare.stdin.write(b"\n")
        spare.stdin.close()
        return spare

    def rest(self) -> None:
        """Cancel the restart that this unit waits for."""
        if self.state == "restarting":
            self.state = self._resting

    async def exited(self) -> str:
        """Wait until the process is gone, kill what it left in its group, and say how it ended."""
        if self._process is None:
            return "did not start"
        code = await self._process.wait()
        self.kill()
        self._process = None
        self.state = "restarting"
        self.served_s = time.monotonic() - self._ready_since_s
        return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"

    async def stop(self, deadline: float, say: Callable[[str], None]) -> None:
        """SIGTERM, wait until `deadline` (monotonic), SIGKILL to the whole group.

        say: gets a line about what the stop waits for.
        """
        process = self._process
        if self._spare is not None:
            _kill_group(self._spare.pid)
            await self._spare.wait()
            self._spare = None
            self.state = self._resting
        if process is None:
            return
        repeated, self.state = self.state == "stopping", "stopping"
        try:
            if process.returncode is None:
                if not repeated:  # a second signal would end the process at once
                    process.terminate()
                async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                    await self._until_ended(process, deadline, say)
        except (TimeoutError, ProcessLookupError):
            pass
        self.kill()
        await process.wait()
        self._process = None
        self.state = self._resting

    async def _until_ended(
        self, process: asyncio.subprocess.Process | Forked, deadline: float, say: Callable[[str], None]
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
        """Send SIGKILL to what is left of the process group, and to a spare process."""
        for process in (self._process, self._spare):
            if process is not None:
                _kill_group(process.pid)

    async def reap(self) -> None:
        """Collect the exit status of a killed process, so that no zombie stays."""
        try:
            async with asyncio.timeout(REAP_S):
                for process in (self._process, self._spare):
                    if process is not None:
                        await process.wait()
        except TimeoutError:
            # The process is stuck in the kernel. It dies when its system call returns, and nothing can hurry that.
            return
        self._process = self._spare = None

    async def models(self) -> list[dict[str, Any]]:
        """Return the models that the unit reports; empty if it serves none or does not answer."""
        if self.spec.models is None or self._process is None:
            return []
        label, path = self.spec.models
        address = self.spec.addresses[label]
        answer = await probe.get(address.host, address.port, path, timeout_s=self._timings.probe_timeout_s)
        if answer is None or answer.status != 200 or not isinstance(answer.document, list):
            return []
        return [model for model in answer.document if isinstance(model, dict)]

    async def _prepare(self) -> None:
        process = await self._spawn(self.spec.prepare, output=2)
        try:
            async with asyncio.timeout(self._timings.prepare_s):
                code = await process.wait()
        except TimeoutError:
            raise StartFailed(f"preparing {self.name} took longer than {self._timings.prepare_s:.0f} s") from None
        finally:
            _kill_group(process.pid)
        if code != 0:
            raise StartFailed(f"{self.name} could not be prepared: see the line above")

    async def _spawn(
        self, argv: Sequence[str], *, stdin: int = asyncio.subprocess.DEVNULL, output: int | None = None
    ) -> asyncio.subprocess.Process:
        output = error_descriptor() if output is None else output
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=asyncio.subprocess.DEVNULL if output is None else output,
            stderr=output,
            env=self._environ,
            pass_fds=(self._lifeline,),
            start_new_session=True,
        )

    async def _until_ready(self, process: asyncio.subprocess.Process | Forked) -> None:
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
        # The process is gone already; macOS reports EPERM if only zombies are left.
        pass


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
