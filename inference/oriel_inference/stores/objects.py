"""Object stores as one narrow seam: list, look, read a range. What a repository of models needs of them and no more.

Nothing here keeps state of its own but connections: cache, checksums, resuming and backing off are `remote`'s. An
adapter tries each request once; who calls decides when the next may be sent. Credentials come from the environment the
way each vendor's own tools find them, never from a URL.
"""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from oriel_inference.errors import LoadFailed

__all__ = ["Location", "ObjectClient", "Stored", "client_of", "is_remote", "location_of"]

MAX_URL_CHARACTERS = 1024
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 20.0  # without a byte

_KINDS = {"s3": "s3", "gs": "gs", "az": "az", "as": "az"}
_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object. etag: as the store gives it, without quotes; another one means other bytes.

    checksum: (algorithm, lower-case hex) of the whole object, where the store keeps one. Algorithms: "md5", "sha1",
    "sha256", "crc32", "crc32c", "crc64nvme"; CRCs big-endian, as every store shows them.
    """

    key: str
    size: int
    etag: str
    checksum: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A repository's URL, taken apart. kind: "s3", "gs" or "az". endpoint: an S3-compatible store's own (scheme, host,
    port), "" for what the environment says. account: Azure's. prefix: of every key, ends with "/" unless empty.
    """

    kind: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""


class ObjectClient(Protocol):
    """Async: everything runs on the loop of the first call. Each method sends what it says and tries nothing twice.

    All raise StoreUnavailable when the store cannot be reached, breaks off, or refuses this server; `head` and `read`
    raise ObjectRefused when it refuses the one object. A cancelled call has let go of its connection.
    """

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        """Every object whose key begins with `prefix`, in order of keys; keys are whole. checksum may be missing.

        Raises TooManyObjects when there are more than `limit`; no more are asked for then.
        """
        ...

    async def head(self, key: str) -> Stored:
        """One object with its checksum, if the store keeps one of all its bytes. Raises ObjectChanged if it is gone."""
        ...

    def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        """The bytes [start, end) as they come, 0 <= start < end <= size. Fewer only with StoreUnavailable.

        Raises ObjectChanged if the object has another etag by now, or is gone. Close the iterator to end early.
        """
        ...

    async def close(self) -> None:
        """Connections end. Twice is fine."""
        ...


def is_remote(url: str) -> bool:
    """Whether it is meant as an object store's, right or wrong."""
    return "://" in url


def location_of(url: str) -> Location:
    """`s3://bucket/prefix`, `s3://https://host:port/bucket/prefix`, `s3://host:port/bucket/prefix`,
    `gs://bucket/prefix`, `az://account/container/prefix` (also `as://`). Raises LoadFailed.
    """
    scheme, _, rest = url.partition("://")
    kind = _KINDS.get(scheme)
    if kind is None:
        raise LoadFailed(f"{scheme[:16]!r} is no object store that is known here: s3://, gs://, az:// (as://) are")
    if len(url) > MAX_URL_CHARACTERS or any(ord(each) < 32 for each in url):
        raise LoadFailed(f"a URL of more than {MAX_URL_CHARACTERS} characters, or with control characters")
    if "?" in rest or "#" in rest or "@" in rest:
        raise LoadFailed(f"{scheme}:// takes no credentials, query or fragment: they come from the environment")
    endpoint = account = ""
    if kind == "s3":
        endpoint, rest = _endpoint(rest)
    if kind == "az":
        account, _, rest = rest.partition("/")
    bucket, _, prefix = rest.partition("/")
    prefix = "/".join(part for part in prefix.split("/") if part)
    named = [bucket, account] if kind == "az" else [bucket]
    if not all(_BUCKET.fullmatch(name) for name in named) or ".." in prefix.split("/"):
        form = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://account/container/prefix"}[kind]
        raise LoadFailed(f"{url[:100]!r} is not {form}")
    return Location(kind=kind, bucket=bucket, prefix=f"{prefix}/" if prefix else "", endpoint=endpoint, account=account)


def _endpoint(rest: str) -> tuple[str, str]:
    """Triton's spellings of an S3-compatible store, and what follows it."""
    for scheme in ("https://", "http://"):
        if rest.startswith(scheme):
            host, _, rest = rest.removeprefix(scheme).partition("/")
            return _checked(f"{scheme}{host}"), rest
    host, _, after = rest.partition("/")
    if ":" in host:  # no bucket has a colon in its name
        return _checked(f"https://{host}"), after
    return "", rest


def _checked(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise LoadFailed(f"{endpoint[:100]!r} is not the address of an object store")
    return endpoint


def client_of(url: str) -> tuple[ObjectClient, str]:
    """A client for the bucket of `url`, nothing sent yet, and the prefix of its keys. Raises LoadFailed."""
    location = location_of(url)
    try:
        if location.kind == "s3":
            from oriel_inference.stores.s3 import S3Client

            return S3Client(location), location.prefix
        from oriel_inference.stores.obstores import open_obstore

        return open_obstore(location), location.prefix
    except ImportError as error:
        extra = _EXTRAS[location.kind]
        raise LoadFailed(f"{location.kind}:// needs more packages: pip install 'oriel-serving[{extra}]'") from error
