"""Keeps other work away from the GPUs while a CUDA graph is captured.

ONNX Runtime captures with `cudaStreamCaptureModeGlobal`. Until such a capture ends, calls of CUDA that allocate, copy
or wait fail in every thread of the process, and each of them breaks the capture. So what this process does on its GPUs
passes one of two gates, and a capture closes both. There is one pair for the process, because CUDA's rule is about the
process.

Openings may take minutes, so a capture waits for them first, while batches go on, and then for the batches; for these
not long, because nobody else's batch begins meanwhile. Whoever is inside `BATCHES` must not enter `OPENINGS`, nor the
same gate once more: a capture would wait for it.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from oriel_inference.errors import LoadFailed

T = TypeVar("T")

DRAIN_S = 5.0


class Gate:
    """Lets any number of threads in; while it is closed, nobody is inside. Any thread may use it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside; waits while it is closed, or while somebody waits to have it closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def closed(self, timeout_s: float | None = None) -> Iterator[None]:
        """Let nobody in; waits until nobody else has it closed, and until the others have left.

        Raises TimeoutError, and is open again, if they have not left after `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_closed)
            self._is_closed = True
            if not self._changed.wait_for(lambda: not self._inside, timeout_s):
                self._is_closed = False
                self._changed.notify_all()
                raise TimeoutError
        try:
            yield
        finally:
            with self._changed:
                self._is_closed = False
                self._changed.notify_all()


def opened_in(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Return what `work` opens in the thread of a session, which is ended if that fails. Raises LoadFailed."""
    wrong = ""
    try:
        return thread.submit(work).result()
    except LoadFailed as failure:
        thread.shutdown()
        wrong = failure.reason
    except BaseException:
        thread.shutdown()
        raise
    # Outside of the block above: an error that is kept must not keep what its traceback refers to.
    raise LoadFailed(wrong)


OPENINGS = Gate()  # entered by threads that open a session
BATCHES = Gate()  # entered for a batch and for other short work: copies, and the release of sessions


@contextmanager
def capturing(drain_s: float) -> Iterator[None]:
    """Have the GPUs alone. Not from inside of a gate. Raises TimeoutError if batches do not end within `drain_s`."""
    with OPENINGS.closed(), BATCHES.closed(drain_s):
        yield
