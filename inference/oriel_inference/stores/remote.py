"""Reads a model repository in an object store, through a cache on this machine.

Rules:
1. Methods block and may be called by any thread; the store's client runs on one loop in a thread of its own.
2. `models` lists the store. All other methods answer from the last listing, and only objects with the ETags of that
   listing are read. So two uploads are never mixed: if an object is overwritten meanwhile, the load is refused, and the
   next listing finds the new object.
3. A whole version is fetched into the cache and verified before its path is returned; then it is read from there.
4. While the store cannot be reached, or its listing has lost most models at once, listings raise an error, and polling
   changes nothing. A server that starts without
   the store serves the versions that its cache holds.
5. A failed fetch, also one that failed for lack of space or permission on this machine, changes the fingerprint of its
   version at a later listing, so that it is tried again: after an outage at the first listing that succeeds, otherwise
   at growing intervals.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from shutil import copyfile
from threading import Lock

from oriel_inference.errors import LoadFailed, NotKept, ObjectChanged, ObjectRefused, StoreUnavailable
from oriel_inference.model import is_version
from oriel_inference.stores import FOLDER_ENTRIES, Fingerprint, decoded, relative_parts
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.fetch import fetch_version
from oriel_inference.stores.local import MAX_COPY_BYTES, MAX_DATA_BYTES, MAX_TEXT_BYTES, MAX_VERSION_BYTES
from oriel_inference.stores.loop_thread import LoopThread
from oriel_inference.stores.retries import Retries
from oriel_inference.stores.snapshot import ModelFiles, RemoteFile, VersionFiles, snapshot
from oriel_inference.stores.source import Source

_log = logging.getLogger(__name__)

MAX_OBJECTS = 100_000
LOST_MODELS = 3

_KINDS: Mapping[type[LoadFailed], str] = {
    StoreUnavailable: "unavailable",
    ObjectChanged: "changed",
    ObjectRefused: "refused",
    NotKept: "cache",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Limits of a store.

    objects: number of objects in a listing.
    version_bytes: bytes of one version's files.
    copy_bytes: bytes of a version that `copy` copies.
    """

    objects: int = MAX_OBJECTS
    version_bytes: int = MAX_VERSION_BYTES
    copy_bytes: int = MAX_COPY_BYTES


