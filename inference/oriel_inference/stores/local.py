"""Reads a model repository in a local folder.

Others than the operator may be able to write into the folder, so nothing outside of it is ever read: names are checked,
every path is resolved and must lie inside the resolved root, or a folder that the operator allows links to, and an
opened file is checked once more because its path may have been replaced meanwhile. Links that stay inside are allowed
(mounted ConfigMaps consist of them). Only regular
files are read: a pipe or a device could block the thread. Nothing is ever written.
"""

import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from oriel_inference.errors import LoadFailed
from oriel_inference.model import is_model_name, is_version
from oriel_inference.stores import FOLDER_ENTRIES, Fingerprint, decoded, relative_parts

_log = logging.getLogger(__name__)

_LEADS_OUT = (
    "leads out of the model repository: links must stay inside it, or lead into a folder that --allow-links-to names"
)
_MODEL_FILES = ("model.onnx", "model.py", "model.plan", "model.xml")
MAX_TEXT_BYTES = 1 << 20
MAX_DATA_BYTES = 64 << 20
MAX_ENTRIES = 10_000
MAX_FOLDERS_DEEP = 16
MAX_VERSION_BYTES = 16 << 30
MAX_COPY_BYTES = 64 << 20


class LocalStore:
    """The models below `root`. Raises LoadFailed at once if `root` is not a readable folder.

    max_version_bytes: limit of the files of one version together.
    max_copy_bytes: limit of the files of a version that `copy` copies.
    max_entries: limit of the entries of a folder, and of all entries below a version.
    runs_code: True if the operator put the files there, so that Python models may run.
    links_to: folders outside that links may lead into.
    """

    up = True  # a scan that fails raises
    fetches = False
    namespace = ""

    def __init__(
        self,
        root: Path,
        *,
        max_version_bytes: int = MAX_VERSION_BYTES,
        max_copy_bytes: int = MAX_COPY_BYTES,
        max_entries: int = MAX_ENTRIES,
        runs_code: bool = True,
        links_to: Sequence[Path] = (),
    ) -> None:
        self.renamed: Mapping[str, str] = {}
        self._root = root.resolve()
        self._readable = (self._root, *(each.resolve() for each in links_to))
        self.shown = self._root.name
        self._max_version_bytes = max_version_bytes
        self._max_copy_bytes = max_copy_bytes
        self._max_entries = max_entries
        self.runs_code = runs_code
        self._remarked = ""
        if not self._root.is_dir():
            raise LoadFailed(f"model repository {str(root)!r} is not a folder")

    def models(self) -> Sequence[str]:
        if self.renamed:
            return list(self.renamed)
        names = self._entries(self._root, "the model repository")
        if (remark := self._remark(names)) and remark != self._remarked:
            _log.warning("the model repository %s %s", self.shown, remark)
        self._remarked = remark
        # A broken or escaping link is listed, so that loading it reports the error.
        return [n for n in names if is_model_name(n) and ((self._root / n).is_dir() or (self._root / n).is_symlink())]

    def _remark(self, names: Sequence[str]) -> str:
        """Return what looks wrong in the repository's folder; "" if nothing does."""
        paths = ["config.pbtxt", *(f"{name}/{file}" for name in names if is_version(name) for file in _MODEL_FILES)]
        if held := next((path for path in paths if os.path.isfile(self._root / path)), ""):
            return f"looks like a model's folder, it holds {held}: give its parent {str(self._root.parent)!r} instead"
        odd = [name for name in names if not is_model_name(name) and name[0] != "." and name != "lost+found"]
        odd = [ascii(name[:64]) for name in odd if os.path.isdir(self._root / name)]
        return f"has folders that no model can be called, they are not served: {', '.join(odd[:8])}" if odd else ""

    def versions(self, model: str) -> Sequence[int]:
        folder = self._inside(model)
        names = self._entries(folder, f"model {model!r}")
        return sorted(int(name) for name in names if is_version(name) and (folder / name).is_dir())

    def files(self, model: str, version: int) -> Sequence[str]:
        try:
            return self._entries(self._inside(model, str(version)), f"{model}/{version}")
        except LoadFailed:
            return ()  # loading the version reports the error

    def size_bytes(self, model: str, version: int) -> int:
        return sum(size for _, _, size in self._scan_files(model, version))

    def text(self, model: str, filename: str) -> str | None:
        data = self._read(model, filename, MAX_TEXT_BYTES)
        return None if data is None else decoded(data, f"{model}/{filename}")

    def data(self, model: str, filename: str) -> bytes:
        data = self._read(model, filename, MAX_DATA_BYTES)
        if data is None:
            raise LoadFailed(f"{model}/{filename} is missing")
        return data

    def retries(self, model: str) -> bool:
        return False  # changed files have another fingerprint

    def loaded(self, model: str) -> None:
        """Do nothing, because nothing was held for it."""

    def fingerprint(self, model: str) -> Fingerprint:
        shared, versions = blake2b(digest_size=16), {}
        try:
            folder = self._inside(model)
            for name in self._names(folder):
                path = folder / name
                if is_version(name) and path.is_dir():
                    version = blake2b(digest_size=16)
                    self._walk(path, version.update, 0, [0])
                    versions[int(name)] = version.hexdigest()
                else:
                    self._walk(path, shared.update, 0, [0])
        except (OSError, LoadFailed) as error:
            # A model that cannot be read has this fingerprint; loading it reports the error.
            shared.update(repr(error).encode())
        return Fingerprint(shared=shared.hexdigest(), versions=versions)

    def artifact(self, model: str, version: int, filename: str) -> Path:
        # The runtime opens files named inside the model file (external weights), so none of them may lead outside.
        self._scan_files(model, version)
        path = self._inside(model, str(version), *relative_parts(filename))
        if path.is_dir():
            # The model is a folder: one file stands for it, and its weights lie beside that.
            entry = next((name for name in FOLDER_ENTRIES if (path / name).is_file()), FOLDER_ENTRIES[0])
            path = self._inside(model, str(version), *relative_parts(filename), entry)
        if not path.is_file():
            raise LoadFailed(f"{model}/{version}/{filename} is missing")
        return path

    def copy(self, model: str, version: int, into: Path) -> bool:
        files = self._scan_files(model, version)
        left = self._max_copy_bytes
        if sum(size for _, _, size in files) > left:
            return False
        for path, relative, _ in files:
            target = into / relative
            if target.parent != into:
                target.parent.mkdir(parents=True, exist_ok=True)
            shown = f"{model}/{version}/{relative}"
            try:
                source = self._open(path, shown)
            except FileNotFoundError as error:
                raise LoadFailed(f"{shown} has vanished while it was being read") from error
            with source, target.open("xb") as written:
                while chunk := source.read(1 << 20):
                    left -= len(chunk)
                    if left < 0:
                        raise LoadFailed(f"{shown} grew while it was being read")
                    written.write(chunk)
        return True

    def _scan_files(self, model: str, version: int) -> list[tuple[Path, Path, int]]:
        """Return every file of a version: its real path, its name below the version's folder, and its size.

        Raises LoadFailed if one of them must not be opened.
        """
        folder = self._inside(model, str(version))
        found: list[tuple[Path, Path, int]] = []
        total = 0
        for entry in self._below(folder, f"{model}/{version}"):
            shown = f"{model}/{version}/{entry.name}"
            path = self._check(entry, shown)
            status = self._status(path, shown)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise LoadFailed(f"{shown} is neither a file nor a folder: pipes, sockets and devices are refused")
            if stat.S_ISREG(status.st_mode):
                total += status.st_size
                found.append((path, entry.relative_to(folder), status.st_size))
            if total > self._max_version_bytes:
                raise LoadFailed(f"{model}/{version} holds more than {self._max_version_bytes} bytes")
        return found

    def _inside(self, model: str, *parts: str) -> Path:
        folder = self.renamed.get(model, model)
        return self._check(self._root.joinpath(folder, *parts), "/".join((model, *parts)))

    def _check(self, path: Path, shown: str) -> Path:
        try:
            resolved = path.resolve()
        except (OSError, RuntimeError) as error:
            raise LoadFailed(f"{shown} is a link to itself") from error
        if not self._may_read(resolved):
            raise LoadFailed(f"{shown} {_LEADS_OUT}")
        return resolved

    def _may_read(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(each) for each in self._readable)

    def _status(self, path: Path, shown: str) -> os.stat_result:
        try:
            return path.stat()
        except OSError as error:
            raise LoadFailed(f"{shown} cannot be read: {error.strerror}") from error

    def _read(self, model: str, filename: str, limit: int) -> bytes | None:
        """Return a small file; None if it is missing."""
        shown = f"{model}/{filename}"
        path = self._inside(model, *relative_parts(filename))
        try:
            with self._open(path, shown) as file:
                data: bytes = file.read(limit + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LoadFailed(f"{shown} cannot be read: {error.strerror}") from error
        if len(data) > limit:
            raise LoadFailed(f"{shown} is larger than {limit} bytes")
        return data

    def _open(self, path: Path, shown: str) -> BinaryIO:
        """Open a regular file inside the root, even if its path was exchanged meanwhile. Raises FileNotFoundError as
        such.
        """
        try:
            # A pipe must not block before it is checked.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise LoadFailed(f"{shown} cannot be read: {error.strerror}") from error
        file = os.fdopen(descriptor, "rb")
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            file.close()
            raise LoadFailed(f"{shown} is not a file")
        where = Path(f"/proc/self/fd/{descriptor}")
        # A folder on the way may have become a link after the path was resolved. Without /proc this cannot be checked.
        if where.parent.is_dir() and not self._may_read(Path(os.readlink(where))):
            file.close()
            raise LoadFailed(f"{shown} {_LEADS_OUT}")
        return file

    def _walk(self, path: Path, say: Callable[[bytes], None], depth: int, seen: list[int]) -> None:
        """Pass the state of `path` and all below it to `say`. seen: a counter that bounds the walk of a huge folder."""
        seen[0] += 1
        if seen[0] > self._max_entries or depth > MAX_FOLDERS_DEEP:
            return
        try:
            status = path.lstat()
            if stat.S_ISLNK(status.st_mode):
                path = path.resolve()
                say(os.fsencode(path))
                if not self._may_read(path):
                    return
                status = path.stat()
        except (OSError, RuntimeError):
            say(b"unreadable")
            return
        if stat.S_ISDIR(status.st_mode):
            try:
                below = self._names(path)
            except OSError:
                below = []
            say(f"{len(below)} in {status.st_ino}".encode())
            for name in below:
                say(os.fsencode(name))
                self._walk(path / name, say, depth + 1, seen)
        else:
            say(f"{status.st_mode} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}".encode())

    def _names(self, folder: Path) -> list[str]:
        """Return the names in a folder, sorted; one more than the limit if there are more. Raises OSError."""
        with os.scandir(folder) as entries:
            return sorted(each.name for each in islice(entries, self._max_entries + 1))

    def _entries(self, folder: Path, what: str) -> list[str]:
        try:
            names = self._names(folder)
        except OSError as error:
            raise LoadFailed(f"{what} cannot be listed: {error.strerror}") from error
        if len(names) > self._max_entries:
            raise LoadFailed(f"{what} has more than {self._max_entries} entries")
        return names

    def _below(self, folder: Path, what: str) -> Iterator[Path]:
        """Yield all below a folder, also through links that lead out of it; the caller has to check each before it asks
        for the next.
        """
        count = 0
        for parent, folders, files in os.walk(folder, followlinks=True):
            for name in (*folders, *files):
                count += 1
                if count > self._max_entries:
                    raise LoadFailed(f"{what} has more than {self._max_entries} entries")
                yield Path(parent, name)
            # A link that stays below the folder leads to what is read anyway.
            paths = [Path(parent, name) for name in folders]
            folders[:] = [
                each.name for each in paths if not (each.is_symlink() and each.resolve().is_relative_to(folder))
            ]
