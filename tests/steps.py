"""Counts steps, which do not depend on the machine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Steps:
    """Counts calls of functions in this thread."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, _: FrameType, event: str, __: Any) -> None:
        self.count += event in ("call", "c_call")


@contextmanager
def steps() -> Iterator[Steps]:
    counted = Steps()
    sys.setprofile(counted)
    try:
        yield counted
    finally:
        sys.setprofile(None)