class RemoteStore:
    """A model repository in an object store.

    shown: the URL, for the log.
    cache: belongs to this store alone, and is closed with it.
    Its Python models never run: the right to write to a bucket is not the right to start processes here.
    """

    runs_code = False
    namespace = ""
    renamed: Mapping[str, str] = {}
    fetches = True

    def __init__(
        self,
        source: Source,
        prefix: str,
        cache: Cache,
        *,
        shown: str,
        limits: StoreLimits | None = None,
        retries: Retries | None = None,
    ) -> None:
        self.shown = shown
        self.counts = source.counts
        self._limits = limits or StoreLimits()
        self._source = source
        self._cache = cache
        self._prefix = prefix
        self._listing = Lock()
        self._listed_s = 0.0
        self._loop = LoopThread("oriel-model-store")
        self._lock = Lock()
        self._fetching: dict[str, Lock] = {}
        self._retries = retries or Retries()
        self._found: Mapping[str, ModelFiles] | None = None
        self._from_cache = False
        self._handed: dict[tuple[str, int], str] = {}
        self.up = True

    @property
    def cache_bytes(self) -> int:
        """Return the bytes that the cache holds now, with what is being fetched."""
        return self._cache.used_bytes

    def close(self) -> None:
        """Fail loads in progress; blocks until connections are closed. May be called twice."""
        self._loop.close(self._source.close())
        self._cache.close()

    # The methods of a ModelStore ----------------------------------------------------------------------------------

    def models(self) -> Sequence[str]:
        called_s = time.monotonic()
        with self._listing:
            if self._listed_s <= called_s:  # no listing has begun since
                began_s = time.monotonic()
                try:
                    objects = self._loop.call(self._source.list(self._prefix, limit=self._limits.objects))
                    found = snapshot(objects, self._prefix, max_version_bytes=self._limits.version_bytes)
                    self._check_loss(found)
                except LoadFailed as failure:
                    self._missed(failure)
                    if not self._from_cache:
                        raise
                else:
                    self._saw(found)
                    self._listed_s = began_s
            return sorted(self._found or ())

    def versions(self, model: str) -> Sequence[int]:
        return sorted(self._model(model).versions)

    def files(self, model: str, version: int) -> Sequence[str]:
        try:
            return self._version(model, version).names()
        except LoadFailed:
            return ()  # loading the version reports the error

    def size_bytes(self, model: str, version: int) -> int:
        return self._version(model, version).size_bytes

    def text(self, model: str, filename: str) -> str | None:
        data = self._small(model, filename, MAX_TEXT_BYTES)
        return None if data is None else decoded(data, f"{model}/{filename}")

    def data(self, model: str, filename: str) -> bytes:
        data = self._small(model, filename, MAX_DATA_BYTES)
        if data is None:
            raise LoadFailed(f"{model}/{filename} is missing")
        return data

    def artifact(self, model: str, version: int, filename: str) -> Path:
        name = "/".join(relative_parts(filename))
        files = self._version(model, version)
        names = {file.name for file in files.files}
        if name not in names:
            entries = [f"{name}/{entry}" for entry in FOLDER_ENTRIES]  # the model is a folder
            name = next((entry for entry in entries if entry in names), entries[0])
        if not files.refused and name not in names:
            raise LoadFailed(f"{model}/{version}/{filename} is missing")
        return self._whole(model, version, files) / name

    def copy(self, model: str, version: int, into: Path) -> bool:
        files = self._version(model, version)
        if files.size_bytes > self._limits.copy_bytes:
            return False
        folder = self._whole(model, version, files)
        for file in files.files:
            target = into / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            copyfile(folder / file.name, target)
        return True

    def fingerprint(self, model: str) -> Fingerprint:
        files = (self._found or {}).get(model)
        if files is None:
            return Fingerprint(shared="absent")
        named = self._retries.named
        versions = {version: named(each.digest) for version, each in files.versions.items()}
        return Fingerprint(shared=named(files.digest), versions=versions)

    def retries(self, model: str) -> bool:
        files = (self._found or {}).get(model)
        if files is None:
            return False
        with self._lock:
            return any(self._retries.waits(digest) for digest in _digests(files))

    def loaded(self, model: str) -> None:
        with self._lock:
            digests = [self._handed.pop(each) for each in list(self._handed) if each[0] == model]
        for digest in digests:
            self._cache.unprotect(digest)

    # Listings -----------------------------------------------------------------------------------------------------

    def _saw(self, found: Mapping[str, ModelFiles]) -> None:
        with self._lock:
            if self._from_cache:
                _log.info("%s can be reached again: its changes are followed", self.shown)
            changed = self._found != found or self._from_cache
            self.up, self._from_cache, self._found = True, False, found
            digests = {digest for files in found.values() for digest in _digests(files)}
            self._retries.listed(digests, time.monotonic())
            if changed:
                try:
                    self._prune(found, digests)
                except OSError as error:
                    _log.warning(
                        "model cache: files that are no longer in the store cannot be removed: %s", error.strerror
                    )

    def _check_loss(self, found: Mapping[str, ModelFiles]) -> None:
        """Refuse a listing that has lost more than people delete at once: nothing is left, or more than half (and more
        than LOST_MODELS) of the models are gone. Raises LoadFailed. The first listing is always taken.
        """
        known = self._found or {}
        gone = len(known.keys() - found.keys())
        if not known or (found and gone <= max(LOST_MODELS, len(known) // 2)):
            return
        raise LoadFailed(
            f"its listing lacks {gone} of {len(known)} models at once, which is taken for a fault of the store; "
            "if they were deleted, restart this server"
        )

    def _missed(self, failure: LoadFailed) -> None:
        with self._lock:
            self.up = False
            self.counts.failures["unavailable"] += 1
            if self._found is not None:
                return
            records = self._cache.records()
            kept = {model: _only(files, self._kept(files)) for model, files in records.items()}
            self._found = {model: files for model, files in kept.items() if files.versions} or None
            self._from_cache = self._found is not None
            if self._from_cache:
                _log.error(
                    "%s cannot be read, starting with %d model(s) from the cache: %s",
                    self.shown,
                    len(self._found or ()),
                    failure.reason,
                )

    def _prune(self, found: Mapping[str, ModelFiles], digests: set[str]) -> None:
        """Forget versions that the store no longer has, so that no start uses them, and delete their partial files."""
        shared = {file.digest for files in found.values() for file in files.shared.values()}
        for model, files in self._cache.records().items():
            if model not in found:
                self._cache.forget(model)
                continue
            if files.versions.keys() - found[model].versions.keys():
                self._cache.record(model, _only(files, found[model].versions))
            shared.update(file.digest for file in files.shared.values())
        self._cache.keep_only(digests, shared)

    def _model(self, model: str) -> ModelFiles:
        files = (self._found or {}).get(model)
        if files is None:
            raise LoadFailed(f"model {model!r} cannot be listed: it is not in the store")
        return files

    def _version(self, model: str, version: int) -> VersionFiles:
        files = self._model(model).versions.get(version)
        if files is None:
            raise LoadFailed(f"{model}/{version} cannot be listed: it is not in the store")
        return files

    # Fetches ------------------------------------------------------------------------------------------------------

    def _whole(self, model: str, version: int, files: VersionFiles) -> Path:
        """Return the folder with all files of a version, after fetching them if needed."""
        if files.refused:
            raise LoadFailed(files.refused)
        with self._lock:
            one_at_a_time = self._fetching.setdefault(files.digest, Lock())
        with one_at_a_time:
            folder = self._cache.version(files.digest)
            if folder is None:
                folder = self._fetch(f"{model}/{version}", files)
        with self._lock:
            self._fetching.pop(files.digest, None)
            before = self._handed.get((model, version), files.digest)
            self._handed[model, version] = files.digest
        if before != files.digest:
            self._cache.unprotect(before)
        self._remember(model)
        return folder

    def _fetch(self, shown: str, files: VersionFiles) -> Path:
        began, fetched = time.monotonic(), False
        try:
            with self._retried(files.digest, f"{shown} cannot be written into the model cache"):
                partial = self._cache.partial(files.digest, files.size_bytes)
                manifest = self._loop.call(fetch_version(self._source, files, partial, shown=shown))
                folder = self._cache.publish(files.digest, manifest)
                fetched = True
        finally:
            if not fetched:
                self._cache.abandon(files.digest)
        _log.info("%s: %d bytes fetched in %.1f s", shown, files.size_bytes, time.monotonic() - began)
        return folder

    @contextmanager
    def _retried(self, digest: str, unwritten: str) -> Iterator[None]:
        """Record a failure of the block, so that a later listing tries again. unwritten: the reason for OSErrors.

        Raises LoadFailed.
        """
        try:
            yield
        except LoadFailed as failure:
            self._failed(digest, failure)
            raise
        except OSError as error:
            failed = NotKept(f"{unwritten}: {error.strerror}")
            self._failed(digest, failed)
            raise failed from error
        except Exception as error:
            self._failed(digest, LoadFailed(repr(error)))
            raise

    def _failed(self, digest: str, failure: LoadFailed) -> None:
        # The store answers, so only this object fails; it waits for its turn like a wrong one.
        outage = isinstance(failure, StoreUnavailable) and not self._source.answers
        kind = next((kind for failed, kind in _KINDS.items() if isinstance(failure, failed)), "")
        with self._lock:
            if kind:
                self.counts.failures[kind] += 1
            self._retries.record_failure(digest, time.monotonic(), outage=outage)

    def _remember(self, model: str) -> None:
        """Record the model's files for a start without the store."""
        files = (self._found or {}).get(model)
        if files is None or self._from_cache:
            return
        files = _only(files, [number for number, each in files.versions.items() if not each.refused])
        with self._lock:
            older = self._cache.records().get(model)
            if older is not None:
                # The cache may hold the former files of a version, and not yet the new ones.
                former = {number: older.versions[number] for number in self._kept(older) if number in files.versions}
                present = _only(files, {*self._kept(files), *(files.versions.keys() - former.keys())})
                files = replace(files, versions={**former, **present.versions})
            if files != older:
                self._cache.record(model, files)

    def _kept(self, files: ModelFiles) -> Collection[int]:
        """Return the versions that need nothing but what the cache holds."""
        versions = files.versions.items()
        return [number for number, each in versions if self._cache.has(each.digest) or not each.size_bytes]

    def _small(self, model: str, filename: str, limit: int) -> bytes | None:
        """Return a file of the model's folder; None if it is missing."""
        parts = relative_parts(filename)
        files = self._model(model)
        file = self._file(files, parts)
        if file is None:
            return None
        if file.object.size > limit:
            raise LoadFailed(f"{model}/{filename} is larger than {limit} bytes")
        data = self._cache.shared(file.digest)
        if data is None:
            shown = f"{model}/{filename}"
            with self._retried(files.digest, f"{shown} cannot be written into the model cache"):
                read = BytesIO()
                self._loop.call(self._source.fetch(file.object, read, shown=shown))
                data = read.getvalue()
                self._cache.keep_shared(file.digest, data)
        if not any(each.size_bytes for each in files.versions.values()):
            self._remember(model)  # an ensemble: the files of its versions are never requested
        return data

    @staticmethod
    def _file(files: ModelFiles, parts: Sequence[str]) -> RemoteFile | None:
        if len(parts) > 1 and is_version(parts[0]) and int(parts[0]) in files.versions:
            inside = files.versions[int(parts[0])].files
            return next((file for file in inside if file.name == "/".join(parts[1:])), None)
        return files.shared.get("/".join(parts))


def _only(files: ModelFiles, versions: Collection[int]) -> ModelFiles:
    """Return the files without those of other versions."""
    return replace(files, versions={number: each for number, each in files.versions.items() if number in versions})


def _digests(files: ModelFiles) -> list[str]:
    return [files.digest, *(each.digest for each in files.versions.values())]
