"""Counts steps, which do not depend on the machine: calls of functions, and the bytes that they copy."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Steps:
    """Counts calls of functions in this thread.

    copies: count the bytes of each new `bytes` or `str` as well that a function has in its variables when it ends. What
    the function was given is not new, nor is what it had already when a generator gave its last item.
    """

    def __init__(self, *, copies: bool = False) -> None:
        self.count = 0
        self._copies = copies
        self._given: dict[int, dict[str, Any]] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self.count += event in ("call", "c_call")
        if self._copies and event == "call":
            self._given[id(frame)] = dict(frame.f_locals)
        elif self._copies and event == "return":
            given = {id(each) for each in self._given.pop(id(frame), {}).values()}
            values = {id(each): each for each in frame.f_locals.values() if isinstance(each, bytes | str)}
            self.count += sum(len(each) for key, each in values.items() if key not in given)


@contextmanager
def steps(*, copies: bool = False) -> Iterator[Steps]:
    counted = Steps(copies=copies)
    sys.setprofile(counted)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def linear(work: Callable[[int], object], sizes: tuple[int, int, int], *, copies: bool = False) -> list[int]:
    """Do something with inputs of doubling length; return the steps, which have to grow no faster than these."""
    took = []
    for size in sizes:
        with steps(copies=copies) as counted:
            work(size)
        took.append(counted.count)
    assert took[1] <= 2.2 * took[0] + 200 and took[2] <= 2.2 * took[1] + 200, took
    return took
