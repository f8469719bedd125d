"""Helper processes: what passes between them and us, what ends them, and what is left of one."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fcntl import F_GETPIPE_SZ, fcntl
from pathlib import Path
from typing import Any

import pytest

from oriel_wire.process import helper as helper_module
from oriel_wire.process.helper import PIECE_BYTES, Helper, HelperEnded, HelperLate, HelperUnwanted
from oriel_wire.process.start import ChildProcess

from ..waiting import TIMEOUT_S, until, wait_until

Made = Callable[..., Helper]
ECHO = """
from oriel_wire.process.served import Requests
requests = Requests()
while given := requests.next():
    value, body = given
    requests.answer(value["answer"], [body[::-1]])
"""
DEEP = """
import os
from oriel_wire.process.helper import HEAD
text = b"[" * 50_000
os.write(1, HEAD.pack(len(text), 0) + text)
while os.read(0, 1 << 20):
    pass
"""
SLEEPS = "import time\ntime.sleep(600)"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Returns a function that makes a helper with the given source; all are ended after the test."""
    helpers: list[Helper] = []
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str, **options: Any) -> Helper:
        name = f"helper_{len(helpers)}"
        (tmp_path / f"{name}.py").write_text(text)
        helpers.append(Helper(name, exit_s=TIMEOUT_S, **{"max_body_bytes": 8 << 20} | options))
        return helpers[-1]

    yield make
    for helper in helpers:
        pid = helper.pid
        helper.stop()
        assert pid is None or not Path(f"/proc/{pid}").exists()


def ask(helper: Helper, value: Any, *parts: bytes, **options: Any) -> tuple[Any, bytes]:
    answer, pieces = helper.ask(value, parts, **{"timeout_s": TIMEOUT_S} | options)
    assert all(len(piece) <= PIECE_BYTES for piece in pieces)
    return answer, b"".join(pieces)


def test_bodies_larger_than_a_pipe_pass_both_ways_through_one_process(made: Made) -> None:
    helper, data = made(ECHO), bytes(range(256)) * (5 << 12)
    assert ask(helper, {"answer": {"a": [1, None]}}, data, data[:7]) == ({"a": [1, None]}, (data + data[:7])[::-1])
    pid = helper.pid
    assert ask(helper, {"answer": None}) == (None, b"") and helper.pid == pid


@pytest.mark.parametrize("request_", [{"answer": "x" * (1 << 20)}, {"answer": 1, "body": True}])
def test_an_answer_beyond_its_bounds_is_not_read(made: Made, request_: dict[str, Any]) -> None:
    helper = made(ECHO, max_body_bytes=3)
    with pytest.raises(HelperEnded, match="an answer that cannot be read"):
        ask(helper, request_, b"four" if "body" in request_ else b"")
    assert helper.pid is None
    assert ask(helper, {"answer": 1}, b"abc") == (1, b"cba"), "another process answers"


def test_an_answer_that_is_nested_too_deeply_ends_the_helper(made: Made) -> None:
    helper = made(DEEP)
    with pytest.raises(HelperEnded, match="an answer that cannot be read"):
        ask(helper, 1)
    assert helper.pid is None


@pytest.mark.parametrize("body", [b"", bytes(4 << 20)])
def test_a_helper_that_is_silent_or_does_not_read_is_killed_at_the_deadline(made: Made, body: bytes) -> None:
    helper = made(SLEEPS)
    with pytest.raises(HelperLate):
        ask(helper, 1, body, timeout_s=0.05)
    assert helper.pid is None


def test_a_request_that_is_not_wanted_any_more_is_given_up(made: Made) -> None:
    helper, tests = made(SLEEPS), iter([True, False])
    with pytest.raises(HelperUnwanted):
        ask(helper, 1, wanted=lambda: next(tests))
    assert helper.pid is None


def test_the_end_of_a_helper_names_its_code_and_last_words(made: Made) -> None:
    helper = made("import os, sys\nprint('first\\nthe reason', file=sys.stderr, flush=True)\nos._exit(7)")
    with pytest.raises(HelperEnded, match="ended with code 7: the reason") as ended:
        ask(helper, 1)
    assert ended.value.code == 7


def test_a_helper_that_prints_without_end_is_read_and_only_the_last_line_kept(made: Made) -> None:
    helper = made("import os\nos.write(2, b'x' * (1 << 20))\nos.write(2, b'\\nend')\nos._exit(1)")
    with pytest.raises(HelperEnded) as ended:
        ask(helper, 1)
    assert ended.value.words == "end" and len(helper._errors) == helper_module.MAX_ERROR_BYTES


