"""`run_unit` in real processes: what signals, a lost supervisor and refusals to start do to a unit."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator

import pytest

from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen

Start = Callable[..., subprocess.Popen[str]]

PRELUDE = """
import asyncio, logging, sys, time
from oriel_wire.process.logs import configure_logging
from oriel_wire.process.process import run_unit
from oriel_wire.errors import StartFailed

def say(word):
    print(word, flush=True)
"""


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def run(body: str, *, pass_fds: tuple[int, ...] = (), **environ: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=pass_fds,
            env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


WAITS = """
async def main(stop):
    say("up")
    await stop.wait()
    say("draining")
sys.exit(run_unit(main, unit="sample"))
"""

NEVER_DRAINS = """
async def main(stop):
    say("up")
    await stop.wait()
    say("draining")
    await asyncio.Event().wait()
sys.exit(run_unit(main, unit="sample", grace_s={grace}))
"""


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_main_drain_and_exit_cleanly(start: Start, number: signal.Signals) -> None:
    unit = start(WAITS)
    assert line(unit) == "up"
    unit.send_signal(number)
    assert line(unit) == "draining"
    assert unit.wait(60) == 0


def test_a_lost_supervisor_stops_the_unit(start: Start) -> None:
    reader, writer = os.pipe()
    unit = start(WAITS, pass_fds=(reader,), ORIEL_LIFELINE_FD=str(reader))
    os.close(reader)
    assert line(unit) == "up"
    os.close(writer)
    assert line(unit) == "draining"
    assert unit.wait(60) == 0


def test_a_second_signal_cuts_the_drain_short(start: Start) -> None:
    unit = start(NEVER_DRAINS.format(grace=3600))
    assert line(unit) == "up"
    unit.terminate()
    assert line(unit) == "draining"
    unit.terminate()
    assert unit.wait(60) == 1


def test_the_grace_cuts_the_drain_short(start: Start) -> None:
    unit = start(NEVER_DRAINS.format(grace=0.1))
    assert line(unit) == "up"
    unit.terminate()
    assert unit.wait(60) == 1


def test_a_blocked_loop_cannot_outlive_the_grace(start: Start) -> None:
    unit = start(
        """
        async def main(stop):
            say("up")
            await stop.wait()
            say("blocked")
            time.sleep(3600)
        sys.exit(run_unit(main, grace_s=0.1))
        """
    )
    assert line(unit) == "up"
    unit.terminate()
    assert line(unit) == "blocked"
    assert unit.wait(60) == 1


def test_a_unit_dumps_no_core(start: Start) -> None:
    """Its memory holds keys and bodies."""
    unit = start(
        """
        async def main(stop):
            import resource
            say(str(resource.getrlimit(resource.RLIMIT_CORE)[0]))
        sys.exit(run_unit(main))
        """
    )
    assert line(unit) == "0"


def test_the_interpreter_looks_for_no_garbage_at_the_end(start: Start) -> None:
    unit = start(
        """
        import gc

        async def main(stop):
            say("up")

        run_unit(main, unit="sample")
        say(gc.get_freeze_count() > len(gc.get_objects()))
        """
    )
    assert line(unit) == "up" and line(unit) == "True"


def test_an_executor_thread_left_behind_does_not_hold_the_exit(start: Start) -> None:
    unit = start(
        """
        async def main(stop):
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 3600)
            say("up")
            await stop.wait()
        sys.exit(run_unit(main))
        """
    )
    assert line(unit) == "up"
    unit.terminate()
    assert unit.wait(60) == 1


@pytest.mark.parametrize("grouped", [False, True])
def test_a_refusal_to_start_is_one_line_and_exit_code_2(start: Start, grouped: bool) -> None:
    raised = 'StartFailed("the cellar\\nis full: empty it")'
    raised = f'ExceptionGroup("several", [ExceptionGroup("inner", [{raised}])])' if grouped else raised
    unit = start(
        f"""
        async def main(stop):
            raise {raised}
        sys.exit(run_unit(main, unit="sample"))
        """
    )
    _, stderr = unit.communicate(timeout=60)
    assert (unit.returncode, stderr) == (2, "oriel sample: the cellar | is full: empty it\n")


def test_a_crash_is_logged_as_one_line_and_exit_code_1(start: Start) -> None:
    unit = start(
        """
        async def main(stop):
            raise ValueError("odd\\x1b[31m")
        configure_logging("sample")
        sys.exit(run_unit(main))
        """
    )
    _, stderr = unit.communicate(timeout=60)
    assert unit.returncode == 1
    assert stderr.count("\n") == 1 and "CRITICAL sample" in stderr and r"ValueError: odd\x1b[31m" in stderr


def test_a_shared_port_is_shared_only_among_those_that_ask() -> None:
    with listen("127.0.0.1", 0, "gateway HTTP", shared=True) as sock:
        port = sock.getsockname()[1]
        with listen("127.0.0.1", port, "gateway HTTP", shared=True):
            with pytest.raises(StartFailed, match="is in use"):
                listen("127.0.0.1", port, "gateway HTTP")


def test_listen_takes_a_free_port_and_names_a_busy_one_with_its_flag() -> None:
    with listen("127.0.0.1", 0, "gateway HTTP") as sock:
        port = sock.getsockname()[1]
        with pytest.raises(StartFailed) as refused:
            listen("127.0.0.1", port, "gateway HTTP")
    assert str(refused.value) == (f"port {port} on 127.0.0.1 is in use (gateway HTTP): free it or pass --http-port N")


@pytest.mark.parametrize(
    ("host", "port", "remedy"),
    [("192.0.2.1", 0, "--host"), ("no host", 80, "--host"), ("127.0.0.1", 70000, "--admin-port")],
)
def test_listen_refuses_what_is_no_address_of_this_machine(host: str, port: int, remedy: str) -> None:
    with pytest.raises(StartFailed, match=remedy):
        listen(host, port, "logic admin")


def test_listening_is_immediate_so_a_second_unit_cannot_share_the_port() -> None:
    with listen("127.0.0.1", 0, "logic HTTP") as sock, socket.create_connection(sock.getsockname()):
        pass


def test_a_log_level_that_is_none_is_answered_with_those_that_are(start: Start) -> None:
    unit = start(
        """
        import os
        async def main(stop):
            pass
        os.environ["ORIEL_LOG_LEVEL"] = "verbos"
        configure_logging("sample")
        sys.exit(run_unit(main))
        """
    )
    _, stderr = unit.communicate(timeout=60)
    assert unit.returncode == 0
    assert "ORIEL_LOG_LEVEL is none of CRITICAL, FATAL, ERROR, WARN, WARNING, INFO, DEBUG" in stderr
