"""Reads `multipart/form-data` (RFC 7578), whole or while it arrives. python-multipart parses it; bounds are checked
here.

A part with a file name, or with a media type that is not text, is a file (`bytes`); any other is a field (`str`),
except that a field of type application/json is the JSON value.
"""

from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from oriel_logic.bodies.upload import Upload
from oriel_logic.errors import InputTooLarge, Refused
from oriel_wire.errors import BadMessage
from oriel_wire.v2.depth import check_depth

MAX_PARTS = 128
MAX_FIELD_BYTES = 1 << 20
MAX_HEADERS = 8
MAX_HEADER_BYTES = 2048
MAX_NAME = 128
OVERHEAD_BYTES = 64 << 10
"""Boundaries and headers, which no limit of a file counts."""
BROKEN = "the body is not valid multipart/form-data"


@dataclass(slots=True, kw_only=True)
class Part:
    """One part of the body.

    headers: lower-case names. `data` grows while the part arrives; `is_whole` is set once it has ended.
    """

    headers: dict[str, str] = field(default_factory=dict)
    name: str = ""
    filename: str = ""
    content_type: str = ""
    data: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    @property
    def is_file(self) -> bool:
        kind = self.content_type
        return bool(self.filename) or not (kind in ("", "application/json") or kind.startswith("text/"))

    def value(self) -> Any:
        """Return the part's value: bytes of a file, text or JSON of a field. Raises Refused."""
        if self.is_file:
            return bytes(self.data)
        try:
            if self.content_type == "application/json":
                check_depth(bytes(self.data))
                return msgspec.json.decode(self.data)
            return self.data.decode()
        except (UnicodeDecodeError, msgspec.DecodeError, BadMessage, RecursionError) as error:
            raise Refused(
                f"the field is not valid {self.content_type or 'UTF-8 text'}", field=f"$.{self.name}"
            ) from error


class Parts:
    """An incremental parser: `feed` it the body as it arrives, read `found`, and call `end` after the last byte.

    Files are kept in memory like fields unless `stream` names them: of those, `Part.data` holds the newest bytes until
    the caller takes them.
    """

    def __init__(self, content_type: str, *, stream: str = "") -> None:
        """Prepare to parse a body. content_type: the whole header. Raises Refused."""
        boundary = parse_options_header(content_type)[1].get(b"boundary", b"")
        if not boundary:
            raise Refused(f"{BROKEN}: Content-Type names no boundary")
        self.found: deque[Part] = deque()
        self._stream = stream
        self._count = 0
        self._header = (bytearray(), bytearray())
        self._is_over = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._begin,
                    "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
                    "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._end,
                    "on_end": self._over,
                },
                max_header_count=MAX_HEADERS,
                max_header_size=MAX_HEADER_BYTES,
            )
        except FormParserError as error:
            raise Refused(f"{BROKEN}: {error}") from error

    def feed(self, data: bytes) -> None:
        """Parse the next bytes. Raises Refused, or InputTooLarge past MAX_PARTS or MAX_FIELD_BYTES."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise Refused(f"{BROKEN}: {error}") from error

    def end(self) -> None:
        """Finish parsing. Raises Refused if the body is incomplete."""
        if not self._is_over:
            raise Refused(f"{BROKEN}: it ends too early")

    def _begin(self) -> None:
        self._count += 1
        if self._count > MAX_PARTS:
            raise InputTooLarge(f"a multipart body may have at most {MAX_PARTS} parts")
        self.found.append(Part())

    def _header_end(self) -> None:
        name, value = (bytes(each).decode("utf-8", "replace") for each in self._header)
        self.found[-1].headers[name.strip().lower()] = value.strip()
        self._header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        part = self.found[-1]
        kind, options = parse_options_header(part.headers.get("content-disposition", "").encode())
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name or len(name) > MAX_NAME:
            raise Refused(f"{BROKEN}: a part has no name, or one longer than {MAX_NAME}")
        part.name = name
        part.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255]
        part.content_type = part.headers.get("content-type", "").partition(";")[0].strip().lower()

    def _data(self, data: bytes, start: int, end: int) -> None:
        part = self.found[-1]
        part.data += memoryview(data)[start:end]
        if not part.is_file and part.name != self._stream and len(part.data) > MAX_FIELD_BYTES:
            raise InputTooLarge(f"a field may have at most {MAX_FIELD_BYTES} bytes: send files with a file name")

    def _end(self) -> None:
        self.found[-1].is_whole = True

    def _over(self) -> None:
        self._is_over = True


def parse(body: bytes, content_type: str) -> list[Part]:
    """Parse a complete body. Raises Refused, InputTooLarge."""
    parts = Parts(content_type)
    parts.feed(body)
    parts.end()
    return list(parts.found)


def fields_of(parts: Iterator[Part] | list[Part], *, lists: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Map names to values; those in `lists`, and names that come more than once, become lists. Raises Refused."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        values.setdefault(part.name, []).append(part.value())

    def meant(name: str, found: list[Any]) -> Any:
        is_whole = len(found) == 1 and (name not in lists or isinstance(found[0], list))  # a part that is a JSON list
        return found[0] if is_whole else found

    return {name: meant(name, found) for name, found in values.items()}


async def open_upload(
    pieces: AsyncIterator[bytes], content_type: str, name: str, *, limit_bytes: int
) -> tuple[list[Part], Upload]:
    """Read the fields before the file `name`, and return them with the file, which is read while it arrives.

    Raises InputTooLarge and Refused; the upload itself raises Refused later if fields follow the file.
    """
    parts = Parts(content_type, stream=name)
    before_bytes = 0
    async for piece in pieces:
        parts.feed(piece)
        before_bytes += len(piece)
        if any(each.name == name for each in parts.found):
            break
        if before_bytes > limit_bytes + OVERHEAD_BYTES:
            raise InputTooLarge(
                f"the fields before the file are larger than the {limit_bytes} bytes this service reads"
            )
    else:
        parts.end()
        raise Refused("the file is missing", field=f"$.{name}")
    before: list[Part] = []
    while parts.found[0].name != name:
        before.append(parts.found.popleft())
    file = parts.found[0]
    upload = Upload(
        data_of(file, parts, pieces), filename=file.filename, content_type=file.content_type, limit_bytes=limit_bytes
    )
    return before, upload


async def data_of(file: Part, parts: Parts, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the file's bytes as they arrive, then check that the body ends there."""
    while True:
        if file.data:
            taken, file.data = bytes(file.data), bytearray()
            yield taken
        if file.is_whole:
            break
        piece = await anext(pieces, None)
        if piece is None:
            parts.end()
            return
        parts.feed(piece)
    async for piece in pieces:
        parts.feed(piece)
    if len(parts.found) > 1:
        raise Refused(f"send fields before the file, not after it: {parts.found[1].name}")
    parts.end()
