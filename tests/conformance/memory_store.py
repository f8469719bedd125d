"""A test double of `ModelStore`: files stay in memory until a path is requested."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from oriel_inference.errors import LoadFailed
from oriel_inference.model import is_model_name, is_version
from oriel_inference.stores import FOLDER_ENTRIES, Fingerprint, decoded, relative_parts

MAX_COPY_BYTES = 64 << 20


class MemoryStore:
    """A repository in memory.

    files: `<model>/<path>` -> bytes; changed by `put` and `remove`.
    Files written by `artifact` lie in a temporary folder until `close`.
    """

    up = True
    fetches = False
    shown = "memory"
    namespace = ""
    renamed: Mapping[str, str] = {}

    def __init__(
        self, files: Mapping[str, bytes] | None = None, *, max_copy_bytes: int = MAX_COPY_BYTES, runs_code: bool = True
    ) -> None:
        self._files: dict[str, bytes] = {}
        self._max_copy_bytes = max_copy_bytes
        self._folder = Path(tempfile.mkdtemp(prefix="oriel-memory-"))
        self._written = 0
        self.runs_code = runs_code
        for name, data in (files or {}).items():
            self.put(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Write a file; a model exists as soon as it has one."""
        self._files["/".join(relative_parts(name))] = data

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with everything below it."""
        self._files = {each: data for each, data in self._files.items() if each != name and not _below(each, name)}

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "MemoryStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def models(self) -> Sequence[str]:
        found = {name.partition("/")[0] for name in self._files if "/" in name}
        return sorted(filter(is_model_name, found))

    def versions(self, model: str) -> Sequence[int]:
        if not any(_below(name, model) for name in self._files):
            raise LoadFailed(f"model {model!r} cannot be listed: it is not in the store")
        return sorted(int(name) for name in self._names(model) if is_version(name) and self._names(f"{model}/{name}"))

    def files(self, model: str, version: int) -> Sequence[str]:
        return self._names(f"{model}/{version}")

    def size_bytes(self, model: str, version: int) -> int:
        return sum(len(data) for name, data in self._files.items() if _below(name, f"{model}/{version}"))

    def text(self, model: str, filename: str) -> str | None:
        data = self._files.get(self._inside(model, filename))
        return None if data is None else decoded(data, f"{model}/{filename}")

    def artifact(self, model: str, version: int, filename: str) -> Path:
        name = self._inside(model, f"{version}/{filename}")
        if name not in self._files:
            entries = [f"{name}/{entry}" for entry in FOLDER_ENTRIES]  # the model is a folder
            name = next((entry for entry in entries if entry in self._files), entries[0])
        if name not in self._files:
            raise LoadFailed(f"{model}/{version}/{filename} is missing")
        # A new folder each time: a runtime may have mapped what was written before.
        self._written += 1
        folder = self._folder / str(self._written)
        self._write(f"{model}/{version}", folder)
        return folder / name.removeprefix(f"{model}/{version}/")

    def copy(self, model: str, version: int, into: Path) -> bool:
        found = [data for name, data in self._files.items() if _below(name, f"{model}/{version}")]
        if sum(map(len, found)) > self._max_copy_bytes:
            return False
        self._write(f"{model}/{version}", into)
        return True

    def data(self, model: str, filename: str) -> bytes:
        data = self._files.get(self._inside(model, filename))
        if data is None:
            raise LoadFailed(f"{model}/{filename} is missing")
        return data

    def retries(self, model: str) -> bool:
        return False  # changed files have another fingerprint

    def loaded(self, model: str) -> None:
        """Do nothing, because nothing was held for it."""

    def fingerprint(self, model: str) -> Fingerprint:
        shared = blake2b(digest_size=16)
        versions: dict[int, blake2b] = {}
        for name in sorted(name for name in self._files if _below(name, model)):
            first, _, rest = name.removeprefix(f"{model}/").partition("/")
            digest = versions.setdefault(int(first), blake2b(digest_size=16)) if rest and is_version(first) else shared
            digest.update(repr((name, self._files[name])).encode())
        return Fingerprint(
            shared=shared.hexdigest(), versions={version: each.hexdigest() for version, each in versions.items()}
        )

    def _names(self, folder: str) -> list[str]:
        found = {name.removeprefix(f"{folder}/").partition("/")[0] for name in self._files if _below(name, folder)}
        return sorted(found)

    def _inside(self, model: str, filename: str) -> str:
        return "/".join((model, *relative_parts(filename)))

    def _write(self, below: str, folder: Path) -> None:
        for name, data in self._files.items():
            if _below(name, below):
                path = folder / name.removeprefix(f"{below}/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)


def _below(name: str, folder: str) -> bool:
    return name.startswith(f"{folder}/")
