"""The process in which a model file is opened for the first time: `python -m oriel_inference.repository.check_child`.

One JSON object per line in, one per line out. It holds no secrets and no sockets, and it may die: whoever wrote the
model file gains nothing but that. Ends when its input ends.
"""

import contextlib
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.model import EngineOptions

__all__ = ["main"]


def main() -> None:
    """Answer until the input ends."""
    # The runtime may print what it likes: only this descriptor is the answer's.
    answers = os.dup(1)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    for line in sys.stdin.buffer:
        reason, runs = _judge(json.loads(line))
        os.write(answers, json.dumps({"reason": reason, "runs": runs}).encode() + b"\n")


def _judge(request: dict[str, Any]) -> tuple[str, bool]:
    """Why the file cannot be opened, empty if it can; whether it runs with zeros, which need not be valid for it."""
    from oriel_inference.backends import find_backend
    from oriel_inference.repository.onnx_files import check_model_file
    from oriel_inference.repository.zeros import row_of_zeros

    path = Path(request["path"])
    # Should nobody be left to kill this process, it ends itself.
    signal.alarm(request["timeout_s"])
    try:
        check_model_file(path, request["shown"])
        backend = find_backend(request["backend"])
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
