"""Folders with artefacts that no compiler has made, for tests of what carries them."""

from dataclasses import replace
from pathlib import Path

from oriel_inference.artefacts.folder import FORM, ArtefactFolder, Manifest, describe_files
from oriel_inference.backends.compilers import find_compiler
from oriel_inference.model import EngineOptions
from oriel_policies.artefacts.fingerprint import ArtefactKey

FILES = {"optimised.onnx": b"graph", "weights.bin": b"", "more": b"weights"}


def key_of_here(**more: str) -> ArtefactKey:
    """Return the key of an artefact that fits this machine, but for what is given."""
    here = find_compiler("onnxruntime-graph").identity(EngineOptions())
    key = ArtefactKey(
        model="m", compiler="onnxruntime-graph", compiler_version=here.compiler_version, device=here.device
    )
    return replace(key, **more)


def published(root: Path, key: ArtefactKey, files: dict[str, bytes] | None = None) -> ArtefactFolder:
    folder = ArtefactFolder(root, max_bytes=1 << 30)
    assert folder.open() == ""
    with folder.work() as work:
        for name, data in (files or FILES).items():
            (work / name).write_bytes(data)
        folder.publish(
            work,
            Manifest(
                form=FORM,
                key=key.parts(),
                entry="optimised.onnx",
                files=describe_files(work),
                model="double",
                version=1,
                built_at_s=0.0,
                build_s=0.0,
                errors="",
            ),
        )
    return folder


def other_folder(root: Path) -> ArtefactFolder:
    folder = ArtefactFolder(root, max_bytes=1 << 30)
    assert folder.open() == ""
    return folder
