"""Finds TensorRT and CUDA's bindings. Both are imported when a plan is first loaded: most servers have neither.

TensorRT reports why something failed only to its logger. `PlanLog` keeps the text of errors for the thread in which
they happened, so that the error of a load or of a batch can carry it.
"""

import logging
import threading
from collections import deque
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from oriel_inference.backends import without_folders
from oriel_inference.errors import LoadFailed

EXTRA = "pip install 'oriel-serving[tensorrt]'"
OLDEST_MAJOR = 10
MAX_KEPT = 4
MAX_TEXT = 300

_log = logging.getLogger(__name__)


class PlanLog:
    """The errors that TensorRT reports, for the thread in which they happened."""

    def __init__(self) -> None:
        self._kept = threading.local()

    def keep(self, text: str) -> None:
        """Keep the text of an error that this thread has caused."""
        self._kept.__dict__.setdefault("lines", deque[str](maxlen=MAX_KEPT)).append(text)

    def pop_errors(self) -> str:
        """Return the errors that this thread has caused since the last call; "" if there are none."""
        lines: deque[str] = self._kept.__dict__.pop("lines", deque())
        return "; ".join(lines)


@dataclass(frozen=True, slots=True)
class Library:
    """The libraries that a plan needs. tensorrt: the module. runtime: the module `cuda.bindings.runtime`."""

    tensorrt: Any
    runtime: Any
    log: PlanLog

    @property
    def version(self) -> str:
        """Return the version of TensorRT."""
        return str(self.tensorrt.__version__)


def find_library() -> Library:
    """Return the library that runs plans on this machine. Raises LoadFailed, which names the missing part."""
    # The package `tensorrt` only repeats the names of its bindings, and is missing where those were installed alone.
    tensorrt = _imported("tensorrt_bindings" if _is_missing("tensorrt") else "tensorrt", "TensorRT")
    version = str(tensorrt.__version__)
    if int(version.partition(".")[0]) < OLDEST_MAJOR:
        raise LoadFailed(f"TensorRT {version} is installed, and this server runs plans with 10 and 11: {EXTRA}")
    runtime = _imported("cuda.bindings.runtime", "cuda-bindings")
    try:
        error, count = runtime.cudaGetDeviceCount()
    except RuntimeError as failure:  # the driver's library is missing
        raise LoadFailed(f"TensorRT plans need an NVIDIA GPU with its driver: {_line(failure)}") from failure
    if int(error) or not count:
        why = error_text(runtime, error) if int(error) else "the driver shows no GPU to this process"
        raise LoadFailed(f"TensorRT plans need an NVIDIA GPU with its driver: {why}")
    return Library(tensorrt, runtime, _log_of(tensorrt))


def error_text(runtime: Any, error: Any) -> str:
    """Return what CUDA says about one of its error codes."""
    failed, text = runtime.cudaGetErrorString(error)
    if int(failed):
        return f"CUDA error {int(error)}"
    return text.decode(errors="replace") if isinstance(text, bytes) else str(text)


def _is_missing(module: str) -> bool:
    try:
        return find_spec(module) is None
    except ValueError:  # it has been imported, from no file
        return False


def _imported(module: str, product: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if module == error.name or module.startswith(f"{error.name}."):
            raise LoadFailed(f"TensorRT plans need {product}, which is not installed: {EXTRA}") from error
        raise LoadFailed(f"{product} is installed, but cannot be imported: {_line(error)}") from error
    except (ImportError, OSError, RuntimeError) as error:  # a library behind it is missing
        raise LoadFailed(f"{product} is installed, but cannot be imported: {_line(error)}") from error


def _line(error: Exception) -> str:
    return without_folders(str(error))[:MAX_TEXT]


@cache
def _log_of(tensorrt: Any) -> PlanLog:
    """Return the logger of this process: TensorRT warns about a second one."""
    levels = {
        tensorrt.ILogger.INTERNAL_ERROR: logging.WARNING,
        tensorrt.ILogger.ERROR: logging.WARNING,
        tensorrt.ILogger.WARNING: logging.INFO,
    }
    errors = (tensorrt.ILogger.INTERNAL_ERROR, tensorrt.ILogger.ERROR)

    class Log(PlanLog, tensorrt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            tensorrt.ILogger.__init__(self)
            PlanLog.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            """Take one line; called by TensorRT in the thread that uses it, and in threads of its own."""
            text = without_folders(message)[:MAX_TEXT]
            if severity in errors:
                self.keep(text)
            _log.log(levels.get(severity, logging.DEBUG), "TensorRT: %s", text)

    return Log()
