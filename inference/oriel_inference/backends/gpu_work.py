"""Keeps other work away from the GPUs while a CUDA graph is captured.

ONNX Runtime captures with `cudaStreamCaptureModeGlobal`: until the capture ends, calls of CUDA that allocate, wait or
copy fail in every thread of the process, and break the capture. So batches, copies and openings wait for those
milliseconds, and a capture waits for what runs.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GpuWork:
    """What this process does on its GPUs. opening: held while a session is opened there, which may take minutes."""

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self._changed = threading.Condition()
        self._working = 0
        self._waiting = 0
        self._capturing = False

    @contextmanager
    def shared(self, *, urgent: bool = False) -> Iterator[None]:
        """Work on a GPU beside others; blocks while a graph is captured, and while a capture waits for its turn.

        urgent: does not let a waiting capture go first, for short work that a loop waits for.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._capturing and (urgent or not self._waiting))
            self._working += 1
        try:
            yield
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph: nothing else is opened or runs meanwhile. Not from within `shared` or with `opening`."""
        with self.opening:
            with self._changed:
                self._waiting += 1
                self._changed.wait_for(lambda: not self._working)
                self._waiting -= 1
                self._capturing = True
            try:
                yield
            finally:
                with self._changed:
                    self._capturing = False
                    self._changed.notify_all()


GPU_WORK = GpuWork()
