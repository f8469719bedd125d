"""What holds the loop is named. Blocks last until the watchdog has seen them, so nothing here depends on timing."""

import asyncio
import logging
import re
import threading
import time
from types import ModuleType

import pytest

from oriel_logic.observe.watchdog import Place, Watchdog, named

from ..waiting import until

SOURCE = """
import time

def helper(seen):
    while not seen():
        time.sleep(0.001)

async def slow(seen):
    helper(seen)

async def other(): ...
"""


@pytest.fixture
def module() -> ModuleType:
    made = ModuleType("oriel_services.sleepy")
    exec(compile(SOURCE, "/somewhere/sleepy.py", "exec"), vars(made))
    return made


async def test_the_service_that_holds_the_loop_is_named_with_its_line_and_logged_once(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    blocks: list[str] = []
    reported = threading.Event()

    def on_block(service: str) -> None:
        blocks.append(service)
        if service:
            reported.set()

    lags: list[float] = []
    watchdog = Watchdog(
        lambda: [("sleepy", module.slow)], on_lag=lags.append, on_block=on_block, ask_every_s=0.002, blocked_s=0.004
    )
    watchdog.start()
    try:
        with caplog.at_level(logging.WARNING, "oriel_logic.observe.watchdog"):
            for _ in range(2):
                reported.clear()
                while not reported.is_set():
                    # It ends by itself as well: the watchdog may have read a stack just before, and waits for the loop.
                    before, ends_s = watchdog.stack_reads, time.monotonic() + 0.5
                    await module.slow(
                        lambda before=before, ends_s=ends_s: watchdog.stack_reads > before or time.monotonic() > ends_s
                    )
                    await asyncio.sleep(0.001)
    finally:
        watchdog.stop()
    assert set(blocks) <= {"sleepy", ""} and max(lags) >= 0.003
    told = [record.getMessage() for record in caplog.records if "service 'sleepy'" in record.getMessage()]
    assert len(told) == 1 and "await ctx.run" in told[0]
    assert re.search(r" ms \(sleepy\.py:[56] in helper\)", told[0])


def place(module: str, function: str, line: int = 1) -> Place:
    return Place(module, function, f"/x/{module}.py", line)


def test_a_stack_is_named_by_the_handler_that_was_called_first(module: ModuleType) -> None:
    handlers = [("one", module.slow), ("two", module.other)]
    server = [place("asyncio.events", "Handle._run"), place("oriel_logic.server.pipeline", "Run.function")]
    deep = [*server, place("oriel_services.sleepy", "slow", 8), place("oriel_services.sleepy", "helper", 5)]
    assert named([*deep, place("re", "match")], handlers) == ("one", deep[-1])
    assert named(server, handlers) == ("", server[-1])
    assert named([], handlers) == ("", None)
    helper = [*server, place("oriel_services.sleepy", "helper")]
    assert named(helper, handlers)[0] == "", "two services share the file: it may be either"
    assert named(helper, handlers[:1]) == ("one", helper[-1])


async def test_a_loop_that_answers_is_left_alone() -> None:
    lags: list[float] = []
    watchdog = Watchdog(list, on_lag=lags.append, on_block=print, ask_every_s=0.001, blocked_s=10.0)
    watchdog.start()
    await until(lambda: len(lags) >= 3)
    watchdog.stop()
    assert watchdog.stack_reads == 0 and all(lag >= 0 for lag in lags)


async def test_a_service_that_still_holds_the_loop_is_named_before_it_lets_go(
    module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog = Watchdog(
        lambda: [("sleepy", module.slow)],
        on_lag=lambda lag_s: None,
        on_block=lambda block: None,
        ask_every_s=0.002,
        blocked_s=0.004,
        still_s=0.01,
    )
    watchdog.start()
    try:
        with caplog.at_level(logging.WARNING, "oriel_logic.observe.watchdog"):
            ends = time.monotonic() + 60.0  # or a text that never comes would hold this process for ever
            await module.slow(lambda: "has been blocking the event loop" in caplog.text or time.monotonic() > ends)
    finally:
        watchdog.stop()
    assert "service 'sleepy' has been blocking the event loop, and every other request" in caplog.text
