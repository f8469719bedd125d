"""When memory of large messages is given back: by their bytes, one at a time, off the loop."""

import asyncio
import threading

from oriel_wire.engine import large_messages
from oriel_wire.engine.large_messages import GIVE_BACK_BYTES, LARGE_BYTES, LargeMessages

from ..waiting import until


class Counted:
    """Gives nothing back until it is let."""

    def __init__(self) -> None:
        self.times = 0
        self.threads: set[int] = set()
        self.may = threading.Event()

    def __call__(self) -> None:
        self.threads.add(threading.get_ident())
        self.times += 1
        self.may.wait(10)


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_small_messages_are_not_counted() -> None:
    counted = Counted()
    large = LargeMessages(counted, delay_s=0.0)
    for _ in range(100):
        large.freed(LARGE_BYTES - 1)
    await settled()
    assert counted.times == 0


async def test_bytes_are_counted_over_messages_and_given_back_off_the_loop() -> None:
    counted = Counted()
    counted.may.set()
    large = LargeMessages(counted, delay_s=0.0)
    large.freed(GIVE_BACK_BYTES - LARGE_BYTES)
    await settled()
    assert counted.times == 0
    large.freed(LARGE_BYTES)
    await until(lambda: counted.times == 1)
    assert threading.get_ident() not in counted.threads
    await settled()
    assert counted.times == 1


async def test_what_comes_meanwhile_is_given_back_afterwards() -> None:
    counted = Counted()
    large = LargeMessages(counted, delay_s=0.0)
    for _ in range(5):
        large.freed(GIVE_BACK_BYTES)
        await settled()
    await until(lambda: counted.times == 1)
    counted.may.set()
    await until(lambda: counted.times == 2)
    await settled()
    assert counted.times == 2


async def test_failure_is_not_the_last_time() -> None:
    times = []

    def fails() -> None:
        times.append(1)
        raise OSError

    large = LargeMessages(fails, delay_s=0.0)
    large.freed(GIVE_BACK_BYTES)
    await until(lambda: len(times) == 1 and not large._running)
    large.freed(GIVE_BACK_BYTES)
    await until(lambda: len(times) == 2)


async def test_the_c_library_is_asked() -> None:
    large_messages.return_memory()
