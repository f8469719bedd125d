"""The child process that opens model files for `check`: `python -m oriel_inference.repository.check_child [BACKEND]`.
With BACKEND it imports that one before the first request.

It holds no secrets and no sockets: the author of a hostile model file can at most kill it.
"""

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_inference.model import EngineOptions
from oriel_wire.process.served import Requests, bound_memory

if TYPE_CHECKING:
    from oriel_inference.backends import Backend

__all__ = ["main"]

NICENESS = 10  # serving goes first


def main() -> None:
    """Answer until there are no more requests."""
    requests = Requests(niceness=NICENESS)
    if len(sys.argv) > 1:
        _import(sys.argv[1])
    gc.freeze()  # all present objects live until the end: no collection need walk them
    while (given := requests.next()) is not None:
        requests.answer(_judge(given[0]))


def _import(name: str) -> "Backend":
    """Import what a check needs, and return the backend called `name`."""
    from oriel_inference.backends import find_backend
    from oriel_inference.repository import onnx_files, warmup

    del onnx_files, warmup
    return find_backend(name)


def _judge(request: dict[str, Any]) -> tuple[str, bool]:
    """The reason why the file cannot be opened, or "", and whether the model runs with zeros; a good one need not."""
    from oriel_inference.repository.onnx_files import check_model_file
    from oriel_inference.repository.warmup import row_of_zeros

    path = Path(request["path"])
    try:
        if path.suffix == ".onnx" or request["backend"] == "onnxruntime":
            check_model_file(path, request["shown"])
        backend = _import(request["backend"])
        bound_memory(request["memory_bytes"])
        session = backend.open(path, EngineOptions(**request["options"]))
        runs = True
        try:
            shaped = [replace(info, shape=request["shapes"].get(info.name, info.shape)) for info in session.inputs]
            session.run(row_of_zeros(shaped), [info.name for info in session.outputs])
        except InferenceError:
            runs = False
        session.close()
    except LoadFailed as failure:
        return failure.reason, False
    except MemoryError:
        return f"{request['shown']} needs more memory than a model check may use", False
    finally:
        bound_memory(0)
    return "", runs


if __name__ == "__main__":
    main()
