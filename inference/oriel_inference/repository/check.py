"""Opens each model file in a child process before the server opens it.

A hostile or broken file may crash a runtime or make it hang. Then only the child dies, within limits of time and
memory, and the model is refused with an error that names it. Each check that runs at the same time has its own child.
A child is started when it is needed, reused, replaced after a failure or after MAX_CHECKS files, and ended after a
while without checks. It has a low priority, and a check is given up when its files are gone or have changed.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate, HelperUnwanted

__all__ = ["CheckPool", "start_ahead"]

MAX_CHECKS = 100
BASE_MEMORY_BYTES = 2 << 30
MEMORY_PER_BYTE = 4
_CHILD = "oriel_inference.repository.check_child"
_UNREADABLE = "gave an answer that cannot be read"
_BUILDS = "TensorrtExecutionProvider"
_ahead: list[Helper] = []  # single writer: the process's main thread before it serves; taken by any thread


def _always() -> bool:
    return True


STOPPING = "the server is shutting down"


def start_ahead(backend: str) -> None:
    """Start a child before there is a file to check; the first check takes it. backend: the one that it imports."""
    helper = Helper(_CHILD, backend)
    helper.start()
    _ahead.append(helper)


class CheckPool:
    """Checks model files, each in a child that no other check uses at the same time. Any thread may use it.

    timeout_s: time for one file.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[Helper] = []
        self._busy: set[Helper] = set()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """The process ids of the children that check nothing now."""
        return [pid for each in self._idle if (pid := each.pid) is not None]

    def check(
        self,
        path: Path,
        shown: str,
        backend: str,
        options: EngineOptions,
        wanted: Callable[[], bool] = _always,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> bool:
        """Judge a model file before the server opens it. Blocks.

        Returns False if the model opens but does not run with zeros, so that the server must not try that.
        shapes: shapes of inputs that must not be guessed.
        wanted: returns whether the check is still of use; it is given up if not. Raises LoadFailed.
        """
        with self._lock:
            if self._closed:
                raise LoadFailed(STOPPING)
            helper = self._idle.pop() if self._idle else _ahead.pop() if _ahead else Helper(_CHILD)
            self._busy.add(helper)
        keep = False
        try:
            reason, runs = self._ask(helper, _request(path, shown, backend, options) | {"shapes": shapes or {}}, wanted)
            # A child that has opened a plan keeps memory of the GPU as long as it lives.
            keep = runs and not reason and helper.answered < MAX_CHECKS and backend != "tensorrt"
        finally:
            with self._lock:
                self._busy.remove(helper)
                keep = keep and not self._closed
                if keep:
                    self._idle.append(helper)
            if not keep:
                helper.stop()  # a child that hangs in the kernel holds up nobody else
        if reason:
            raise LoadFailed(reason)
        return runs

    def close_idle(self) -> None:
        """End the children that are not checking a file."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.stop()

    def close(self) -> None:
        """Refuse further checks; those under way fail."""
        with self._lock:
            self._closed = True
            for helper in self._busy:
                helper.close()
        self.close_idle()

    def _ask(self, helper: Helper, request: dict[str, Any], wanted: Callable[[], bool]) -> tuple[str, bool]:
        shown = request["shown"]
        try:
            answer, _ = helper.ask(request, timeout_s=self._timeout_s, wanted=wanted)
            return msgspec.convert(answer, tuple[str, bool])
        except HelperLate:
            raise LoadFailed(f"{shown} could not be opened within {self._timeout_s:g} s") from None
        except HelperUnwanted:
            raise LoadFailed(f"{shown} was changed or removed while it was being checked") from None
        except HelperEnded as ended:
            if self._closed:
                raise LoadFailed(STOPPING) from None
            how = _UNREADABLE if ended.code is None else f"ended with {ended.code}"
            raise LoadFailed(f"{shown} crashes the runtime (the process that tried it {how})") from None
        except msgspec.ValidationError:
            raise LoadFailed(f"{shown} crashes the runtime (the process that tried it {_UNREADABLE})") from None


def _request(path: Path, shown: str, backend: str, options: EngineOptions) -> dict[str, Any]:
    size = sum(each.stat().st_size for each in path.parent.rglob("*") if each.is_file())
    # TensorRT builds for minutes, and again in the server, where the engine is verified: check with CUDA instead.
    tried = [each for each in options.providers if each[0] != _BUILDS]
    return {
        "path": str(path),
        "shown": shown,
        "backend": backend,
        # Other providers map device memory, which counts towards a limit of the address space.
        "memory_bytes": 0 if options.providers else BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size,
        "options": replace(options, providers=tried).for_child(),
    }
