"""The supervisor over fake units: real processes, small timings."""

import argparse
import asyncio
import os
import re
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oriel_cli import probe
from oriel_cli.up import forks, up
from oriel_cli.up.forks import Forks
from oriel_cli.up.supervisor import Supervisor
from oriel_cli.up.unit import Timings, Unit
from oriel_cli.up.units import Address, UnitSpec, free_ports, refuse_busy_ports
from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen

from ..waiting import pipe_gate, until
from .supervised import QUICK, alive, gone, spec

WAITING = re.compile(r"waiting for two, at most \d+ s more: it is stopping, 2 call\(s\) under way")


class Stage:
    """One supervisor under test: the lines that it reported, and the events that a test waits for."""

    def __init__(self, *specs: UnitSpec, timings: Timings = QUICK, forks: Forks | None = None) -> None:
        self.said: list[str] = []
        self._changed = asyncio.Event()
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.supervisor = Supervisor(specs, say=self._say, environ=environ, timings=timings, forks=forks)
        self.units: dict[str, Unit] = {unit.name: unit for unit in self.supervisor.units}
        self.stop = asyncio.Event()
        self.ready = asyncio.Event()

    def _say(self, line: str) -> None:
        self.said.append(line)
        self._changed.set()

    async def mark_ready(self) -> None:
        self.ready.set()

    async def run(self) -> None:
        await self.supervisor.run(self.stop, self.mark_ready)

    async def until_said(self, end: str) -> None:
        while not any(line.startswith(end) for line in self.said):
            self._changed.clear()
            await self._changed.wait()


async def test_units_start_become_ready_and_stop_in_order() -> None:
    stage = Stage(spec("one"), spec("two"))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        pids = [unit.pid for unit in stage.supervisor.units]
        assert all(map(alive, pids)) and {unit.state for unit in stage.supervisor.units} == {"ready"}
        assert await stage.units["one"].models() == [{"name": "sample", "version": "1"}]
        stage.stop.set()
    assert not any(map(alive, pids)) and {unit.state for unit in stage.supervisor.units} == {"stopped"}


