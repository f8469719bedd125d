"""Waits for what a test expects, however slow the machine is, and lets other processes wait for the test."""

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import isawaitable
from pathlib import Path
from typing import Any

FIRST_S, MOST_S = 0.001, 0.05  # between two calls of a check: the longer it takes, the less often it is called
TIMEOUT_S = 240.0


async def until(check: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Call `check`, and await what it gives where that is awaitable, until it counts as true; returns that value.

    Raises TimeoutError after `timeout_s`.
    """
    pause_s = FIRST_S
    async with asyncio.timeout(timeout_s):
        while True:
            found = check()
            if isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(pause_s)
            pause_s = min(1.2 * pause_s, MOST_S)


def wait_until(check: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> Any:
    """Do the same in a test without an event loop."""
    ends, pause_s = time.monotonic() + timeout_s, FIRST_S
    while not (found := check()):
        if time.monotonic() > ends:
            raise TimeoutError
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, MOST_S)
    return found


def gone(pid: int) -> bool:
    """Return whether the process has ended; whoever started it may still have to notice."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@contextmanager
def pipe_gate(path: Path, passes: int = 1) -> Iterator[Callable[[], None]]:
    """Make `path` a named pipe at which other processes wait: for them `open(path, "rb", 0).read(1)` blocks.

    Yields what lets so many of them pass, whether they wait already or come later. At the end of the `with` all that
    wait pass.
    """
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    try:

        def let_pass() -> None:
            assert os.write(pipe, bytes(passes)) == passes

        yield let_pass
    finally:
        os.close(pipe)
