"""Builds and checks artefacts in child processes, within bounds on time, memory and bytes. All functions block.

A hostile model file, a compiler that hangs or needs too much memory, and an artefact that crashes the runtime can only
end the child.
"""

import errno
import hashlib
import json
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from oriel_inference.artefacts.folder import FORM, ArtefactDamaged, ArtefactFolder, FileLine, Manifest, describe_files
from oriel_inference.backends.compilers import compiles_on_gpu
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.compiling import Compilation, Samples
from oriel_policies.artefacts.comparison import OutputError, agreement, disagreement
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.refusals import Circumstances, Refusal, RefusalKind
from oriel_wire.process.child import Child
from oriel_wire.v2.datatypes import DATATYPES, decode_raw, raw_view

_log = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
BASE_MEMORY_BYTES = 2 << 30
MEMORY_PER_BYTE = 8
START_S = 1.0  # a child that has not started by then gets hardly any idle time; it needs about a fifth of that
MAX_LINES = 10_000  # about the progress of one build
_CHILD = "oriel_inference.artefacts.child"
# Exit codes of a child that was ended together with the server, by a terminal or a service manager.
_ENDED_WITH_US = (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
_NO_MEMORY = ("bad allocation", "bad_alloc", "failed to allocate memory", "out of memory", "of the gpu's memory")
# Errors of a write that say nothing about the model.
_UNWRITABLE = {
    errno.EFBIG: RefusalKind.TOO_LARGE,
    errno.ENOSPC: RefusalKind.NO_SPACE,
    errno.EDQUOT: RefusalKind.NO_SPACE,
}


class _Starved(Exception):
    """A child that runs only where nothing else wants the processor has not ended in time."""


class ArtefactRefused(Exception):
    """An artefact cannot serve. kept: whether the refusal was written into the folder."""

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        self.kept = False
        self.kind = kind
        self.reason = " ".join(reason.split())
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBounds:
    """Bounds of one build, and of one check.

    seconds: for the child. memory_bytes: of its address space; 0 for 2 GiB and eight times the model's files.
    artefact_bytes: of all files of an artefact. niceness: added to that of this process. idle: try it first
    where nothing else wants the processor, for as long, and at this niceness only if that was not enough.
    """

    seconds: float = 600.0
    memory_bytes: int = 0
    artefact_bytes: int = 16 << 30
    niceness: int = 0
    idle: bool = False


class ChildProcesses:
    """The children under way, so that a server that stops need not wait for them. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[Child] = set()
        self._closed = False

    def ask(self, request: dict[str, Any], data: bytes, bounds: BuildBounds) -> dict[str, Any]:
        """Start a child for one request and return its answer. Raises ArtefactRefused."""
        if bounds.idle:
            with suppress(_Starved):
                return self._ask(request | {"idle": True}, data, bounds)
            if request["samples"] is None:  # a build, which may have written something
                _empty(Path(request["folder"]))
        return self._ask(request | {"idle": False}, data, bounds)

    def _ask(self, request: dict[str, Any], data: bytes, bounds: BuildBounds) -> dict[str, Any]:
        """Ask one child. Raises _Starved if it was to be idle and its time is over, and ArtefactRefused."""
        deadline, starved = time.monotonic() + bounds.seconds, False
        with self._lock:
            if self._closed:
                raise ArtefactRefused(RefusalKind.STOPPED, "the server is stopping")
            child = Child(_CHILD)
            self._running.add(child)
        try:
            child.write(json.dumps(request).encode() + b"\n", deadline)
            if request["idle"]:
                child.wait(min(deadline, time.monotonic() + START_S))
            child.write(data, deadline)
            answer = _answer(child, deadline, request["shown"])
        except TimeoutError:
            if request["idle"]:
                starved = True
                raise _Starved from None
            what = f"it took longer than {bounds.seconds:g} s"
            raise ArtefactRefused(RefusalKind.TIMED_OUT, what) from None
        except (OSError, ValueError):
            code = child.end()
            if self._closed:
                raise ArtefactRefused(RefusalKind.STOPPED, "the server is stopping") from None
            if code in _ENDED_WITH_US:  # or by somebody who meant the child alone
                raise ArtefactRefused(RefusalKind.STOPPED, "the process that tried it was stopped") from None
            if code == -signal.SIGKILL and not request["memory_bytes"]:
                text = "the kernel ended the process that tried it, as it does where no memory is left"
                raise ArtefactRefused(RefusalKind.NO_SPACE, text) from None
            raise ArtefactRefused(RefusalKind.CRASHED, f"the process that tried it ended with {code}") from None
        finally:
            with self._lock:
                self._running.discard(child)
            if starved:  # even to exit it needs time that it may not get
                child.kill()
                threading.Thread(target=child.end, daemon=True).start()
            else:
                child.end()
        if reason := answer.get("reason"):
            kind = RefusalKind(answer["kind"])
            if kind is RefusalKind.OUT_OF_MEMORY and not request["memory_bytes"]:
                kind = RefusalKind.NO_SPACE  # others left too little of the machine's memory, or of the GPU's
            raise ArtefactRefused(kind, str(reason))
        return dict(answer)

    def close(self) -> None:
        """End the children under way, and start no more."""
        with self._lock:
            self._closed = True
            for child in self._running:
                child.kill()


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _answer(child: Child, deadline: float, shown: str) -> dict[str, Any]:
    """Return the answer of a child; the lines about its progress before that go to the log."""
    for _ in range(MAX_LINES):
        for line in child.read_line(MAX_ANSWER_BYTES, deadline).splitlines():
            answer: dict[str, Any] = json.loads(line)
            if "started" in answer:
                continue
            if "progress" not in answer:
                return answer
            _log.info("%s: %s", shown, str(answer["progress"])[:200])
    raise ValueError("the child reports too much")


def circumstances(compilation: Compilation, source: Path, bounds: BuildBounds, samples: Samples) -> Circumstances:
    """Return what may void a refusal of the artefact of `source`."""
    lines, data = write_samples(compilation, samples)
    return Circumstances(
        seconds=bounds.seconds,
        memory_bytes=_memory_bytes(compilation, source, bounds),
        artefact_bytes=bounds.artefact_bytes,
        tolerance=compilation.tolerance_text,
        samples=hashlib.sha256(json.dumps(lines).encode() + data).hexdigest(),
    )


def build(
    compilation: Compilation,
    key: ArtefactKey,
    folder: ArtefactFolder,
    bounds: BuildBounds,
    samples: Samples,
    children: ChildProcesses,
    progress: Callable[[str], None],
) -> Manifest:
    """Build, check and publish the artefact of `key`. progress: called with "building", then "checking".

    Raises ArtefactRefused, and OSError where the folder cannot be written.
    """
    try:
        with folder.work() as work:
            with _unchanged(compilation, key) as source:
                progress("building")
                began = time.monotonic()
                entry = compile_into(compilation, source, work, bounds, children)
                build_s = time.monotonic() - began
                files = describe_files(work)
                if sum(each.size_bytes for each in files.values()) > bounds.artefact_bytes:
                    raise ArtefactRefused(RefusalKind.TOO_LARGE, f"it has more than {bounds.artefact_bytes} bytes")
                manifest = _manifest(compilation, key, entry, files, build_s)
                progress("checking")
                with folder.work() as copy:  # a runtime may write beside what it opens
                    for name in files:
                        shutil.copyfile(work / name, copy / name)
                    errors = check(compilation, source, copy, manifest, bounds, samples, children)
                manifest = msgspec.structs.replace(manifest, errors=errors)
            folder.publish(work, manifest)
            return manifest
    except ArtefactDamaged as damaged:
        raise ArtefactRefused(RefusalKind.NOT_COMPILED, str(damaged)) from damaged


def check_copy(
    compilation: Compilation,
    key: ArtefactKey,
    copy: Path,
    manifest: Manifest,
    bounds: BuildBounds,
    samples: Samples,
    children: ChildProcesses,
) -> str:
    """Check the outputs of a private copy of an artefact; return the largest errors as text. Raises ArtefactRefused."""
    with _unchanged(compilation, key) as source:
        return check(compilation, source, copy, manifest, bounds, samples, children)


def check(
    compilation: Compilation,
    source: Path,
    folder: Path,
    manifest: Manifest,
    bounds: BuildBounds,
    samples: Samples,
    children: ChildProcesses,
) -> str:
    """Compare the outputs of the artefact in `folder` with those of `source`; return the largest errors as text.

    Raises ArtefactRefused.
    """
    entry, precision = manifest.entry, manifest.key["precision"]
    errors, compared = measure_outputs(compilation, source, folder, entry, precision, bounds, samples, children)
    if reason := disagreement(errors):
        raise ArtefactRefused(RefusalKind.OUTPUTS_DIFFER, reason)
    return f"{agreement(errors)} over {compared} samples"


def compile_into(
    compilation: Compilation, source: Path, folder: Path, bounds: BuildBounds, children: ChildProcesses
) -> str:
    """Write the artefact of `source` into an empty folder; return the name of the file to open. Raises
    ArtefactRefused.
    """
    request = _request(compilation, source, folder, bounds, RefusalKind.NOT_COMPILED)
    return str(children.ask(request, b"", bounds)["entry"])


def measure_outputs(
    compilation: Compilation,
    source: Path,
    folder: Path,
    entry: str,
    precision: str,
    bounds: BuildBounds,
    samples: Samples,
    children: ChildProcesses,
) -> tuple[list[OutputError], int]:
    """Return how the outputs of the artefact in `folder` differ from those of `source`, and over how many samples.

    precision: in which the artefact computes. Raises ArtefactRefused if it cannot be compared.
    """
    lines, data = write_samples(compilation, samples)
    own = compilation.tolerance
    request = _request(compilation, source, folder, bounds, RefusalKind.NOT_OPENED) | {
        "entry": entry,
        "samples": lines,
        "tolerance": [own.absolute, own.relative] if own is not None else None,
        "precision": precision,
        "file_bytes": 0,
    }
    answer = children.ask(request, data, bounds)
    return [OutputError(**each) for each in answer["errors"]], int(answer["compared"])


def write_samples(compilation: Compilation, samples: Samples) -> tuple[list[dict[str, list[Any]]], bytes]:
    """Return samples for a child: input -> [datatype, shape, bytes] of each, and the bytes of all of them."""
    datatypes = {tensor.name: tensor.datatype for tensor in compilation.spec.inputs}
    lines: list[dict[str, list[Any]]] = []
    pieces: list[bytes] = []
    for sample in samples:
        line: dict[str, list[Any]] = {}
        for name, array in sample.items():
            pieces.append(bytes(raw_view(array, datatypes[name], array.shape, name)))
            line[name] = [datatypes[name], list(array.shape), len(pieces[-1])]
        lines.append(line)
    return lines, b"".join(pieces)


def read_samples(lines: list[dict[str, list[Any]]], data: IO[bytes]) -> Samples:
    """Read what `write_samples` wrote."""
    return [
        {
            name: decode_raw(data.read(size), 0, size, DATATYPES[datatype], tuple(shape), name)
            for name, (datatype, shape, size) in line.items()
        }
        for line in lines
    ]


def lacks_memory(text: str) -> bool:
    """Return whether the error of a runtime is about memory, which says nothing about the artefact."""
    return any(each in text.lower() for each in _NO_MEMORY)


def kind_of(error: OSError) -> RefusalKind | None:
    """Return why an artefact could not be written, None for any other error."""
    return _UNWRITABLE.get(error.errno or 0)


def refusal_of(refused: ArtefactRefused, under: Circumstances) -> Refusal:
    """Return a refusal as it is remembered."""
    return Refusal(kind=refused.kind, reason=refused.reason, under=under)


@contextmanager
def _unchanged(compilation: Compilation, key: ArtefactKey) -> Iterator[Path]:
    """Give the model's file. If it changes before the end, nothing that was found out holds: raises ArtefactRefused."""
    try:
        with compilation.source() as source:

            def compare() -> None:
                if compilation.key(source) != key:
                    raise ArtefactRefused(RefusalKind.CHANGED, "the model's files have changed")

            compare()
            try:
                yield source
            finally:
                compare()
    except LoadFailed as failure:
        raise ArtefactRefused(RefusalKind.CHANGED, failure.reason) from failure


def _request(
    compilation: Compilation, source: Path, folder: Path, bounds: BuildBounds, kind: RefusalKind
) -> dict[str, Any]:
    return {
        "source": str(source),
        "shown": f"{compilation.model}/{compilation.version}/{source.name}",
        "compiler": compilation.compiler.name,
        "options": {
            **asdict(compilation.place.options),
            "intra_op_threads": 1,
            "inter_op_threads": 1,
            "concurrent_runs": 1,
        },
        "folder": str(folder),
        "kind": kind.value,
        "samples": None,
        "timeout_s": int(bounds.seconds) + 5,
        "niceness": bounds.niceness,
        "memory_bytes": _memory_bytes(compilation, source, bounds),
        "file_bytes": bounds.artefact_bytes,
    }


def _memory_bytes(compilation: Compilation, source: Path, bounds: BuildBounds) -> int:
    """Return the bound of a child's address space; 0 for none, because memory of a GPU that is mapped counts too."""
    if compiles_on_gpu(compilation.compiler):
        return 0
    size_bytes = sum(each.stat().st_size for each in source.parent.rglob("*") if each.is_file())
    return bounds.memory_bytes or BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size_bytes


def _manifest(
    compilation: Compilation, key: ArtefactKey, entry: str, files: dict[str, FileLine], build_s: float
) -> Manifest:
    if entry not in files:
        raise ArtefactRefused(RefusalKind.NOT_COMPILED, "the compiler wrote no file")
    return Manifest(
        form=FORM,
        key=key.parts(),
        entry=entry,
        files=files,
        model=compilation.model,
        version=compilation.version,
        built_at_s=time.time(),
        build_s=round(build_s, 3),
        errors="",
    )