async def test_units_behind_a_gateway_without_a_call_stop_together_once_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that reaches the gateway before it stops listening still needs the others."""
    gates = [tmp_path / "first", tmp_path / "second"]
    for gate in gates:
        os.mkfifo(gate)
    one, two = (spec(name, "slow", str(gate)) for name, gate in zip(("one", "two"), gates, strict=True))
    stage = Stage(replace(one, addresses={**one.addresses, "admin": one.addresses["http"]}), two, spec("three"))

    def states() -> list[str]:
        return [unit.state for unit in stage.supervisor.units]

    async def get(host: str, port: int, path: str, **more: Any) -> probe.Answer | None:
        return probe.Answer(200, {"p": {"calls": 0}}) if path == "/queues" else await real(host, port, path, **more)

    real = probe.get
    monkeypatch.setattr(probe, "get", get)
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        stage.stop.set()
        await until(lambda: states()[0] == "stopping")
        await stage.until_said("waiting for one")
        assert states() == ["stopping", "ready", "ready"]
        await asyncio.to_thread(gates[0].write_bytes, b"x")
        await until(lambda: states() == ["stopped", "stopping", "stopped"])
        await asyncio.to_thread(gates[1].write_bytes, b"x")


async def test_a_unit_that_dies_is_started_again_and_said() -> None:
    stage = Stage(spec("one"), spec("two"))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        first, other = stage.units["one"].pid, stage.units["two"].pid
        os.kill(first, signal.SIGKILL)
        await stage.until_said("one is ready again")
        assert stage.said[0] == "one was killed by SIGKILL; starting it again in 0.0 s"
        assert stage.units["one"].pid != first and stage.units["two"].pid == other
        stage.stop.set()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
async def test_a_forked_process_is_the_first_of_its_unit_and_another_follows_it() -> None:
    unit = spec("one")
    pid = os.posix_spawn(sys.executable, unit.argv, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    stage = Stage(unit, forks=Forks(lifeline=os.pipe(), pids={"one": pid}))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        assert stage.units["one"].pid == pid
        os.kill(pid, signal.SIGKILL)
        await stage.until_said("one is ready again")
        assert stage.said[0].startswith("one was killed by SIGKILL") and stage.units["one"].pid != pid
        stage.stop.set()


def test_a_unit_whose_imports_start_a_thread_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((True, False))
    monkeypatch.setattr(forks, "can_fork", lambda: next(answers))
    monkeypatch.setattr(forks, "fork", lambda *args: pytest.fail("it was forked"))
    monkeypatch.setitem(forks.MODULES, "one", ("json",))
    with listen("127.0.0.1", 0, "trace buffer") as sock:
        forked = forks.fork_units([spec("one")], {}, sock)
    for descriptor in forked.lifeline:
        os.close(descriptor)
    assert not forked.pids


async def test_restarts_of_a_unit_that_keeps_dying_come_slower_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    # How long a failed start took says nothing about the next one: the wait is reset only for a unit that was ready.
    stage = Stage(spec("one"), timings=Timings(start_s=120, probe_every_s=0.01, calm_after_s=0, grace_s=30))
    slept: list[float] = []
    enough = asyncio.Event()
    real_sleep, loop = asyncio.sleep, asyncio.get_running_loop()

    async def sleep(delay_s: float) -> None:
        if asyncio.get_running_loop() is not loop:  # a server that other tests of this process share
            return await real_sleep(delay_s)
        if delay_s >= 0.1:
            slept.append(delay_s)
            if len(slept) == 7:
                enough.set()
        await real_sleep(0.001)

    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        monkeypatch.setattr(asyncio, "sleep", sleep)
        stage.units["one"].spec = spec("one", "fail")
        os.kill(stage.units["one"].pid, signal.SIGKILL)
        await enough.wait()
        stage.stop.set()
    assert slept[:7] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


async def test_a_unit_that_cannot_start_ends_everything_with_its_own_line(capfd: pytest.CaptureFixture[str]) -> None:
    stage = Stage(spec("one"), spec("two", "fail"))
    with pytest.raises(StartFailed, match="two could not start"):
        await stage.run()
    assert "oriel fake: the model is missing: add it" in capfd.readouterr().err
    assert not stage.ready.is_set() and all(unit.pid == 0 for unit in stage.supervisor.units)


async def test_a_unit_that_never_gets_ready_is_named_and_killed() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    silent = spec("one")
    silent = UnitSpec(
        name="one",
        argv=[sys.executable, "-S", "-c", "import time; time.sleep(600)"],
        addresses={"http": Address(what="one HTTP", host="127.0.0.1", port=port, flag="")},
        ready=silent.ready,
    )
    stage = Stage(silent, timings=Timings(start_s=0.1, probe_every_s=0.01))
    with pytest.raises(StartFailed, match="one is not ready after 0 s: it does not answer"):
        await stage.run()


async def test_stopping_while_units_still_start_leaves_nothing() -> None:
    stage = Stage(spec("one"), spec("two"))
    stage.stop.set()
    await stage.run()
    assert not stage.ready.is_set() and all(unit.pid == 0 for unit in stage.supervisor.units)


async def test_a_unit_deaf_to_sigterm_is_killed_when_the_grace_is_over() -> None:
    stage = Stage(spec("one", "deaf"), timings=Timings(probe_every_s=0.01, grace_s=0.05, least_grace_s=0.05))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        pid = stage.units["one"].pid
        stage.stop.set()
    assert not alive(pid)


@pytest.mark.parametrize("ending", ["stopped", "killed"])
async def test_what_a_unit_leaves_in_its_process_group_is_killed(tmp_path: Path, ending: str) -> None:
    stage = Stage(spec("one", "child", str(tmp_path / "pid")))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        grandchild = int((tmp_path / "pid").read_text())
        assert alive(grandchild)
        if ending == "killed":
            os.kill(stage.units["one"].pid, signal.SIGKILL)
            await stage.until_said("one is ready again")
            await gone(grandchild)
        stage.stop.set()
    await gone(grandchild)


@pytest.mark.parametrize("moment", ["serving", "stopping"])
async def test_cancelling_kills_at_once(moment: str) -> None:
    stage = Stage(spec("one", "deaf"), timings=Timings(probe_every_s=0.01, grace_s=600))
    task = asyncio.create_task(stage.run())
    await stage.ready.wait()
    pid = stage.units["one"].pid
    if moment == "stopping":
        stage.stop.set()
        await until(lambda: stage.units["one"].state == "stopping")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await gone(pid)


async def test_files_are_prepared_before_the_first_start_only(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    mark = f"open({str(marks)!r}, 'a').write('x')"
    stage = Stage(spec("one", prepare=(sys.executable, "-S", "-c", mark)))
    async with asyncio.TaskGroup() as group:
        group.create_task(stage.run())
        await stage.ready.wait()
        os.kill(stage.units["one"].pid, signal.SIGKILL)
        await stage.until_said("one is ready again")
        stage.stop.set()
    assert marks.read_text() == "x"


async def test_a_failed_preparation_is_a_refusal_to_start() -> None:
    stage = Stage(spec("one", prepare=(sys.executable, "-S", "-c", "raise SystemExit(3)")))
    with pytest.raises(StartFailed, match="one could not be prepared"):
        await stage.run()


def test_every_busy_port_is_named_in_one_line_with_its_flag() -> None:
    specs = [spec("gateway"), spec("logic"), spec("inference")]
    addresses = [unit.addresses["http"] for unit in specs]
    with listen("127.0.0.1", addresses[0].port, "x"), listen("127.0.0.1", addresses[2].port, "x"):
        with pytest.raises(StartFailed) as refused:
            refuse_busy_ports(addresses)
    assert str(refused.value) == (
        f"ports {addresses[0].port} (gateway HTTP), {addresses[2].port} (inference HTTP) are in use: free them, "
        "or pass --gateway-http-port N --inference-http-port N, or --free-ports"
    )
    refuse_busy_ports(addresses)
    with pytest.raises(StartFailed, match="99999 is not a port .*: pass --gateway-http-port N"):
        refuse_busy_ports([replace(addresses[0], port=99_999)])


@pytest.mark.parametrize("grace", ["-5", "nan", "inf"])
def test_a_grace_that_is_no_time_is_refused(grace: str) -> None:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    with pytest.raises(StartFailed, match="pass a number of seconds that is 0 or more"):
        up.run(parser.parse_args([f"--grace-s={grace}"]))


def test_free_ports_are_different_and_below_the_ephemeral_range() -> None:
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20 and max(ports) < 49152
    for port in ports:
        for _ in range(2):
            listen("127.0.0.1", port, "x").close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody may listen where another socket is bound")
def test_free_ports_are_passed_over_by_others_until_their_finder_ends() -> None:
    """A regression: two `oriel up --free-ports` at once could choose the same port, and a restarted unit lost its
    own.
    """
    ports = free_ports("127.0.0.1", 5)
    for port in ports:
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(("127.0.0.1", port))


async def test_a_stop_names_whom_it_waits_for(tmp_path: Path) -> None:
    """A regression: after Ctrl-C nothing was shown while calls were under way."""
    quick = replace(QUICK, say_after_s=0.01, say_every_s=0.01)
    stage = Stage(spec("one"), spec("two", "slow", str(tmp_path / "gate")), timings=quick)
    with pipe_gate(tmp_path / "gate") as finish_two:
        async with asyncio.TaskGroup() as group:
            group.create_task(stage.run())
            await stage.ready.wait()
            stage.stop.set()
            # On a busy machine a unit may be too slow to answer in time at first.
            await until(lambda: any(WAITING.fullmatch(line) for line in stage.said))
            finish_two()
    assert stage.said[0] == "stopping one, then two: at most 30 s, a second Ctrl-C ends them at once"
