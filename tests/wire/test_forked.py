"""Processes that are forked before their parent has threads: what they inherit, and what is known of their end."""

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from oriel_wire.memory import unwritten
from oriel_wire.process import forked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is forked")
CHILD = """
import os, socket, sys
from oriel_wire.process.forked import can_fork, fork
assert can_fork()
kept, held = os.pipe()
other = socket.socket()
pid = fork({"ORIEL_OWN": "1"}, "oriel gateway", kept)
if not pid:
    other.detach()
    os.fstat(kept)
    open_ones = [n for n in range(3, 64) if os.path.exists(f"/proc/self/fd/{n}")]
    print(open_ones == [kept], os.environ["ORIEL_OWN"], os.getsid(0) == os.getpid(), os.read(0, 1))
    print(open("/proc/self/cmdline").read().rstrip("\\0").replace("\\0", " "))
    sys.exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "ORIEL_OWN" in os.environ, file=sys.stderr)
"""


def test_a_forked_process_has_its_session_its_variables_and_no_descriptor_but_those_kept() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.splitlines() == ["True 1 True b''", "oriel gateway", "7 False"]


async def test_the_end_of_a_forked_process_is_reported_with_its_code() -> None:
    child = forked.Forked(os.posix_spawnp("sleep", ["sleep", "600"], os.environ))
    waiting = asyncio.create_task(child.wait())
    await asyncio.sleep(0)
    assert child.returncode is None and not waiting.done()
    child.terminate()
    assert await waiting == -15 == child.returncode and await child.wait() == -15


def test_a_process_with_a_thread_does_not_fork() -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        assert not forked.can_fork()
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-"])
def test_a_process_with_a_closed_standard_descriptor_does_not_fork(closed: str) -> None:
    """A pipe or a socket of it may have that number, and would be closed in the forked process."""
    script = "import os; from oriel_wire.process.forked import can_fork; os._exit(10 + can_fork())"
    run = ["sh", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, script]
    assert subprocess.run(run, check=False).returncode == 10


def test_a_kernel_that_reports_no_end_of_a_process_is_not_forked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(1, "not here")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert not forked.can_fork()


def test_servers_and_supervisor_import_no_numpy_of_their_own() -> None:
    """A gateway uses none, and its import is a fifth of the start."""
    script = "import oriel_gateway.app, oriel_cli.up.up, sys; sys.exit('numpy' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environ, check=False).returncode == 0


def test_memory_that_is_not_written_yet_can_be_written() -> None:
    view = unwritten(70_000)
    view[:3] = b"abc"
    assert len(view) == view.nbytes == 70_000 and bytes(view[:3]) == b"abc" and not unwritten(0)


def test_a_forked_process_makes_ids_of_its_own() -> None:
    """Else gateway and logic give the same ids to different spans of one trace."""
    script = """
import os, sys
from oriel_wire.observe.trace import TraceIds, random_bits
from oriel_wire.process.forked import fork
pid = fork({}, "oriel logic")
if pid:
    os.waitpid(pid, 0)
ids = TraceIds()
ids.refill()
print(random_bits(128), ids.traces[-1], ids.spans[-1], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    one, other = map(str.split, done.stderr.splitlines())
    assert not set(one) & set(other)
