"""The values and variables with which the process of an instance is started, and the time limits of its steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from oriel_inference.model import TensorInfo
from oriel_wire.process.environment import selected
from oriel_wire.process.start import THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonLimits:
    """Time and size limits of one process.

    start_s: import and `initialize` together.
    finalize_s: `finalize` and the end of the process.
    grace_s: seconds that a batch may run on after all its callers have left.
    max_body_bytes: tensors of one message.
    backoff_s: the wait before the second restart in a row; each further one waits twice as long, up to max_backoff_s.
    """

    start_s: float = 120.0
    finalize_s: float = 5.0
    grace_s: float = 10.0
    max_body_bytes: int = 512 << 20
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The values with which a process is started.

    python: path of the interpreter; "" for the server's.
    threads: threads of its numeric libraries.
    environment: names of the server's variables that it gets in addition to the usual ones.
    """

    file: str = ""
    model: str
    version: str = ""
    config: str = ""
    args: Mapping[str, str] = field(default_factory=dict)
    decoupled: bool = True
    python: str = ""
    threads: int
    environment: tuple[str, ...] = ()
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()


def model_environment(server: Mapping[str, str], also: Sequence[str], *, threads: int, path: str) -> dict[str, str]:
    """Return the variables of a model's process.

    server: the server's own variables.
    also: names that the operator adds; see `selected`.
    path: the folders in which the child finds this package.
    threads: threads of the numeric libraries, unless the server's environment sets them.
    """
    found = selected(server, also)
    # The processes that the model starts get the variable as it was.
    found["ORIEL_PYTHONPATH"] = found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = path
    found["PYTHONUNBUFFERED"] = "1"
    for name in THREADS:
        found.setdefault(name, str(threads))
    return found
