"""The interface of an object-store client: list a prefix, describe an object, read a range of it.

A client keeps connections and no other state. It sends each request once, and follows no redirect if the library behind
it can be kept from that. Caching, checksums, resuming and backing off are the caller's responsibility. Credentials come
from the environment, as each vendor's own tools find them, never from a URL.
"""

import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol
from urllib.parse import urlsplit

from oriel_wire.objects.errors import BadStoreUrl

MAX_URL_CHARACTERS = 1024

# Reasons that every client gives in the same words, to follow "<location> cannot be listed: ".
NO_CREDENTIALS = "no credentials were found in the environment of this process, or they were denied"
NO_BUCKET = "there is no such bucket or container (404)"
NO_CONNECTION = "no connection"
TIMED_OUT = "it did not answer in time"
BAD_ANSWER = "its answer is not one of an object store"

_KINDS = {"s3": "s3", "gs": "gs", "az": "az", "as": "az"}
_FORMS = {"s3": "s3://bucket/prefix", "gs": "gs://bucket/prefix", "az": "az://account/container/prefix"}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,221}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One object as the store describes it.

    key: the whole key. size: bytes.
    etag: the tag that the store gives, without quotes; a different one means different bytes.
    checksum: (algorithm, lower-case hex) of the whole object, None where the store keeps none. Algorithms: "md5",
        "sha1", "sha256", "crc32", "crc32c", "crc64nvme"; CRCs are big-endian, as every store shows them.
    """

    key: str
    size: int
    etag: str
    checksum: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A prefix in a bucket.

    kind: "s3", "gs" or "az". bucket: Azure calls it a container.
    prefix: the beginning of every key; ends with "/" unless it is empty.
    endpoint: scheme, host and port of an S3-compatible store; "" for what the environment says.
    account: Azure's storage account, else "".
    """

    kind: str
    bucket: str
    prefix: str
    endpoint: str = ""
    account: str = ""

    def __str__(self) -> str:
        """The URL, which `location_of` reads back."""
        parts = (f"{self.kind}:/", self.endpoint, self.account, self.bucket, self.prefix.rstrip("/"))
        return "/".join(filter(None, parts))

    def is_below(self, other: "Location") -> bool:
        """Return whether every key below this location is also below the other one."""
        return self.prefix.startswith(other.prefix) and replace(self, prefix=other.prefix) == other


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Limits of one client.

    connect_s: seconds allowed to open a connection. read_s: longest silence in seconds.
    request_s: seconds allowed from connecting to the last byte of an answer (gs and az only).
    connections: bound on open connections (s3 only).
    page_objects: objects in one page of a listing (s3 only); 1000 is the protocol's own bound.
    """

    connect_s: float = 5.0
    read_s: float = 20.0
    request_s: float = 600.0
    connections: int = 32
    page_objects: int = 1000


class ObjectClient(Protocol):
    """Reads one bucket. All methods run on the event loop of the first call, and send each request once.

    All raise StoreUnavailable when the store cannot be reached, breaks off, or denies this process; `head` and `read`
    raise ObjectRefused when it denies the one object. A cancelled call has released its connection.
    """

    async def list(self, prefix: str, *, limit: int) -> Sequence[Stored]:
        """Every object whose key begins with `prefix` (empty, or ending with "/"), in the order of their keys.

        checksum may be None. Raises TooManyObjects when there are more than `limit`, and then requests no more of them.
        """
        ...

    async def head(self, key: str) -> Stored:
        """One object with its checksum, if the store keeps one of all its bytes. Raises ObjectChanged if it is gone."""
        ...

    def read(self, key: str, *, start: int, end: int, etag: str) -> AsyncIterator[bytes]:
        """The bytes [start, end) as they arrive, 0 <= start < end <= size; StoreUnavailable if fewer arrive.

        Raises ObjectChanged if the object has another etag by now, or is gone. Close the iterator to stop early.
        """
        ...

    async def close(self) -> None:
        """Close all connections. May be called twice."""
        ...


class ObjectWriter(Protocol):
    """Writes objects that never change. The methods raise as those of ObjectClient."""

    async def put(self, key: str, data: bytes) -> bool:
        """Store an object and wait until the store confirms it. Returns False if an object of that key is there
        already, which then stays; of several that write it at the same time, one stores it.

        Raises ObjectChanged if another one is writing it right now, so that it is not known whose object stays.
        """
        ...

    async def close(self) -> None:
        """Close all connections. May be called twice."""
        ...


def location_of(url: str) -> Location:
    """Parse `s3://bucket/prefix`, `s3://https://host:port/bucket/prefix`, `s3://host:port/bucket/prefix`,
    `gs://bucket/prefix` or `az://account/container/prefix` (also `as://`). Raises BadStoreUrl.
    """
    scheme, _, rest = url.partition("://")
    kind = _KINDS.get(scheme)
    if kind is None:
        raise BadStoreUrl(f"{scheme[:16]!r} is not a known object store: use {', '.join(_FORMS.values())}")
    if len(url) > MAX_URL_CHARACTERS or not url.isprintable():
        raise BadStoreUrl(f"the URL has more than {MAX_URL_CHARACTERS} characters, or control characters")
    if any(letter in rest for letter in "?#@"):
        raise BadStoreUrl(
            f"{scheme}:// takes no credentials, query or fragment: others can read this process's arguments; "
            "credentials come from the environment"
        )
    endpoint = account = ""
    if kind == "s3":
        endpoint, rest = _endpoint(rest)
    if kind == "az":
        account, _, rest = rest.partition("/")
    bucket, _, prefix = rest.partition("/")
    parts = [part for part in prefix.split("/") if part]
    names = [bucket, account] if kind == "az" else [bucket]
    if not all(map(_BUCKET.fullmatch, names)) or {".", ".."} & set(parts):
        raise BadStoreUrl(f"{url[:100]!r} is not {_FORMS[kind]}")
    prefix = "".join(f"{part}/" for part in parts)
    return Location(kind=kind, bucket=bucket, prefix=prefix, endpoint=endpoint, account=account)


def _endpoint(rest: str) -> tuple[str, str]:
    """The address of an S3-compatible store, in each of Triton's spellings, and the text that follows it."""
    for scheme in ("https://", "http://"):
        if rest.startswith(scheme):
            host, _, rest = rest.removeprefix(scheme).partition("/")
            return _checked(f"{scheme}{host}"), rest
    host, _, after = rest.partition("/")
    if ":" in host:  # the name of a bucket contains no colon
        return _checked(f"https://{host}"), after
    return "", rest


def _checked(endpoint: str) -> str:
    try:
        parts = urlsplit(endpoint)
        good = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise BadStoreUrl(f"{endpoint[:100]!r} is not the address of an object store")
    return endpoint
