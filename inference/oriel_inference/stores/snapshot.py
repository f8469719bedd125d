"""Reads one listing of a bucket as a model repository. Pure.

The keys are not trusted. A key that cannot be a file of a model's folder never becomes a path: outside of the version
folders it is left out, inside of one its version is refused with an error that names the key. A key that ends with "/"
is a folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from oriel_inference.model import is_model_name, is_version
from oriel_wire.objects.client import Stored

MAX_VERSION_FILES = 10_000
MAX_FOLDERS_DEEP = 16
MAX_NAME_BYTES = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A listed file. name: below its version's or its model's folder. object: the object in the store."""

    name: str
    object: Stored

    @property
    def digest(self) -> str:
        """Return a digest that is equal while the bytes are the same, 32 hex digits."""
        each = self.object
        return blake2b(repr((each.key, each.size, each.etag)).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionFiles:
    """The files of a version.

    files: sorted by name.
    refused: why the version cannot be loaded, "" if it can.
    digest: equal while nothing has changed; also the name of its folder in the cache.
    """

    files: tuple[RemoteFile, ...] = ()
    refused: str = ""
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        return sum(file.object.size for file in self.files)

    def names(self) -> Sequence[str]:
        """Return the names directly in its folder."""
        return sorted({file.name.partition("/")[0] for file in self.files})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a model. shared: name -> file, beside the version folders. digest: the digest of these."""

    shared: Mapping[str, RemoteFile] = field(default_factory=dict)
    versions: Mapping[int, VersionFiles] = field(default_factory=dict)
    digest: str = ""


def snapshot(objects: Iterable[Stored], prefix: str, *, max_version_bytes: int) -> dict[str, ModelFiles]:
    """Return model -> its files, of the objects below `prefix`."""
    shared: dict[str, dict[str, RemoteFile]] = {}
    versions: dict[str, dict[int, list[Stored]]] = {}
    for each in objects:
        model, slash, rest = each.key.removeprefix(prefix).partition("/")
        if not slash or not is_model_name(model):
            continue
        files, found = shared.setdefault(model, {}), versions.setdefault(model, {})
        first, slash, inside = rest.partition("/")
        if slash and is_version(first):
            found.setdefault(int(first), [])
            if inside or each.size:
                found[int(first)].append(each)
        elif rest and not _wrong(rest):
            files[rest] = RemoteFile(name=rest, object=each)
    return {
        model: ModelFiles(
            digest=combined_digest(shared[model].values()),
            shared=shared[model],
            versions={
                version: _version(each, f"{prefix}{model}/{version}/", f"{model}/{version}", max_version_bytes)
                for version, each in sorted(versions[model].items())
            },
        )
        for model in sorted(shared)
    }


def _version(objects: Sequence[Stored], prefix: str, shown: str, max_bytes: int) -> VersionFiles:
    refused, files = "", []
    for each in sorted(objects, key=lambda each: each.key):
        name = each.key.removeprefix(prefix)
        if name.endswith("/") and not each.size and not _wrong(name[:-1]):
            continue
        if wrong := _wrong(name):
            refused = refused or f"{shown}: key {name[:100]!r} {wrong}"
        files.append(RemoteFile(name=name, object=each))
    folders = {"/".join(parts[:n]) for parts in (file.name.split("/") for file in files) for n in range(1, len(parts))}
    clash = sorted(folders & {file.name for file in files})
    if clash:
        refused = refused or f"{shown}: {clash[0][:100]!r} is a file and a folder at once"
    if len(files) > MAX_VERSION_FILES:
        refused = refused or f"{shown} has more than {MAX_VERSION_FILES} entries"
    if sum(file.object.size for file in files) > max_bytes:
        refused = refused or f"{shown} holds more than {max_bytes} bytes"
    return VersionFiles(files=tuple(files), refused=refused, digest=combined_digest(files, shown))


def _wrong(name: str) -> str:
    """Return why a name cannot be a file below a folder, "" if it can."""
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return "leads out of its folder, or has an empty part"
    if len(parts) > MAX_FOLDERS_DEEP:
        return f"is more than {MAX_FOLDERS_DEEP} folders deep"
    if any(ord(each) < 32 or ord(each) == 127 or 0xD800 <= ord(each) < 0xE000 for each in name):
        return "has control characters"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"has a part of more than {MAX_NAME_BYTES} bytes"
    return ""


def combined_digest(files: Iterable[RemoteFile], *more: str) -> str:
    """Return the digest of several files."""
    digest = blake2b(repr(more).encode(), digest_size=16)
    for file in sorted(files, key=lambda each: each.name):
        digest.update(file.digest.encode())
    return digest.hexdigest()
