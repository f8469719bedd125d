"""The process that builds or checks one artefact: `python -m oriel_inference.artefacts.child NICENESS FILE_BYTES`.

A server that serves meanwhile gives it a low priority. It holds no secrets and no sockets.
"""

import io
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oriel_inference.errors import InferenceError, LoadFailed
from oriel_wire.process.served import Requests, bound_memory

if TYPE_CHECKING:
    from oriel_inference.backends import Session
    from oriel_inference.repository.compiling import Samples

__all__ = ["main"]

_MORE_BYTES = 4096  # a disk on which a write has failed has no room for another block


def main() -> None:
    """Answer until there are no more requests."""
    niceness, file_bytes = [int(word) for word in sys.argv[1:3]]
    requests = Requests(niceness=niceness, file_bytes=file_bytes)
    # A file that would grow too large is an error of the write, not the end of the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    # Python 3.11 keeps bytecode of which it could write only a part.
    sys.dont_write_bytecode = True
    while (given := requests.next()) is not None:
        requests.answer(_answer(*given))


def _answer(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    # Imported before the memory is bounded, because it is needed when there is none left.
    from oriel_inference.artefacts.process import kind_of, lacks_memory

    try:
        return _build(request) if request["samples"] is None else _check(request, data)
    except LoadFailed as failure:
        kind = "out_of_memory" if lacks_memory(failure.reason) else request["kind"]
        return {"kind": kind, "reason": failure.reason}
    except MemoryError as error:
        return {"kind": "out_of_memory", "reason": str(error) or "it needs more memory than a build may use"}
    except OSError as error:
        if (unwritable := kind_of(error)) is None:
            raise
        return {"kind": unwritable.value, "reason": f"its files cannot be written: {error.strerror}"}


def _build(request: dict[str, Any]) -> dict[str, Any]:
    from oriel_inference.backends.compilers import find_compiler
    from oriel_inference.model import EngineOptions
    from oriel_inference.repository.onnx_files import check_model_file

    source = Path(request["source"])
    check_model_file(source, request["shown"])
    compiler = find_compiler(request["compiler"])
    bound_memory(request["memory_bytes"])
    folder = Path(request["folder"])
    try:
        entry = compiler.build(source, EngineOptions(**request["options"]), folder)
    except LoadFailed as failure:  # a runtime that writes its files itself does not say that the disk is full
        if (unwritable := _write_error(folder)) is not None:
            raise unwritable from failure
        raise
    if entry.endswith(".onnx"):  # a variant is a file of the model's owner, too
        check_model_file(folder / entry, f"{request['shown'].rpartition('/')[0]}/{entry}")
    return {"entry": entry}


def _write_error(folder: Path) -> OSError | None:
    """Return the error of writing more into the files of a build that failed, if there is no room for that."""
    from oriel_inference.artefacts.process import kind_of

    try:
        for path in (*folder.iterdir(), folder / "more"):
            with path.open("ab", buffering=0) as file:
                left = _MORE_BYTES
                while left:
                    left -= file.write(bytes(left))
    except OSError as error:
        return error if kind_of(error) is not None else None
    return None


def _check(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Run the samples on the reference and on the artefact; those that the reference refuses are left out."""
    from oriel_inference.artefacts.process import read_samples
    from oriel_inference.backends import find_backend
    from oriel_inference.backends.compilers import find_compiler
    from oriel_inference.model import EngineOptions

    samples = read_samples(request["samples"], io.BytesIO(data))
    compiler, options = find_compiler(request["compiler"]), EngineOptions(**request["options"])
    backend = find_backend(compiler.reference)
    bound_memory(request["memory_bytes"])
    reference = backend.open(Path(request["source"]), options)
    artefact = compiler.open(Path(request["folder"], request["entry"]), options)
    return _compared(reference, artefact, samples, request)


def _compared(reference: "Session", artefact: "Session", samples: "Samples", request: dict[str, Any]) -> dict[str, Any]:
    from oriel_inference.backends import OutsideProfile
    from oriel_policies.artefacts.comparison import Tolerance
    from oriel_policies.artefacts.differences import measure_all

    for what in ("inputs", "outputs"):
        ours = {each.name: each.datatype for each in getattr(artefact, what)}
        theirs = {each.name: each.datatype for each in getattr(reference, what)}
        if ours != theirs:
            return {"kind": "outputs_differ", "reason": f"its {what} are {ours}, those of the model are {theirs}"[:500]}
    names = [info.name for info in reference.outputs]
    runs, refused = [], ""
    for sample in samples:
        try:
            expected = reference.run(sample, names)
        except InferenceError as error:
            refused = error.message
            continue
        try:
            runs.append((artefact.run(sample, names), expected))
        except OutsideProfile as outside:  # it was made for other batches, and the reference serves this one
            refused = outside.message
        except InferenceError as error:
            return {"kind": "outputs_differ", "reason": f"it fails where the model answers: {error.message}"}
    if not runs:
        return {"kind": "not_compared", "reason": f"the model and the artefact run with none of the samples: {refused}"}
    own = Tolerance(*request["tolerance"]) if request["tolerance"] else None
    outputs = [(info.name, info.datatype) for info in reference.outputs]
    errors = measure_all(outputs, runs, request["precision"], own)
    return {"errors": [asdict(each) for each in errors], "compared": len(runs)}


if __name__ == "__main__":
    main()
