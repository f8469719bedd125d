"""Builds and checks artefacts in child processes, within bounds on time, memory and bytes. All functions block.

A hostile model file, a compiler that hangs or needs too much memory, and an artefact that crashes the runtime can only
end the child.
"""

import errno
import hashlib
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import IO, Any

import msgspec

from oriel_inference.artefacts.folder import (
    FORM,
    MAX_TEXT,
    ArtefactDamaged,
    ArtefactFolder,
    FileLine,
    Manifest,
    Refusal,
    describe_files,
)
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.compiling import Compilation, Samples
from oriel_policies.artefacts.comparison import OutputError, agreement, disagreement
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_wire.process.helper import Helper, HelperEnded, HelperLate
from oriel_wire.v2.datatypes import DATATYPES, decode_raw, raw_view

BASE_MEMORY_BYTES = 2 << 30
MEMORY_PER_BYTE = 8
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


class ArtefactRefused(Exception):
    """An artefact cannot serve."""

    def __init__(self, kind: RefusalKind, reason: str) -> None:
        self.kind = kind
        self.reason = " ".join(reason.split())
        super().__init__(self.reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildBounds:
    """Bounds of one build, and of one check.

    seconds: time that the child may take.
    memory_bytes: address space of the child; 0 for 2 GiB and eight times the model's files.
    artefact_bytes: size of all files of an artefact.
    niceness: number that is added to the niceness of this process.
    """

    seconds: float = 600.0
    memory_bytes: int = 0
    artefact_bytes: int = 16 << 30
    niceness: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An artefact that is to be built or checked.

    key: the parts of its fingerprint.
    samples: inputs with which its outputs are compared with those of the model.
    conditions: digest of the bounds, the tolerance and the samples; a refusal holds while that is the same.
    """

    compilation: Compilation
    key: ArtefactKey
    samples: Samples
    conditions: str

    @classmethod
    def of(cls, compilation: Compilation, bounds: BuildBounds) -> "Wanted":
        """Return the artefact of the model's present files. Raises LoadFailed."""
        with compilation.source() as source:
            key = compilation.key(source)
        samples = compilation.samples()
        lines, data = write_samples(compilation, samples)
        limits = [bounds.seconds, bounds.memory_bytes, bounds.artefact_bytes]
        digest = hashlib.sha256(json.dumps([limits, repr(compilation.tolerance), lines]).encode() + data)
        return cls(compilation=compilation, key=key, samples=samples, conditions=digest.hexdigest())

    def refusal(self, refused: ArtefactRefused) -> Refusal:
        """Return the record of a refusal of this artefact, to be stored."""
        return Refusal(
            key=self.key.parts(),
            kind=refused.kind,
            reason=refused.reason[:MAX_TEXT],
            conditions=self.conditions,
            model=self.compilation.model,
            at_s=time.time(),
        )


class ChildProcesses:
    """The children under way, so that a server that stops need not wait for them. Any thread may use it.

    bounds: limits of each child.
    """

    def __init__(self, bounds: BuildBounds) -> None:
        self.bounds = bounds
        self._lock = threading.Lock()
        self._running: set[Helper] = set()
        self._closed = False

    def ask(self, request: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Start a child for one request and return its answer. Raises ArtefactRefused."""
        helper = Helper(_CHILD, str(self.bounds.niceness), str(request["file_bytes"]))
        with self._lock:
            if self._closed:
                raise ArtefactRefused(RefusalKind.STOPPED, "the server is stopping")
            self._running.add(helper)

        try:
            answer, _ = helper.ask(request, [data], timeout_s=self.bounds.seconds)
        except HelperLate:
            text = f"it took longer than {self.bounds.seconds:g} s"
            raise ArtefactRefused(RefusalKind.TIMED_OUT, text) from None
        except HelperEnded as ended:
            if self._closed:
                raise ArtefactRefused(RefusalKind.STOPPED, "the server is stopping") from None
            if ended.code in _ENDED_WITH_US:  # or by somebody who meant the child alone
                raise ArtefactRefused(RefusalKind.STOPPED, "the process that tried it was stopped") from None
            if ended.code == -signal.SIGKILL and not request["memory_bytes"]:
                text = "the kernel ended the process that tried it, as it does where no memory is left"
                raise ArtefactRefused(RefusalKind.NO_SPACE, text) from None
            raise ArtefactRefused(RefusalKind.CRASHED, f"the process that tried it {ended}") from None
        finally:
            with self._lock:
                self._running.discard(helper)
            helper.stop()
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
            for helper in self._running:
                helper.close()


def build(
    wanted: Wanted, folder: ArtefactFolder, children: ChildProcesses, progress: Callable[[str], None]
) -> Manifest:
    """Build, check and publish an artefact, unless somebody else publishes it first. Return the artefact's manifest.

    progress: called with "building", then "checking". Raises ArtefactRefused, and OSError where the folder cannot be
    written.
    """
    try:
        with folder.work() as work:
            with _unchanged(wanted) as source:
                progress("building")
                began = time.monotonic()
                entry = compile_into(wanted, source, work, children)
                build_s = time.monotonic() - began
                files = describe_files(work)
                most = children.bounds.artefact_bytes
                if sum(each.size_bytes for each in files.values()) > most:
                    raise ArtefactRefused(RefusalKind.TOO_LARGE, f"it has more than {most} bytes")
                manifest = _manifest(wanted, entry, files, build_s)
                progress("checking")
                with folder.work() as copy:  # a runtime may write beside what it opens
                    for name in files:
                        shutil.copyfile(work / name, copy / name)
                    errors = _check(wanted, source, copy / entry, children)
                manifest = msgspec.structs.replace(manifest, errors=errors)
            folder.publish(work, manifest)
            return manifest
    except ArtefactDamaged as damaged:
        raise ArtefactRefused(RefusalKind.NOT_COMPILED, str(damaged)) from damaged


def check_copy(wanted: Wanted, artefact: Path, children: ChildProcesses) -> str:
    """Compare the outputs of a private copy of an artefact with those of the model.

    artefact: the file to open. Returns the largest errors as text. Raises ArtefactRefused.
    """
    with _unchanged(wanted) as source:
        return _check(wanted, source, artefact, children)


@contextmanager
def private_copy(folder: ArtefactFolder, fingerprint: str, manifest: Manifest) -> Iterator[Path]:
    """Give the file to open of a copy of an artefact that nobody else writes. Raises ArtefactDamaged, and
    ArtefactRefused if it cannot be made.
    """
    with ExitStack() as stack:
        try:
            made = TemporaryDirectory(prefix="oriel-artefact-", ignore_cleanup_errors=True)
            copy = Path(stack.enter_context(made))
            folder.copy(fingerprint, manifest, copy)
        except OSError as error:
            text = f"its private copy in {gettempdir()} cannot be made: {error.strerror}"
            raise ArtefactRefused(RefusalKind.NO_SPACE, text) from error
        yield copy / manifest.entry


def _check(wanted: Wanted, source: Path, artefact: Path, children: ChildProcesses) -> str:
    errors, compared = measure_outputs(wanted, source, artefact, children)
    if reason := disagreement(errors):
        raise ArtefactRefused(RefusalKind.OUTPUTS_DIFFER, reason)
    return f"{agreement(errors)} over {compared} samples"


def compile_into(wanted: Wanted, source: Path, folder: Path, children: ChildProcesses) -> str:
    """Write the artefact of `source` into an empty folder; return the name of the file to open. Raises
    ArtefactRefused.
    """
    request = _request(wanted.compilation, source, folder, children.bounds) | {"kind": RefusalKind.NOT_COMPILED.value}
    return str(children.ask(request, b"")["entry"])


def measure_outputs(
    wanted: Wanted, source: Path, artefact: Path, children: ChildProcesses
) -> tuple[list[OutputError], int]:
    """Return how the outputs of an artefact differ from those of `source`, and over how many samples.

    artefact: the file to open. Raises ArtefactRefused if it cannot be compared.
    """
    lines, data = write_samples(wanted.compilation, wanted.samples)
    own = wanted.compilation.tolerance
    request = _request(wanted.compilation, source, artefact.parent, children.bounds) | {
        "kind": RefusalKind.NOT_OPENED.value,
        "entry": artefact.name,
        "samples": lines,
        "tolerance": [own.absolute, own.relative] if own is not None else None,
        "precision": wanted.key.precision,
        "file_bytes": 0,
    }
    answer = children.ask(request, data)
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


@contextmanager
def _unchanged(wanted: Wanted) -> Iterator[Path]:
    """Give the model's file. If it changes before the end, nothing that was found out holds: raises ArtefactRefused."""
    compilation = wanted.compilation
    try:
        with compilation.source() as source:

            def compare() -> None:
                if compilation.key(source) != wanted.key:
                    raise ArtefactRefused(RefusalKind.CHANGED, "the model's files have changed")

            compare()
            try:
                yield source
            finally:
                compare()
    except LoadFailed as failure:
        raise ArtefactRefused(RefusalKind.CHANGED, failure.reason) from failure


def _request(compilation: Compilation, source: Path, folder: Path, bounds: BuildBounds) -> dict[str, Any]:
    return {
        "source": str(source),
        "shown": f"{compilation.model}/{compilation.version}/{source.name}",
        "compiler": compilation.compiler.name,
        "options": compilation.place.options.for_child(),
        "folder": str(folder),
        "samples": None,
        "memory_bytes": _memory_bytes(compilation, source, bounds),
        "file_bytes": bounds.artefact_bytes,
    }


def _memory_bytes(compilation: Compilation, source: Path, bounds: BuildBounds) -> int:
    """Return the bound of a child's address space; 0 for none, because memory of a GPU that is mapped counts too."""
    if compilation.compiler.on_gpu:
        return 0
    size_bytes = sum(each.stat().st_size for each in source.parent.rglob("*") if each.is_file())
    return bounds.memory_bytes or BASE_MEMORY_BYTES + MEMORY_PER_BYTE * size_bytes


def _manifest(wanted: Wanted, entry: str, files: dict[str, FileLine], build_s: float) -> Manifest:
    if entry not in files:
        raise ArtefactRefused(RefusalKind.NOT_COMPILED, "the compiler wrote no file")
    return Manifest(
        form=FORM,
        key=wanted.key.parts(),
        entry=entry,
        files=files,
        model=wanted.compilation.model,
        version=wanted.compilation.version,
        built_at_s=time.time(),
        build_s=round(build_s, 3),
        errors="",
    )
