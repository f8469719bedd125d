"""Opens PyTorch programs. PyTorch is imported only in the processes of models, one for each model.

The process is asked once to load the program; batches go through lanes, one for each that runs at the same time.
Loading there is the check of the file, too: what crashes PyTorch ends this process and nothing else. A process that has
ended is started again by the next batch, at first at once, then after a while that grows with each end in a row.

PyTorch takes seconds to import, so one process that has done it waits for the next model.
"""

import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from oriel_inference.backends import Backend, Session, without_folders
from oriel_inference.backends.cuda import list_gpus
from oriel_inference.backends.python.backend import START_KEY
from oriel_inference.backends.python.launch import PythonLimits
from oriel_inference.backends.python.process import resident_bytes
from oriel_inference.backends.pytorch.form import form_of
from oriel_inference.backends.pytorch.lane import BROKEN, Lane
from oriel_inference.errors import BackendFailed, LoadFailed, ModelNotReady, ServerStopping
from oriel_inference.model import EngineOptions, Gpu
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)

LIMITS = PythonLimits()  # a process has the times of one of a Python model
SHARING_KEY = "ENABLE_WEIGHT_SHARING"


class PyTorch(Backend):
    """Opens PyTorch programs. One object loads the versions of one model: what it opens twice shares a process."""

    name = "pytorch"
    apart = True

    def __init__(self) -> None:
        self._opened: list[_Program] = []

    def gpus(self) -> Sequence[Gpu]:
        if not list_gpus() or find_spec("torch") is None:
            return ()
        return list_gpus()[: _usable_gpus()]

    def open(self, path: Path, options: EngineOptions) -> Session:
        form = form_of(path)
        if find_spec("torch") is None:
            raise LoadFailed("PyTorch is not installed: pip install 'oriel-serving[torch]'")
        alike = [each for each in self._opened if (each.path, each.options) == (path, options) and each.users]
        if not alike or options.session_entries.get(SHARING_KEY) == "0":
            alike = [_Program(path, form, options)]
            self._opened += alike
        return PyTorchSession(alike[0])


class PyTorchSession(Session):
    """One instance of a program. program: shared with the other instances on the same device."""

    def __init__(self, program: "_Program") -> None:
        self.program = program
        program.users += 1
        self.provider = "pytorch"
        self.inputs, self.outputs = program.options.inputs, program.options.outputs
        self._numbers = {info.name: number for number, info in enumerate(self.outputs)}

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        arrays = [inputs.get(info.name) for info in self.inputs]
        return self.program.run(arrays, [self._numbers[name] for name in outputs])

    def memory_bytes(self) -> int:
        pid = self.program.pid
        return 0 if pid is None else resident_bytes(pid) // max(1, self.program.users)

    def close(self) -> None:
        self.program.release()


