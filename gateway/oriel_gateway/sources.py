"""The `PolicySource` seam, the folder source, and what names a folder in an object store."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from oriel_policies.errors import BadDocument

__all__ = ["KINDS", "FolderSource", "PolicySource", "Stamp", "StoreUrl", "store_url"]

MAX_DOCUMENT_BYTES = 16 * 1024 * 1024
MAX_TENANTS_BYTES = 256 * 1024 * 1024
MAX_DOCUMENTS = 256
# What each may have in bytes: documents, lines of tenants, key sets of issuers.
KINDS = {".toml": MAX_DOCUMENT_BYTES, ".ndjson": MAX_TENANTS_BYTES, ".json": MAX_DOCUMENT_BYTES}

MAX_URL_CHARACTERS = 1024
_STORES = {"s3": "s3", "gs": "gs", "az": "az", "as": "az"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")

Stamp = tuple[tuple[str, int, int, int], ...]


class PolicySource(Protocol):
    """Where policy documents come from. Both wait for the disk: not for a loop."""

    def read(self) -> Mapping[str, bytes]:
        """File name -> content. Raises BadDocument when they cannot be read."""

    def stamp(self) -> Stamp:
        """Differs when there is something new to read; cheap. () when that cannot be told."""


class FolderSource:
    """Every `*.toml`, `*.ndjson` and `*.json` directly in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def stamp(self) -> Stamp:
        stamps = []
        try:
            for path in self._paths():
                stat = path.stat()
                stamps.append((path.name, stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            return ()  # a file went while we looked, or the folder did: the next look tells
        return tuple(stamps)

    def read(self) -> dict[str, bytes]:
        documents, unreadable = self.readable()
        if unreadable:
            unreadable[0].others = tuple(unreadable[1:])
            raise unreadable[0]
        return documents

    def readable(self) -> tuple[dict[str, bytes], list[BadDocument]]:
        """The files that can be read, and why the others cannot. Raises BadDocument when that is so of the folder."""
        try:
            paths = self._paths()
        except OSError as error:
            raise BadDocument(self._folder.name, "", f"the folder cannot be read: {error.strerror}") from error
        if not any(path.suffix == ".toml" for path in paths):
            raise BadDocument(self._folder.name, "", "the folder holds no .toml document")
        if len(paths) > MAX_DOCUMENTS:
            raise BadDocument(self._folder.name, "", f"more than {MAX_DOCUMENTS} documents")
        documents: dict[str, bytes] = {}
        unreadable: list[BadDocument] = []
        for path in paths:
            bound = KINDS[path.suffix]
            try:
                with path.open("rb") as file:
                    data = file.read(bound + 1)
            except OSError as error:
                unreadable.append(BadDocument(path.name, "", f"cannot be read: {error.strerror}"))
                continue
            if len(data) > bound:
                unreadable.append(BadDocument(path.name, "", f"larger than {bound} bytes"))
                continue
            documents[path.name] = data
        return documents, unreadable

    def _paths(self) -> list[Path]:
        return sorted(
            path
            for path in self._folder.iterdir()
            if path.suffix in KINDS and not path.name.startswith(".") and path.is_file()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUrl:
    """A folder of documents in an object store. kind: "s3", "gs" or "az". account: Azure's. prefix: without slashes at
    its ends, "" for the whole bucket."""

    kind: str
    bucket: str
    prefix: str
    account: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (f"{self.kind}:/", self.account, self.bucket, self.prefix) if part)

    @property
    def name(self) -> str:
        """What mistakes of the whole folder are told of."""
        return self.prefix.rpartition("/")[2] or self.bucket


def store_url(text: str) -> StoreUrl:
    """`s3://bucket/prefix`, `gs://bucket/prefix` or `az://account/container/prefix`. Raises ValueError, whose text may
    be shown: it holds no credential."""
    scheme, _, rest = text.partition("://")
    kind = _STORES.get(scheme)
    if kind is None:
        raise ValueError(
            "policies are a folder, s3://bucket/prefix, gs://bucket/prefix or az://account/container/prefix"
        )
    if len(text) > MAX_URL_CHARACTERS or not text.isprintable():
        raise ValueError(f"a URL of more than {MAX_URL_CHARACTERS} characters, or with control characters")
    if "@" in rest or "?" in rest or "#" in rest:
        raise ValueError(
            f"{scheme}:// takes no credentials, query or fragment: others can read this process's arguments; "
            "credentials come from the environment"
        )
    account = ""
    if kind == "az":
        account, _, rest = rest.partition("/")
    bucket, _, prefix = rest.partition("/")
    prefix = "/".join(part for part in prefix.split("/") if part)
    names = [bucket, account] if kind == "az" else [bucket]
    if not all(_BUCKET.fullmatch(name) for name in names) or {".", ".."} & set(prefix.split("/")):
        form = "az://account/container/prefix" if kind == "az" else f"{scheme}://bucket/prefix"
        raise ValueError(f"{text[:100]!r} is not {form}")
    return StoreUrl(kind=kind, bucket=bucket, prefix=prefix, account=account)
