"""Finds the objects of this project that only the garbage collector can free."""

import gc
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

TIMES = 10


@contextmanager
def garbage() -> Iterator[Counter[str]]:
    """Count, once the `with` is over, what is left in cycles of all that was made in it, by its class.

    A cycle may hold anything; it counts by the classes of this project in it.
    """
    found: Counter[str] = Counter()
    gc.freeze()  # what is there already is neither looked at nor counted
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        for each in gc.garbage:
            if type(each).__module__.startswith("oriel_"):
                found[type(each).__name__] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def left_by(call: Callable[[], Awaitable[object]]) -> dict[str, int]:
    """Return what each of several equal calls leaves in cycles, after some that may make what is kept."""
    for _ in range(5):
        await call()
    with garbage() as found:
        for _ in range(TIMES):
            await call()
    return {name: count for name, count in found.items() if count >= TIMES}