class _Program:
    """A program and its process; any thread may use it. Raises LoadFailed. users: the sessions that have it open."""

    def __init__(self, path: Path, form: str, options: EngineOptions) -> None:
        self.path = path
        self.options = options
        self.users = 0
        self._form = form
        self._shown = "/".join(path.parts[-3:])
        self._lock = threading.Lock()
        self._idle: list[Lane] = []
        self._deaths = 0
        self._down_until = 0.0
        self._started: _Started | None = self._load()

    @property
    def pid(self) -> int | None:
        """Return the id of the process while there is one."""
        started = self._started
        return None if started is None else started.helper.pid

    def run(self, arrays: Sequence[Array | None], wanted: list[int]) -> list[Array]:
        """Run one batch; blocks. Raises BackendFailed, and ModelNotReady while the process waits for its next start."""
        with self._lock:
            if not self.users:
                raise ServerStopping
            started = self._started = self._started or self._again()
            lane = self._idle.pop() if self._idle else None
        try:
            lane = lane or Lane(started.control, self.options.inputs, self.options.outputs)
            found = lane.run(arrays, wanted)
        except BROKEN as error:
            if lane is not None:
                lane.socket.close()
            raise self._died(started, str(error)) from error
        with self._lock:
            self._deaths = 0
            if started is self._started:
                self._idle.append(lane)
            else:
                lane.socket.close()
        if isinstance(found, str):
            raise BackendFailed(found)
        return found

    def release(self) -> None:
        """Count one user less; the last one ends the process."""
        with self._lock:
            self.users -= 1
            if not self.users:
                self._stop()

    def _again(self) -> "_Started":
        """Start the process once more."""
        wait_s = self._down_until - time.monotonic()
        if wait_s > 0.0:
            text = f"the process of the model has died again, and is started again in {wait_s:.1f} s"
            raise ModelNotReady(text, retry_s=wait_s)
        try:
            return self._load()
        except LoadFailed as failure:
            self._count_death()
            _log.error("%s could not be started again: %s", self._shown, failure.reason)
            raise BackendFailed("the process of the model could not be started again") from failure

    def _died(self, started: "_Started", why: str) -> BackendFailed:
        """Return the error of a batch whose process is gone, or is ended because of the batch."""
        with self._lock:
            if started is self._started:
                code = self._stop(ends=True)
                why = why if code is None else f"signal {-code}" if code < 0 else f"exit code {code}"
                self._count_death()
                _log.error("%s: its process died (%s), the next batch starts it again", self._shown, why)
        return BackendFailed(f"the process of the model died ({why}), it is started again")

    def _count_death(self) -> None:
        delay_s = min(LIMITS.backoff_s * (2 ** min(self._deaths, 16) - 1), LIMITS.max_backoff_s)
        self._down_until = time.monotonic() + delay_s
        self._deaths += 1

    def _stop(self, *, ends: bool = False) -> int | None:
        """Stop the process; return its exit code if it has ended by itself. ends: it is about to exit."""
        started, self._started = self._started, None
        while self._idle:
            self._idle.pop().socket.close()
        return None if started is None else started.stop(ends=ends)

    def _load(self) -> "_Started":
        """Start the process and have it load the program. Raises LoadFailed."""
        limit_s = float(self.options.session_entries.get(START_KEY, LIMITS.start_s))
        request = {**asdict(self.options), "path": str(self.path), "form": self._form}
        started = _take()
        try:
            answer, _ = started.helper.ask(request, timeout_s=limit_s)
        except HelperLate:
            answer = f"could not be opened within {limit_s:g} s"
        except HelperEnded as ended:
            answer = without_folders(f"crashes PyTorch: the process that opened it {ended}")
        if answer:
            started.stop()
            raise LoadFailed(f"{self._shown}: {answer}")
        _keep_spare()
        return started


@dataclass(frozen=True, slots=True)
class _Started:
    """A process without a model. control: the socket through which its lanes are opened."""

    helper: Helper
    control: socket.socket

    def stop(self, *, ends: bool = False) -> int | None:
        self.control.close()
        return self.helper.stop(ends=ends)


@cache
def _usable_gpus() -> int:
    """Return the number of GPUs that PyTorch finds; 0 for a build without CUDA."""
    started = _take()
    try:
        found, _ = started.helper.ask("gpus", timeout_s=LIMITS.start_s)
    except (HelperLate, HelperEnded):
        return 0
    with _taking:
        _spares.append(started)
    return int(found)


_spares: list[_Started] = []
_taking = threading.Lock()


def _take() -> _Started:
    """Return a process that may have imported PyTorch already. Raises LoadFailed."""
    with _taking:
        return _spares.pop() if _spares else _start()


def _keep_spare() -> None:
    """Start the process that waits for the next model, unless there is one."""
    with _taking, suppress(LoadFailed):
        if not _spares:
            _spares.append(_start())


def _start() -> _Started:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    number = theirs.fileno()
    helper = Helper("oriel_inference.backends.pytorch.child", str(number), descriptors=(number,))
    try:
        with theirs:
            helper.start()
    except OSError as error:
        raise LoadFailed(f"the process of the model could not be started: {error.strerror}") from error
    return _Started(helper, control)
