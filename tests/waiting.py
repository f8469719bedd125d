"""Waits for what a test expects, however slow the machine is."""

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
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
