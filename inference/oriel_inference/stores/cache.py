"""Keeps versions of a remote repository on this machine, up to a number of bytes.

    lock                               held by the one process that uses this folder
    versions/<digest>/files/...        whole versions, each published by one rename
    versions/<digest>/manifest.json    their checksums; every process verifies them before it first uses the version
    partial/<digest>/...               versions that are being fetched; kept so that a fetch can be resumed
    shared/<digest>                    small files beside the versions, each after its own checksum
    models/<model>.json                the files of the model when it was last loaded

`<digest>` is computed from the listed files, so names from outside become paths only inside `files`. Nobody else writes
here: a folder that is a link, belongs to another user or is writable for others is refused. If the folder is removed
while the server runs, the next fetch creates it again. The least recently used versions are evicted, but never those
that serve or are being loaded.
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from hashlib import sha256
from pathlib import Path
from threading import RLock
from typing import BinaryIO

from oriel_inference.errors import LoadFailed, NotKept
from oriel_inference.stores.manifest import Manifest, agrees, read_document, write_document
from oriel_inference.stores.own_files import open_new, own_folder, read_own, untouched
from oriel_inference.stores.snapshot import ModelFiles

_log = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
_FOLDERS = ("versions", "partial", "shared", "models")
# Protection of a version's files from the time when its path is handed out until the version is known to serve.
HANDED_S = 600.0


class Cache:
    """The cache folder of one server. Raises LoadFailed at once if the folder cannot be used. Methods block; any thread
    may call them.

    in_use: returns the identities of the versions that serve; a digest that is part of one of them is not evicted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        in_use: Callable[[], Collection[str]] = tuple,
        handed_s: float = HANDED_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._handed_s = handed_s
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._now = now
        self._lock = RLock()
        self._verified: set[str] = set()
        self._held: dict[str, float] = {}  # digest -> until when it is not evicted
        self._reserved: dict[str, int] = {}
        self._left: dict[str, int] = {}  # partly fetched, and not being fetched now
        self._sizes: dict[str, int] = {}
        self._shared_bytes = 0
        try:
            self._make()
            self._own = self._locked()
            self._sizes = self._scan_files()
        except OSError as error:
            raise LoadFailed(f"--model-cache cannot be written: {error.strerror}") from error

    def _make(self) -> None:
        """Create the missing folders. Raises OSError, LoadFailed."""
        for folder in (self._folder, *(self._folder / name for name in _FOLDERS)):
            if wrong := own_folder(folder):
                raise LoadFailed(f"--model-cache: {folder.name!r} in it {wrong}: name a folder of this server's own")

    def _locked(self) -> BinaryIO:
        """Lock the folder for this process. Raises OSError, LoadFailed."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        own: BinaryIO = os.fdopen(os.open(self._folder / "lock", flags, 0o600), "ab")
        try:
            fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            own.close()
            raise LoadFailed("another server uses this --model-cache: give each one of its own") from error
        return own

    def _there(self) -> None:
        """Create the folder again if it, or a part of it, was removed. Raises OSError, LoadFailed."""
        with self._lock:
            if all((self._folder / name).is_dir() for name in _FOLDERS) and self._is_locked():
                return
            _log.warning(
                "model cache: its folder was removed and is created again; versions are fetched when they are needed"
            )
            self._make()
            if not self._is_locked():
                own = self._locked()
                self._own.close()
                self._own = own
            self._verified.clear()
            self._left.clear()
            self._sizes = self._scan_files()

    def _is_locked(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._folder / "lock"), os.fstat(self._own.fileno()))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the folder for other processes."""
        self._own.close()

    @property
    def used_bytes(self) -> int:
        """Return the bytes of all versions and shared files; a version that is being fetched counts with its full size.

        Never waits.
        """
        parts = (self._sizes, self._reserved, self._left)
        return sum(sum(tuple(each.values())) for each in parts) + self._shared_bytes

    # Versions ---------------------------------------------------------------------------------------------------

    def has(self, digest: str) -> bool:
        """Return whether the version seems to be complete here; `version` verifies that."""
        return digest in self._sizes

    def version(self, digest: str) -> Path | None:
        """Return the folder with the version's verified files; None if the version has to be fetched (again)."""
        with self._lock:
            if digest not in self._sizes:
                return None
            self.protect(digest)
        folder = self._folder / "versions" / digest
        if digest not in self._verified:
            wrong = self._wrong(folder)
            if wrong:
                _log.warning("model cache: %s, it is fetched again", wrong)
                self._remove(digest)
                return None
            self._verified.add(digest)
        try:
            os.utime(folder / MANIFEST_FILE)
        except OSError:
            self._remove(digest)
            return None
        return folder / "files"

    def partial(self, digest: str, size_bytes: int) -> Path:
        """Return the folder to fetch the version into, with what an earlier try left there, after making room for it.

        Raises NotKept if there is no room: what serves is never evicted for it. Raises OSError.
        """
        self._there()
        with self._lock:
            self._reserved.pop(digest, None)
            self._left.pop(digest, None)
            while self.used_bytes + size_bytes > self._max_bytes:
                if self._left:
                    each, _ = self._left.popitem()
                    shutil.rmtree(self._folder / "partial" / each, ignore_errors=True)
                    continue
                oldest = self._oldest()
                if oldest is None:
                    raise NotKept(
                        f"the model cache ({self._max_bytes} bytes) has no room for {size_bytes} beside what serves or "
                        "is being loaded: give it more --model-cache-bytes"
                    )
                _log.info("model cache: %s is removed to make room", self._shown(oldest))
                self._remove(oldest)
            self._reserved[digest] = size_bytes
        folder = self._folder / "partial" / digest
        if not untouched(folder):
            _log.warning("model cache: a partly fetched version has been changed by others, it is fetched again")
        (folder / "files").mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    def publish(self, digest: str, manifest: Manifest) -> Path:
        """Make the fetched files the version in one step; return the folder with its files."""
        partial, whole = self._folder / "partial" / digest, self._folder / "versions" / digest
        write_document(partial / MANIFEST_FILE, manifest)
        with self._lock:
            if whole.exists():
                self._remove(digest)
            partial.rename(whole)
            self._reserved.pop(digest, None)
            self._sizes[digest] = manifest.size_bytes
            self._verified.add(digest)
            self.protect(digest)
        return whole / "files"

    def abandon(self, digest: str) -> None:
        """Report that the fetch of a version failed; the next try may use the part that was fetched."""
        with self._lock:
            if size_bytes := self._reserved.pop(digest, 0):
                self._left[digest] = size_bytes

    def protect(self, digest: str) -> None:
        """Report that a version is about to be used, so that it is not evicted before it is known to serve."""
        with self._lock:
            self._held[digest] = self._now() + self._handed_s

    def unprotect(self, digest: str) -> None:
        """Report that a version will not be used after all; it may be evicted unless it serves."""
        with self._lock:
            self._held.pop(digest, None)

    def _oldest(self) -> str | None:
        """Return the least recently used entry that may be evicted."""
        used = tuple(self._in_use())
        now = self._now()
        self._held = {digest: until for digest, until in self._held.items() if until > now}
        free = [
            digest
            for digest in self._sizes
            if digest not in self._held and not any(digest in identity for identity in used)
        ]
        return min(free, key=self._used_at, default=None)

    def _used_at(self, digest: str) -> float:
        try:
            return (self._folder / "versions" / digest / MANIFEST_FILE).stat().st_mtime
        except OSError:
            return 0.0

    def _remove(self, digest: str) -> None:
        with self._lock:
            self._sizes.pop(digest, None)
            self._verified.discard(digest)
            gone = self._folder / "partial" / f"{digest}.gone"
            try:
                shutil.rmtree(gone, ignore_errors=True)
                (self._folder / "versions" / digest).rename(gone)
            except OSError as error:
                _log.debug("model cache: %s", error)
        shutil.rmtree(gone, ignore_errors=True)

    def _wrong(self, folder: Path) -> str:
        """Return the difference between the files and the manifest, "" if there is none."""
        try:
            if not untouched(folder):
                return f"{folder.name} contains a file that this server did not write"
        except OSError:
            return f"{folder.name} cannot be read"
        manifest = read_document(folder / MANIFEST_FILE, Manifest)
        if manifest is None:
            return f"{folder.name} has no manifest"
        for file in manifest.files:
            path = folder / "files" / file.name
            try:
                if not agrees(path, file):
                    return f"{manifest.shown}/{file.name} differs from what was fetched"
            except OSError:
                return f"{manifest.shown}/{file.name} cannot be read"
        return ""

    def _shown(self, digest: str) -> str:
        manifest = read_document(self._folder / "versions" / digest / MANIFEST_FILE, Manifest)
        return manifest.shown if manifest else digest

    def _scan_files(self) -> dict[str, int]:
        """Return digest -> bytes of every version and of the shared files. Half removed entries are deleted."""
        for each in (self._folder / "partial").glob("*.gone"):
            shutil.rmtree(each, ignore_errors=True)
        self._shared_bytes = sum(each.stat().st_size for each in (self._folder / "shared").iterdir())
        for each in (self._folder / "partial").iterdir():
            self._left[each.name] = sum(path.stat().st_size for path in each.rglob("*") if path.is_file())
        found: dict[str, int] = {}
        for folder in (self._folder / "versions").iterdir():
            manifest = read_document(folder / MANIFEST_FILE, Manifest)
            if manifest is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                found[folder.name] = manifest.size_bytes
        return found

    # Small files and shared parts of models ---------------------------------------------------------------------

    def shared(self, digest: str) -> bytes | None:
        """Return its bytes; None if they are missing or not what was kept."""
        path = self._folder / "shared" / digest
        try:
            head, _, data = read_own(path).partition(b"\n")
        except OSError:
            return None
        if head.decode("ascii", "replace") != _sha256(data):
            _log.warning("model cache: a small file differs from what was fetched, it is fetched again")
            return None
        return data

    def keep_shared(self, digest: str, data: bytes) -> None:
        """Keep a shared file. Raises OSError."""
        self._there()
        path = self._folder / "shared" / digest
        beside = path.with_name(f"{digest}.new")
        with self._lock:
            with os.fdopen(open_new(beside), "wb") as file:
                file.write(_sha256(data).encode() + b"\n" + data)
            os.replace(beside, path)
            self._shared_bytes += path.stat().st_size

    def records(self) -> Mapping[str, ModelFiles]:
        """Return model -> its files when it was last loaded."""
        found = {path.stem: read_document(path, ModelFiles) for path in (self._folder / "models").glob("*.json")}
        return {model: files for model, files in found.items() if files is not None}

    def record(self, model: str, files: ModelFiles) -> None:
        try:
            write_document(self._folder / "models" / f"{model}.json", files)
        except OSError as error:
            # A failure matters only to the next start.
            _log.warning("model cache: %s cannot be written: %s", model, error.strerror)

    def forget(self, model: str) -> None:
        (self._folder / "models" / f"{model}.json").unlink(missing_ok=True)

    def keep_only(self, partial: Collection[str], shared: Collection[str]) -> None:
        """Delete all other partly fetched versions and shared files. Raises OSError."""
        with self._lock:
            if not self._folder.exists():
                return
            for each in (self._folder / "partial").iterdir():
                if each.name not in partial and each.name not in self._reserved:
                    self._left.pop(each.name, None)
                    shutil.rmtree(each, ignore_errors=True)
            for each in (self._folder / "shared").iterdir():
                if each.name not in shared:
                    each.unlink(missing_ok=True)
            self._shared_bytes = sum(each.stat().st_size for each in (self._folder / "shared").iterdir())


def _sha256(data: bytes) -> str:
    return sha256(data).hexdigest()
