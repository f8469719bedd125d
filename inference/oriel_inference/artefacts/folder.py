"""The folder of artefacts, which the servers of a group may share.

    <fingerprint>/manifest.json, and the files that it names    published by one rename, never changed afterwards
    <fingerprint>.refused                                       a refusal that is remembered
    .work-*                                                     builds in progress

Everything is read as if somebody else had written it: a manifest is small and has exactly the form below, files are
ordinary files with plain names, and every byte is compared with its checksum on its way into a private copy. Only that
copy is opened. All methods block. They raise OSError where the folder cannot be read or written.
"""

import hashlib
import os
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from uuid import uuid4

import msgspec

from oriel_inference.stores.own_files import open_new, open_own, own_folder, read_own
from oriel_policies.artefacts.fingerprint import is_fingerprint, key_of
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_policies.artefacts.retirement import MAX_AGE_S, StoredArtefact, retired

MAX_RECORD_BYTES = 1 << 20
MAX_FILES = 1000
MAX_TEXT = 2000
STALE_WORK_S = 86_400.0
MANIFEST = "manifest.json"
_PIECE_BYTES = 1 << 20
FORM = 1


class ArtefactDamaged(Exception):
    """An artefact is not the one that was published. The text says what is wrong with it."""


class FileLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of an artefact."""

    size_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a published artefact, which lies beside its files.

    key: the parts of its fingerprint. entry: name of the file to open.
    model, version: the model version that it was first built for; another one with the same files may use it.
    built_at_s: Unix time of the build. build_s: seconds that the build took.
    errors: text with the largest errors that the check of its outputs found.
    """

    form: int
    key: dict[str, str]
    entry: str
    files: dict[str, FileLine]
    model: str
    version: int
    built_at_s: float
    build_s: float
    errors: str

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.files.values())


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The stored reason why an artefact was refused, so that it is not built again under the same conditions.

    key: the parts of the fingerprint. model: the name of the model that was refused first.
    conditions: digest of the bounds, tolerance and samples under which it was refused; another one may end differently.
    at_s: time of the Unix clock.
    """

    key: dict[str, str]
    kind: RefusalKind
    reason: str
    conditions: str
    model: str
    at_s: float


class ArtefactFolder:
    """A folder of artefacts on the local disk.

    max_bytes: the size of all artefacts that it keeps. max_age_s: the age up to which it keeps an artefact.
    """

    def __init__(self, root: Path, *, max_bytes: int, max_age_s: float = MAX_AGE_S) -> None:
        self.root = root
        self.max_bytes = max_bytes
        self._max_age_s = max_age_s

    def open(self) -> str:
        """Create the folder unless it is there. Returns what is wrong with it, "" if it can be used."""
        wrong = own_folder(self.root)
        return f"the artefact folder {wrong}" if wrong else ""

    # Artefacts --------------------------------------------------------------------------------------------------

    def find(self, fingerprint: str) -> Manifest | None:
        """Return the manifest of an artefact, None if there is none. Raises ArtefactDamaged."""
        try:
            data = read_own(self.root / fingerprint / MANIFEST, MAX_RECORD_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            if not (self.root / fingerprint).exists():
                return None
            raise ArtefactDamaged("it has no manifest") from None
        except PermissionError as error:
            raise ArtefactDamaged(str(error)) from error
        return read_manifest(data, fingerprint)

    def copy(self, fingerprint: str, manifest: Manifest, into: Path | None) -> None:
        """Copy the files of an artefact into an empty folder, or only read them, and compare every byte with its
        checksum. Raises ArtefactDamaged.
        """
        for name, line in manifest.files.items():
            digest, size_bytes = hashlib.sha256(), 0
            try:
                source = open_own(self.root / fingerprint / name)
            except OSError as error:
                raise ArtefactDamaged(f"{name} cannot be read: {error.strerror or error}") from error
            with source as file, os.fdopen(open_new(into / name), "wb") if into else open(os.devnull, "wb") as copy:
                while piece := file.read(_PIECE_BYTES):
                    size_bytes += len(piece)
                    if size_bytes > line.size_bytes:
                        break
                    digest.update(piece)
                    copy.write(piece)
            if size_bytes != line.size_bytes or digest.hexdigest() != line.sha256:
                raise ArtefactDamaged(f"{name} is not the file that was built")

    @contextmanager
    def work(self) -> Iterator[Path]:
        """Give an empty folder for a build, and remove what is left of it."""
        folder = Path(mkdtemp(prefix=".work-", dir=self.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, work: Path, manifest: Manifest) -> None:
        """Make the content of a work folder the artefact, unless another server was faster."""
        with os.fdopen(open_new(work / MANIFEST), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
        for name in (*manifest.files, MANIFEST):
            with (work / name).open("rb") as file:
                os.fsync(file.fileno())
        fingerprint = key_of(manifest.key).fingerprint
        try:
            work.rename(self.root / fingerprint)
        except OSError:
            if not (self.root / fingerprint).is_dir():
                raise
        else:
            work.mkdir()  # `work` removes it
            self._refused(fingerprint).unlink(missing_ok=True)

    def remove(self, fingerprint: str) -> bool:
        """Remove an artefact, and the refusal of its fingerprint. Returns False if there was neither."""
        path, refused = self.root / fingerprint, self._refused(fingerprint)
        found = path.exists() or path.is_symlink() or refused.exists()
        refused.unlink(missing_ok=True)
        self.discard(fingerprint)
        return found

    def discard(self, fingerprint: str) -> None:
        """Remove an artefact, but not the refusal of its fingerprint."""
        path = self.root / fingerprint
        if path.is_symlink():
            path.unlink()
        elif path.exists():
            # Renamed first, so that nobody finds half an artefact.
            gone = self.root / f".work-{uuid4().hex}"
            with suppress(FileNotFoundError):
                path.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)

    def used(self, fingerprint: str) -> None:
        """Record that an artefact is in use."""
        with suppress(FileNotFoundError):
            os.utime(self.root / fingerprint)

    def stored(self, in_use: Collection[str] = ()) -> list[StoredArtefact]:
        """Return all artefacts, damaged ones as well."""
        found = []
        with suppress(FileNotFoundError):
            for path in self.root.iterdir():
                if is_fingerprint(path.name):
                    with suppress(FileNotFoundError):
                        size_bytes = sum(each.lstat().st_size for each in path.iterdir())
                        used_s, name = path.lstat().st_mtime, path.name
                        found.append(
                            StoredArtefact(
                                fingerprint=name, size_bytes=size_bytes, used_s=used_s, in_use=name in in_use
                            )
                        )
        return found

    def retire(self, in_use: Collection[str]) -> list[str]:
        """Remove old artefacts, those beyond the size bound, and leftovers of builds. Returns the fingerprints."""
        for fingerprint in in_use:
            self.used(fingerprint)
        gone = retired(self.stored(in_use), time.time(), max_bytes=self.max_bytes, max_age_s=self._max_age_s)
        for fingerprint in gone:
            self.discard(fingerprint)
        with suppress(FileNotFoundError):
            for path in self.root.glob(".work-*"):
                with suppress(FileNotFoundError):
                    found = path.lstat()
                    if time.time() - found.st_mtime <= STALE_WORK_S:
                        continue
                    if stat.S_ISDIR(found.st_mode):
                        shutil.rmtree(path, ignore_errors=True)
                    else:  # a record that was being written
                        path.unlink()
        return gone

    # Refusals ---------------------------------------------------------------------------------------------------

    def remember(self, refusal: Refusal) -> None:
        """Keep a refusal for its fingerprint."""
        new = self.root / f".work-{uuid4().hex}"
        with os.fdopen(open_new(new), "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(refusal), indent=1))
        new.replace(self._refused(key_of(refusal.key).fingerprint))

    def refusal(self, fingerprint: str) -> Refusal | None:
        """Return the refusal of a fingerprint; None if there is none, or none that can be read."""
        try:
            refusal = msgspec.json.decode(read_own(self._refused(fingerprint), MAX_RECORD_BYTES), type=Refusal)
            return refusal if key_of(refusal.key).fingerprint == fingerprint else None
        except (FileNotFoundError, PermissionError, msgspec.MsgspecError, ValueError):
            return None

    def refusals(self) -> list[str]:
        """Return the fingerprints with a refusal."""
        with suppress(FileNotFoundError):
            names = [path.stem for path in self.root.glob("*.refused")]
            return sorted(name for name in names if is_fingerprint(name))
        return []

    def _refused(self, fingerprint: str) -> Path:
        return self.root / f"{fingerprint}.refused"


def read_manifest(data: bytes, fingerprint: str) -> Manifest:
    """Return the manifest of the artefact with this fingerprint. Raises ArtefactDamaged."""
    if len(data) > MAX_RECORD_BYTES:
        raise ArtefactDamaged("its manifest is too large")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
        key = key_of(manifest.key)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ArtefactDamaged(f"its manifest is not valid: {error}") from error
    if manifest.form != FORM or key.fingerprint != fingerprint:
        raise ArtefactDamaged("its manifest belongs to another fingerprint")
    plain = all(_is_plain(name) and name != MANIFEST for name in manifest.files)
    if not plain or not 0 < len(manifest.files) <= MAX_FILES or manifest.entry not in manifest.files:
        raise ArtefactDamaged("its manifest does not name its files")
    return manifest


def describe_files(folder: Path) -> dict[str, FileLine]:
    """Return the lines of the files that a build has written. Raises OSError, or ArtefactDamaged for a folder in it."""
    lines = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file() or not _is_plain(path.name):
            raise ArtefactDamaged(f"the compiler wrote {path.name[:100]!r}, which is not an ordinary file")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        lines[path.name] = FileLine(path.stat().st_size, digest)
    return lines


def _is_plain(name: str) -> bool:
    return bool(name) and len(name) <= 255 and not name.startswith(".") and "/" not in name and "\0" not in name
