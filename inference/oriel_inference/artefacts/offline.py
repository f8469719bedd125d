"""Builds and verifies artefacts without a server: for `oriel engines`, ahead of a deployment. All functions block."""

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oriel_inference.artefacts.folder import ArtefactDamaged, ArtefactFolder, Manifest
from oriel_inference.artefacts.process import (
    ArtefactRefused,
    BuildBounds,
    ChildProcesses,
    Wanted,
    build,
    check_copy,
    private_copy,
)
from oriel_inference.backends import find_backend
from oriel_inference.backends.compilers import find_compiler
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.compiling import COMPILE_KEY, Compilation, may_ask
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore
from oriel_policies.artefacts.comparison import EXACT, tolerance_of
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.artefacts.lifecycle import RefusalKind, is_remembered
from oriel_wire.v2.datatypes import quoted

CHECK_S = 60.0
REPORT_S = 5.0  # between two reports of the progress of one phase
Progress = Callable[[str, float], None]  # phase, and for how many seconds it has lasted


def compilations(root: Path, names: Collection[str] = ()) -> Iterator[tuple[str, Compilation | str]]:
    """Yield `model/version`, and what its artefact is made from or why that cannot be: for every version that would
    serve and whose configuration asks for an artefact.

    names: names of the models; empty for all models that ask for an artefact. Raises LoadFailed if the folder is none.
    """
    store = LocalStore(root, runs_code=False)
    check = CheckPool(CHECK_S)
    try:
        for name in names or store.models():
            loading = Loading(store, name, find_backend=find_backend, cores=1, models=1, check=check)
            try:
                if not names and not may_ask(loading.configuration()):
                    continue
                versions = load_model(loading)
            except LoadFailed as failure:
                yield name, failure.reason
                continue
            for version, loaded in versions.items():
                if isinstance(loaded, LoadedVersion):
                    loaded.close()
                    if loaded.compilation is None and not names:
                        continue  # the variant fp32, or ONNX Runtime's own OpenVINO provider
                    missing = f"its configuration has no parameters[{COMPILE_KEY!r}]"
                    yield f"{name}/{version}", loaded.compilation or missing
                elif loaded is not None:
                    yield f"{name}/{version}", loaded.reason
    finally:
        check.close_idle()


def build_ahead(
    compilation: Compilation,
    folder: ArtefactFolder,
    bounds: BuildBounds,
    progress: Progress,
    *,
    again: bool = False,
) -> tuple[str, Manifest]:
    """Make sure that the artefact is in the folder, with checked outputs. Returns "built" or "found", and its manifest.

    again: remove what is there first, and a refusal that is remembered. Raises ArtefactRefused, LoadFailed and OSError.
    """
    if wrong := folder.open():
        raise ArtefactRefused(RefusalKind.NO_SPACE, wrong)
    wanted = Wanted.of(compilation, bounds)
    fingerprint = wanted.key.fingerprint
    if again:
        folder.remove(fingerprint)
    if (kept := folder.refusal(fingerprint)) is not None and kept.conditions == wanted.conditions:
        raise ArtefactRefused(kept.kind, f"it was refused before: {kept.reason}")
    if (found := _sound(folder, fingerprint)) is not None:
        return "found", found
    try:
        with _reported(progress) as enter:
            return "built", build(wanted, folder, ChildProcesses(bounds), enter)
    except ArtefactRefused as refused:
        if (found := _sound(folder, fingerprint)) is not None:
            return "found", found  # a server has built it meanwhile
        if is_remembered(refused.kind):
            folder.remember(wanted.refusal(refused))
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The result of comparing the outputs of an artefact with those of its model.

    text: text of the largest errors, or why the artefact would not serve; "" if there is no artefact.
    refused: the kind of the refusal; None if the outputs agree.
    tolerance: text with the tolerance of each data type among the outputs.
    """

    fingerprint: str
    text: str
    refused: RefusalKind | None
    tolerance: str


def verify_outputs(compilation: Compilation, folder: ArtefactFolder, bounds: BuildBounds) -> Verified:
    """Check the outputs of an artefact in the folder as a server does before it serves.

    Raises ArtefactDamaged, LoadFailed and OSError.
    """
    wanted = Wanted.of(compilation, bounds)
    fingerprint = wanted.key.fingerprint
    text, kind = "", None
    manifest = folder.find(fingerprint)
    if manifest is not None:
        try:
            with private_copy(folder, fingerprint, manifest) as copy:
                text = check_copy(wanted, copy, ChildProcesses(bounds))
        except ArtefactRefused as refused:
            text, kind = refused.reason, refused.kind
    own = compilation.tolerance
    found = {each.datatype: tolerance_of(each.datatype, wanted.key.precision, own) for each in compilation.spec.outputs}
    tolerances = [
        f"{name} {'equal' if each == EXACT else f'{each.absolute:g} absolute + {each.relative:g} relative'}"
        for name, each in sorted(found.items())
    ]
    return Verified(fingerprint=fingerprint, text=text, refused=kind, tolerance=", ".join(tolerances))


def unfit(key: ArtefactKey) -> str:
    """Return why an artefact cannot be used on this machine, whatever model it is for; "" if nothing is known against
    it.
    """
    try:
        here = find_compiler(key.compiler).identity(EngineOptions())
    except LoadFailed as failure:
        return failure.reason
    for what, theirs, ours in (
        ("compiler version", key.compiler_version, here.compiler_version),
        ("driver", key.driver, here.driver),
    ):
        if theirs != ours:
            return f"it was built for {what} {quoted(theirs)}, here is {quoted(ours)}"
    if key.device != here.device:
        theirs_only = sorted(set(key.device.split()) - set(here.device.split()))
        ours_only = sorted(set(here.device.split()) - set(key.device.split()))
        lacks = f"this one lacks {' '.join(theirs_only)}" if theirs_only else f"this one also has {' '.join(ours_only)}"
        return f"it was built for another device: {lacks}"
    return ""


def _sound(folder: ArtefactFolder, fingerprint: str) -> Manifest | None:
    """Return the manifest of an artefact whose files are whole; remove one whose files are not."""
    try:
        manifest = folder.find(fingerprint)
        if manifest is not None:
            folder.copy(fingerprint, manifest, None)
    except ArtefactDamaged:
        folder.discard(fingerprint)
        return None
    return manifest


@contextmanager
def _reported(progress: Progress) -> Iterator[Callable[[str], None]]:
    """Report each phase when it begins, and then every REPORT_S from another thread. Gives what begins a phase."""
    ended, phase = threading.Event(), ("", 0.0)

    def enter(name: str) -> None:
        nonlocal phase
        phase = (name, time.monotonic())
        progress(name, 0.0)

    def report() -> None:
        while not ended.wait(REPORT_S):
            name, since = phase
            progress(name, time.monotonic() - since)

    reporting = threading.Thread(target=report, name="artefact-progress", daemon=True)
    reporting.start()
    try:
        yield enter
    finally:
        ended.set()
        reporting.join()
