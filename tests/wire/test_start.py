"""Child processes end with all they have started: when they are killed, and when their parent is."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oriel_wire.process.start import ChildProcess

from ..waiting import gone, pipe_gate, wait_until

# A child that has started another process, prints the ids of both, and waits.
FAMILY = """
import os, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time\\ntime.sleep(600)"])
print(os.getpid(), other.pid, flush=True)
{then}
"""
PARENT = """
import os, sys, time
from oriel_wire.process.start import ChildProcess
child = ChildProcess([sys.executable, "-c", sys.argv[1]], environment=dict(os.environ), stdout=None)
time.sleep(600)
"""


@pytest.fixture
def children() -> Iterator[list[ChildProcess]]:
    started: list[ChildProcess] = []
    yield started
    for child in started:
        child.kill()
        child.wait()
        for pipe in child.pipes:
            pipe.close()


def family(children: list[ChildProcess], then: str) -> list[int]:
    command = [sys.executable, "-c", FAMILY.format(then=then)]
    children.append(ChildProcess(command, environment={}, stdout=subprocess.PIPE))
    return [int(pid) for pid in children[-1].pipes[0].readline().split()]


def test_a_kill_ends_the_whole_group(children: list[ChildProcess]) -> None:
    pids = family(children, "time.sleep(600)")
    assert pids[0] == children[0].pid and children[0].code is None
    children[0].kill()
    assert children[0].wait() == -9
    children[0].kill()
    wait_until(lambda: all(map(gone, pids)))


def test_a_kill_ends_what_a_child_has_left_behind_that_was_collected(children: list[ChildProcess]) -> None:
    _, left = family(children, "os._exit(3)")
    assert children[0].wait() == 3 and not gone(left)
    children[0].kill()
    wait_until(lambda: gone(left))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signals a group at the end of a pipe on Linux only")
@pytest.mark.parametrize("then", ["time.sleep(600)", "while True: pass", "os.closerange(3, 100); time.sleep(600)"])
def test_a_parent_that_is_killed_takes_its_childs_group_along(then: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT, FAMILY.format(then=then)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and not any(map(gone, pids))
        parent.kill()
    wait_until(lambda: all(map(gone, pids)))


def test_a_wait_is_bounded(children: list[ChildProcess], tmp_path: Path) -> None:
    with pipe_gate(tmp_path / "gate"):
        children.append(
            ChildProcess([sys.executable, "-c", f"open({str(tmp_path / 'gate')!r}).read(1)"], environment={})
        )
        with pytest.raises(TimeoutError):
            children[0].wait(0.01)
        assert children[0].code is None


def test_a_child_that_cannot_be_started_leaves_no_descriptor() -> None:
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/program"], environment={})
    assert sorted(Path("/proc/self/fd").iterdir()) == before
