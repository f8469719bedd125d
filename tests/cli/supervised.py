"""Fake units for tests of the supervisor."""

import os
import subprocess
import sys
from pathlib import Path

from oriel_cli.up.unit import Timings
from oriel_cli.up.units import Address, UnitSpec, free_ports

from ..waiting import until

FAKE = Path(__file__).with_name("fake_unit.py")
QUICK = Timings(start_s=120, probe_every_s=0.01, first_delay_s=0.01, longest_delay_s=0.05, grace_s=30)


def spec(name: str, *how: str, prepare: tuple[str, ...] = ()) -> UnitSpec:
    (port,) = free_ports("127.0.0.1", 1)
    return UnitSpec(
        name=name,
        argv=[sys.executable, str(FAKE), str(port), *how],
        addresses={"http": Address(what=f"{name} HTTP", host="127.0.0.1", port=port, flag=f"--{name}-http-port")},
        ready=("http", "/ready"),
        models=("http", "/models"),
        prepare=prepare,
    )


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    """Wait until the process `pid` is gone; nothing signals the end of another process's child."""
    await until(lambda: not alive(pid))


async def check_killed(script: str) -> None:
    """Run a supervisor that prints the ids of its two processes, kill it, and wait until they are gone.

    script: Python code; `{path}` in it stands for the paths of its imports.
    """
    supervisor = subprocess.Popen(
        [sys.executable, "-c", script.format(path=[str(FAKE.parents[2]), *sys.path])],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    with supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        supervisor.kill()
    for pid in pids:
        await gone(pid)
