"""Tells which kind of PyTorch program a file is, from its directory of contents. Nothing of the file is executed, and
PyTorch is not needed.

A file of `torch.save` is a pickle: reading it with Python may run whatever its author wrote. Such a file is refused. A
TorchScript file is a zip with code that only PyTorch's own interpreter reads. `torch.export` writes a zip with a graph
in JSON; objects that it can only keep as pickles are refused too.
"""

import struct
import zipfile
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from oriel_inference.errors import LoadFailed

MAX_GROWTH = 8  # bytes in memory for one of the file: a small file must not take all memory
MAX_DIRECTORY_BYTES = 8 << 20  # of a zip, before it is read: an entry of 50 bytes takes 700 in memory
_READING = (OSError, ValueError, RuntimeError, struct.error, zipfile.BadZipFile)
_AGAIN = "save the model as a program instead: docs/pytorch.md shows how"


class Form(StrEnum):
    """The kinds of programs."""

    TORCHSCRIPT = "torchscript"
    EXPORTED = "exported"
    COMPILED = "compiled"
    MODULE = "module"


def form_of(path: Path) -> Form:
    """Return the kind of a file. Raises LoadFailed for a pickle and for what is no program."""
    shown = "/".join(path.parts[-3:])
    if path.suffix == ".py":
        weights = path.with_suffix(".pt")
        if weights.exists():
            raise LoadFailed(
                f"{'/'.join(weights.parts[-3:])} beside {path.name} would hold weights as a pickle, which is never "
                f"loaded: rename it, and let the module load its weights in __init__, from a safetensors file; see "
                f"docs/pytorch.md"
            )
        return Form.MODULE
    try:
        with path.open("rb") as file:
            start = file.read(4)
            end = zipfile._EndRecData(file)  # type: ignore[attr-defined]
        if start[:1] == b"\x80":
            raise LoadFailed(f"{shown} is a pickle, which is code and never loaded: {_AGAIN}")
        if not start.startswith(b"PK"):
            raise LoadFailed(f"{shown} is not a file of torch.jit.save or torch.export.save: {_AGAIN}")
        if end and end[zipfile._ECD_SIZE] > MAX_DIRECTORY_BYTES:  # type: ignore[attr-defined]
            raise LoadFailed(f"{shown} has a directory of more than {MAX_DIRECTORY_BYTES} bytes: {_AGAIN}")
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            unpacked = sum(entry.file_size for entry in archive.infolist())
    except _READING as error:
        raise LoadFailed(f"{shown} is cut off or damaged ({error}): copy it again") from error
    if unpacked > MAX_GROWTH * path.stat().st_size:
        raise LoadFailed(f"{shown} takes {unpacked} bytes of memory, PyTorch does not compress its files: {_AGAIN}")
    return _of_contents(names, shown)


def _of_contents(names: Sequence[str], shown: str) -> Form:
    # Everything lies in one folder, whose name does not matter; compiled packages of older versions have none.
    inner = {name.partition("/")[2] for name in names} | set(names)
    if any(name.startswith("data/aotinductor/") for name in inner):
        return Form.COMPILED
    if any(name.startswith("models/") for name in inner) and "archive_format" in inner:
        if any(name.startswith("data/constants/opaque_obj") for name in inner):
            raise LoadFailed(f"{shown} holds pickled Python objects as constants, which are never loaded: {_AGAIN}")
        return Form.EXPORTED
    if "data.pkl" in inner and any(name.startswith("code/") for name in inner):
        return Form.TORCHSCRIPT
    if "data.pkl" in inner:
        raise LoadFailed(f"{shown} is a pickle of torch.save, which is code and never loaded: {_AGAIN}")
    if "serialized_exported_program.json" in inner:
        raise LoadFailed(f"{shown} holds its weights as a pickle, as torch before 2.8 wrote them: export it again")
    raise LoadFailed(f"{shown} is a zip, but not of torch.jit.save or torch.export.save: {_AGAIN}")
