"""The child process that opens model files for `check`: `python -m oriel_inference.repository.check_child [BACKEND]`.
With BACKEND it imports that one before the first request.

Reads one JSON object per line and writes one per line. It holds no secrets and no sockets: the author of a hostile
model file can at most kill it. It exits at the end of its input.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.check import NICENESS
from oriel_wire.process.child import restrict_self

if TYPE_CHECKING:
    from oriel_inference.backends import Backend

__all__ = ["main"]


def main() -> None:
    """Answer until the input ends."""
    # The runtime may print to descriptor 1: answers go to a copy of it.
    answers = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    restrict_self()
    os.nice(NICENESS)
    if len(sys.argv) > 1:
        _import(sys.argv[1])
    gc.freeze()  # what lives now lives until the end: no collection walks it
    for line in sys.stdin.buffer:
        reason, runs = _judge(json.loads(line))
        os.write(answers, json.dumps({"reason": reason, "runs": runs}).encode() + b"\n")


def _import(name: str) -> "Backend":
    """Import what a check needs, and return the backend called `name`."""
    from oriel_inference.backends import find_backend
    from oriel_inference.repository import onnx_files, zeros

    del onnx_files, zeros
    return find_backend(name)


def _judge(request: dict[str, Any]) -> tuple[str, bool]:
    """The reason why the file cannot be opened, or "", and whether the model runs with zeros; a good one need not."""
    from oriel_inference.repository.onnx_files import check_model_file
    from oriel_inference.repository.zeros import row_of_zeros

    path = Path(request["path"])
    # The process ends itself if its parent is no longer there to kill it.
    signal.alarm(request["timeout_s"])
    try:
        if request["backend"] == "onnxruntime":
            check_model_file(path, request["shown"])
        backend = _import(request["backend"])
        if request["memory_bytes"]:
            hard = resource.getrlimit(resource.RLIMIT_AS)[1]
            resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], hard))
        session = backend.open(path, EngineOptions(**request["options"]))
        runs = True
        try:
            session.run(row_of_zeros(session.inputs), [info.name for info in session.outputs])
        except InferenceError:
            runs = False
        session.close()
    except LoadFailed as failure:
        return failure.reason, False
    except MemoryError:
        return f"{request['shown']} needs more memory than a model check may use", False
    finally:
        signal.alarm(0)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    return "", runs


if __name__ == "__main__":
    main()
