"""Opens each model file in a child process before the server opens it.

A hostile or broken file may crash a runtime or make it hang. Then only the child dies, within limits of time and
memory, and the model is refused with an error that names it. Each check that runs at the same time has its own child.
A child is started when it is needed, reused, replaced after a failure or after MAX_CHECKS files, and ended after a
while without checks. It has a low priority, and a check is given up when its files are gone or have changed.
"""

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate, HelperUnwanted

__all__ = ["CheckPool", "CheckProcess", "ModelCheck", "start_ahead"]

MAX_CHECKS = 100
BASE_MEMORY_BYTES = 2 << 30
MEMORY_PER_BYTE = 4
NICENESS = 10  # serving goes first
_CHILD = "oriel_inference.repository.check_child"
_BUILDS = "TensorrtExecutionProvider"
_ahead: list[Helper] = []  # single writer: the process's main thread before it serves; taken by any thread


def _always() -> bool:
    return True


class ModelCheck(Protocol):
    """Judges a model file before the server opens it. Blocks."""

    def check(
        self, path: Path, shown: str, backend: str, options: EngineOptions, wanted: Callable[[], bool] = _always
    ) -> bool:
        """Returns False if the model opens but does not run with zeros, so that the server must not try that.

        wanted: returns whether the check is still of use; it is given up if not. Raises LoadFailed.
        """
        ...


STOPPING = "the server is shutting down"


class CheckProcess:
    """One child, used by one thread at a time. timeout_s: for one file."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._helper = _ahead.pop() if _ahead else Helper(_CHILD)
        self._checked = 0
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        return self._helper.pid

    def check(
        self, path: Path, shown: str, backend: str, options: EngineOptions, wanted: Callable[[], bool] = _always
    ) -> bool:
        size = sum(each.stat().st_size for each in path.parent.rglob("*") if each.is_file())
        # TensorRT builds for minutes, and again in the server, where the engine is verified: check with CUDA instead.
        tried = [each for each in options.providers if each[0] != _BUILDS]
        # Other providers map device memory, which counts towards a limit of the address space.
        memory = 0 if options.providers else BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size
        request = {
            "path": str(path),
            "shown": shown,
            "backend": backend,
            "memory_bytes": memory,
            "options": {**asdict(options), "providers": tried, "intra_op_threads": 1, "inter_op_threads": 1},
        }
        with self._lock:
            try:
                (reason, runs), _ = self._helper.ask(request, timeout_s=self._timeout_s, wanted=wanted)
            except HelperLate:
                raise LoadFailed(f"{shown} could not be opened within {self._timeout_s:g} s") from None
            except HelperUnwanted:
                raise LoadFailed(f"{shown} was changed or removed while it was being checked") from None
            except HelperEnded as ended:
                if self._killed:
                    raise LoadFailed(STOPPING) from None
                crash = f"{shown} crashes the runtime (the process that tried it ended with {ended.code})"
                raise LoadFailed(crash) from None
            self._checked += 1
            # A child that has opened a plan keeps memory of the GPU as long as it lives.
            if reason or not runs or self._checked >= MAX_CHECKS or backend == "tensorrt":
                self._end()
        if reason:
            raise LoadFailed(reason)
        return bool(runs)

    def end(self) -> None:
        """End the child unless it is checking a file."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def kill(self) -> None:
        """End the child for good; a check under way fails."""
        self._killed = True
        self._helper.close()

    def _end(self) -> None:
        self._checked = 0
        self._helper.end()


def start_ahead(backend: str) -> None:
    """Start a child before there is a file to check; the first check takes it. backend: the one that it imports."""
    helper = Helper(_CHILD, backend)
    helper.start()
    _ahead.append(helper)


class CheckPool:
    """Reuses children; there are as many as checks at the same time. Any thread may use it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[CheckProcess] = []
        self._busy: set[CheckProcess] = set()
        self._closed = False

    def check(
        self, path: Path, shown: str, backend: str, options: EngineOptions, wanted: Callable[[], bool] = _always
    ) -> bool:
        with self._lock:
            if self._closed:
                raise LoadFailed(STOPPING)
            process = self._idle.pop() if self._idle else CheckProcess(self._timeout_s)
            self._busy.add(process)
        try:
            return process.check(path, shown, backend, options, wanted)
        finally:
            with self._lock:
                self._busy.remove(process)
                self._idle.append(process)

    def end(self) -> None:
        """End the children that are not checking a file."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def close(self) -> None:
        """Refuse further checks; those under way fail."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for process in busy:
            process.kill()
