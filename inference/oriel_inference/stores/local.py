"""A model repository in a folder.

The folder may be written by others than the operator, so nothing outside it is ever opened: names are checked, and
every path is resolved and must still lie inside the resolved root. Links that stay inside are fine (mounted
ConfigMaps are made of them).
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from oriel_inference.errors import LoadFailed
from oriel_inference.model import is_model_name, is_version

__all__ = ["LocalStore"]

MAX_TEXT_BYTES = 1 << 20
MAX_ENTRIES = 10_000


class LocalStore:
    """Models below `root`. Raises LoadFailed at once if `root` is not a folder that can be read."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        if not self._root.is_dir():
            raise LoadFailed(f"model repository {str(root)!r} is not a folder")

    def models(self) -> Sequence[str]:
        names = self._entries(self._root, "the model repository")
        # A broken or escaping link is listed, so that loading it says what is wrong.
        return [n for n in names if is_model_name(n) and ((self._root / n).is_dir() or (self._root / n).is_symlink())]

    def versions(self, model: str) -> Sequence[int]:
        folder = self._inside(model)
        names = self._entries(folder, f"model {model!r}")
        return sorted(int(name) for name in names if is_version(name) and (folder / name).is_dir())

    def text(self, model: str, filename: str) -> str | None:
        path = self._inside(model, *_parts(filename))
        try:
            with path.open("rb") as file:
                data = file.read(MAX_TEXT_BYTES + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LoadFailed(f"{model}/{filename} cannot be read: {error.strerror}") from error
        if len(data) > MAX_TEXT_BYTES:
            raise LoadFailed(f"{model}/{filename} is larger than {MAX_TEXT_BYTES} bytes")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise LoadFailed(f"{model}/{filename} is not UTF-8 text") from error

    def artifact(self, model: str, version: int, filename: str) -> Path:
        folder = self._inside(model, str(version))
        # The runtime opens files named inside the model file (external weights): none of them may lead out.
        for entry in self._below(folder, f"{model}/{version}"):
            self._check(entry, f"{model}/{version}/{entry.name}")
        path = self._inside(model, str(version), *_parts(filename))
        if not path.is_file():
            raise LoadFailed(f"{model}/{version}/{filename} is missing")
        return path

    def _inside(self, *parts: str) -> Path:
        return self._check(self._root.joinpath(*parts), "/".join(parts))

    def _check(self, path: Path, shown: str) -> Path:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError) as error:
            raise LoadFailed(f"{shown} is a link to itself") from error
        if not resolved.is_relative_to(self._root):
            raise LoadFailed(f"{shown} leads out of the model repository: links must stay inside it")
        return resolved

    def _entries(self, folder: Path, what: str) -> list[str]:
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise LoadFailed(f"{what} cannot be listed: {error.strerror}") from error
        if len(names) > MAX_ENTRIES:
            raise LoadFailed(f"{what} has more than {MAX_ENTRIES} entries")
        return names

    def _below(self, folder: Path, what: str) -> Iterator[Path]:
        count = 0
        for parent, folders, files in os.walk(folder):
            for name in (*folders, *files):
                count += 1
                if count > MAX_ENTRIES:
                    raise LoadFailed(f"{what} has more than {MAX_ENTRIES} entries")
                yield Path(parent, name)


def _parts(filename: str) -> Sequence[str]:
    """The parts of a relative file name; anything that could climb is refused before it touches the disk."""
    parts = filename.split("/")
    if not filename or "\0" in filename or any(part in ("", ".", "..") for part in parts):
        raise LoadFailed(f"file name {filename[:64]!r} must be relative and stay inside the model's folder")
    return parts