def test_what_a_helper_prints_to_standard_output_is_no_answer(made: Made) -> None:
    helper = made(ECHO.replace("value, body = given", "value, body = given; print('noise', flush=True)"))
    assert ask(helper, {"answer": 1}) == (1, b"")


def test_a_closed_helper_fails_its_reader_and_starts_no_more(made: Made) -> None:
    helper, failures = made(SLEEPS), list[HelperEnded]()

    def reads() -> None:
        with pytest.raises(HelperEnded) as failure:
            ask(helper, 1)
        failures.append(failure.value)

    reader = threading.Thread(target=reads)
    reader.start()
    wait_until(lambda: helper.pid)
    helper.close()
    reader.join()
    with pytest.raises(HelperEnded):
        ask(helper, 1)
    assert len(failures) == 1 and helper.pid is None


def test_a_helper_sees_no_secrets_and_keeps_within_its_bounds(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_SERVER", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    helper = made(
        "import os, resource, signal\n"
        "from oriel_wire.process.served import Requests, bound_memory\n"
        "requests = Requests(niceness=1)\n"
        "requests.next()\n"
        "bound_memory(1 << 30)\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"file = os.open({str(tmp_path / 'written')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "try:\n    os.write(file, b'x')\n    wrote = True\nexcept OSError:\n    wrote = False\n"
        "try:\n    bytearray(2 << 30)\n    large = True\nexcept MemoryError:\n    large = False\n"
        "try:\n    bound_memory(1 << 10)\n    small = True\nexcept MemoryError:\n    small = False\n"
        "bound_memory(0)\n"
        "free = resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY\n"
        "secret, threads = 'SECRET_OF_THE_SERVER' in os.environ, os.environ['OMP_NUM_THREADS']\n"
        "requests.answer([secret, threads, wrote, large, small, free, os.nice(0)])\n"
    )
    hard_bound_is_free = True
    answer, _ = ask(helper, None)
    assert answer == [False, "1", False, False, False, hard_bound_is_free, min(19, os.nice(0) + 1)]


async def test_asked_once_it_has_ended_whether_answered_or_cancelled(made: Made) -> None:
    helper = made(ECHO)
    assert await helper.ask_once({"answer": 1}, timeout_s=TIMEOUT_S) == (1, [])
    assert helper.pid is None
    helper = made(SLEEPS)
    asking = asyncio.ensure_future(helper.ask_once(1, timeout_s=TIMEOUT_S))
    await until(lambda: helper.pid)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert helper.pid is None


async def test_a_question_cancelled_before_a_thread_takes_it_starts_no_process(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[object] = []
    monkeypatch.setattr(helper_module, "ChildProcess", lambda *_, **__: started.append(1))
    free, threads = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(threads)
    threads.submit(free.wait)
    asking = asyncio.ensure_future(made(SLEEPS).ask_once(1, timeout_s=TIMEOUT_S))
    await until(lambda: threads._work_queue.qsize() == 1)
    asking.cancel()
    await asyncio.sleep(0)
    free.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert not started


async def test_a_question_cancelled_while_its_process_starts_ends_it(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go, started = threading.Event(), threading.Event(), list[ChildProcess]()

    def start(*given: Any, **options: Any) -> ChildProcess:
        entered.set()
        go.wait(TIMEOUT_S)
        started.append(ChildProcess(*given, **options))
        return started[0]

    monkeypatch.setattr(helper_module, "ChildProcess", start)
    asking = asyncio.ensure_future(made(SLEEPS).ask_once(1, timeout_s=TIMEOUT_S))
    await asyncio.to_thread(entered.wait, TIMEOUT_S)
    asking.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert started[0].code is not None


def test_a_large_body_takes_few_turns_between_the_processes(made: Made) -> None:
    """With 64 KiB in the pipe, each turn waited for the interpreter's lock of a busy server."""
    large, small = made(ECHO), made(ECHO, max_body_bytes=0)
    for helper, size in ((large, PIECE_BYTES), (small, 64 << 10)):
        helper.start()
        assert fcntl(helper._pipe(0), F_GETPIPE_SZ) == fcntl(helper._pipe(1), F_GETPIPE_SZ) == size
