"""Child processes: what passes the pipes, what ends at a deadline, and what is left of a child."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oriel_wire.process.child import PIECE_BYTES, Child, spawn

from ..waiting import TIMEOUT_S

Start = Callable[[str], Child]
ECHO = "import sys\nwhile data := sys.stdin.buffer.read1(): sys.stdout.buffer.write(data); sys.stdout.buffer.flush()"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Returns a function that starts a child with the given source; all children are ended after the test."""
    children: list[Child] = []
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def start(text: str) -> Child:
        (tmp_path / f"child_{len(children)}.py").write_text(text)
        children.append(Child(f"child_{len(children)}", exit_s=TIMEOUT_S))
        return children[-1]

    yield start
    for child in children:
        child.end()
        assert not Path(f"/proc/{child.pid}").exists()


def soon() -> float:
    return time.monotonic() + TIMEOUT_S


def test_more_than_a_pipe_holds_passes_both_ways(start: Start) -> None:
    text = "import sys\ndata = sys.stdin.buffer.read(5 << 20)\nsys.stdout.buffer.write(data[::-1])"
    data = bytes(range(256)) * (5 << 12)
    child = start(text)
    child.write(data, soon())
    pieces = child.read(len(data), soon())
    assert b"".join(pieces) == data[::-1] and max(map(len, pieces)) <= PIECE_BYTES
    with pytest.raises(BrokenPipeError):  # or it is ended before it has come to its own end
        child.read(1, soon())
    assert child.end() == 0


def test_lines_are_read_up_to_their_limit(start: Start) -> None:
    child = start(ECHO)
    child.write(b"one\n", soon())
    assert child.read_line(10, soon()) == b"one\n" and child.running
    child.write(b"x" * 11 + b"\n", soon())
    with pytest.raises(BrokenPipeError):
        child.read_line(10, soon())


def test_a_child_that_is_silent_or_does_not_read_is_left_at_the_deadline(start: Start) -> None:
    child = start("import time\ntime.sleep(60)")
    with pytest.raises(TimeoutError):
        child.read(1, time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        child.write(bytes(4 << 20), time.monotonic() + 0.05)
    assert child.end() is None, "it was killed, it did not end by itself"


def test_the_end_of_a_child_is_noticed_and_its_code_told(start: Start) -> None:
    child = start("import os\nos._exit(7)")
    with pytest.raises(BrokenPipeError):
        child.read(1, soon())
    assert child.end() == 7 and not child.running


def test_a_child_that_is_killed_meanwhile_fails_its_reader(start: Start) -> None:
    child = start(ECHO)
    child.kill()
    with pytest.raises(BrokenPipeError):
        child.read_line(10, soon())
    assert child.end() == -9


def test_a_child_sees_few_variables_and_writes_no_file(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    path = tmp_path / "written"
    child = start(
        "import os, resource, signal\n"
        "from oriel_wire.process.child import restrict_self\n"
        "restrict_self(1 << 30)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"file = os.open({str(path)!r}, os.O_CREAT | os.O_WRONLY)\n"
        "try:\n    os.write(file, b'x')\n    wrote = True\nexcept OSError:\n    wrote = False\n"
        "try:\n    bytearray(2 << 30)\n    large = True\nexcept MemoryError:\n    large = False\n"
        "print('SECRET_OF_THE_SERVER' in os.environ, os.environ['OMP_NUM_THREADS'], wrote, large, flush=True)"
    )
    assert child.read_line(100, soon()) == b"False 1 False False\n"


def test_an_environment_of_its_own_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shows.py").write_text("import os\nprint(os.environ['OF_THE_CALLER'])")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with spawn("shows", stdin=subprocess.DEVNULL, environment={"OF_THE_CALLER": "yes"}) as process:
        assert process.communicate(timeout=TIMEOUT_S)[0] == b"yes\n"
