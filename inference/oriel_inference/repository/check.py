"""Model files are opened in a process of their own before the server opens them.

A hostile or broken file may crash or hang a runtime; then that process dies, with time and memory limits, and the
model is refused by name. There are as many processes as there are checks at once: each is started when needed, reused,
replaced after a failure or after MAX_CHECKS files, and ended when nothing was checked for a while.
"""

import json
import os
import select
import subprocess
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from oriel_inference.child_process import start_child
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions

__all__ = ["CheckPool", "CheckProcess", "ModelCheck"]

MAX_CHECKS = 100
MAX_ANSWER_BYTES = 64 * 1024
BASE_MEMORY_BYTES = 2 << 30
MEMORY_PER_BYTE = 4
_BUILDS = "TensorrtExecutionProvider"


class ModelCheck(Protocol):
    """Judges a model file before it is opened here; blocks."""

    def check(self, path: Path, shown: str, backend: str, options: EngineOptions) -> bool:
        """Whether it also runs with zeros: if not, it is not to be tried here. Raises LoadFailed."""
        ...


class CheckProcess:
    """One child, used by one thread at a time. timeout_s: for one file."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._checked = 0
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The child's process id while there is one."""
        child = self._child
        return None if child is None else child.pid

    def check(self, path: Path, shown: str, backend: str, options: EngineOptions) -> bool:
        size = sum(each.stat().st_size for each in path.parent.rglob("*") if each.is_file())
        # TensorRT builds for minutes, and again in the server, where it is verified: here CUDA stands for it.
        tried = [each for each in options.providers if each[0] != _BUILDS]
        # Other providers map device memory, which an address space limit would count.
        memory = 0 if options.providers else BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size
        request = {
            "path": str(path),
            "shown": shown,
            "backend": backend,
            "memory_bytes": memory,
            "timeout_s": int(self._timeout_s) + 5,
            "options": {**asdict(options), "providers": tried, "intra_op_threads": 1, "inter_op_threads": 1},
        }
        with self._lock:
            answer = self._ask(json.dumps(request).encode() + b"\n")
            if answer is None:
                code = self._end()
                if code is None:
                    raise LoadFailed(f"{shown} could not be opened within {self._timeout_s:g} s")
                raise LoadFailed(f"{shown} crashes the runtime (the process that tried it ended with {code})")
            self._checked += 1
            reason, runs = str(answer.get("reason", "")), bool(answer.get("runs"))
            if reason or not runs or self._checked >= MAX_CHECKS:
                self._end()
        if reason:
            raise LoadFailed(reason)
        return runs

    def end(self) -> None:
        """End the child unless it is at work."""
        if self._lock.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._lock.release()

    def kill(self) -> None:
        """End the child for good, even if it is at work: that check fails."""
        self._killed = True
        child = self._child
        if child is not None:
            child.kill()

    def _ask(self, line: bytes) -> dict[str, Any] | None:
        """What the child says; None if it died or took too long."""
        child = self._child
        if child is None or child.poll() is not None:
            self._end()
            child = self._child = start_child("oriel_inference.repository.check_child")
        assert child.stdin is not None and child.stdout is not None
        if self._killed:
            return None
        deadline = time.monotonic() + self._timeout_s
        data = b""
        try:
            child.stdin.write(line)
            child.stdin.flush()
            while not data.endswith(b"\n"):
                ready, _, _ = select.select([child.stdout], [], [], max(0.0, deadline - time.monotonic()))
                chunk = os.read(child.stdout.fileno(), MAX_ANSWER_BYTES) if ready else b""
                data += chunk
                if not chunk or len(data) > MAX_ANSWER_BYTES:
                    return None
            answer = json.loads(data)
        except (OSError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None

    def _end(self) -> int | None:
        """Take the child away; its exit code if it had ended by itself."""
        child, self._child, self._checked = self._child, None, 0
        if child is None:
            return None
        try:
            # What has closed its output is about to be gone.
            code = child.wait(0.2) if child.stdout and _at_end(child.stdout.fileno()) else child.poll()
        except subprocess.TimeoutExpired:
            code = None
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:
                    pass  # unsent bytes for a process that is gone
        return code


class CheckPool:
    """A child per check at the same time, reused. Bounded by how many check at once; any number of threads."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[CheckProcess] = []
        self._busy: set[CheckProcess] = set()
        self._closed = False

    def check(self, path: Path, shown: str, backend: str, options: EngineOptions) -> bool:
        with self._lock:
            if self._closed:
                raise LoadFailed("the server is shutting down")
            process = self._idle.pop() if self._idle else CheckProcess(self._timeout_s)
            self._busy.add(process)
        try:
            return process.check(path, shown, backend, options)
        finally:
            with self._lock:
                self._busy.remove(process)
                self._idle.append(process)

    def end(self) -> None:
        """End the children that are not at work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def close(self) -> None:
        """Check nothing more: what is being checked fails."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for process in busy:
            process.kill()


def _at_end(descriptor: int) -> bool:
    ready, _, _ = select.select([descriptor], [], [], 0)
    return bool(ready) and not os.read(descriptor, 1)
