"""The one request of a stream, as a simulation knows it: which model it is for, its rows and its size."""

from dataclasses import dataclass
from pathlib import Path
from re import compile as pattern

import msgspec

from oriel_cli.errors import CommandFailed
from oriel_cli.load.bodies import MAX_BODY_BYTES
from oriel_cli.load.scenario import Stream, address

_MODEL = pattern(r"/v2/models/(?P<name>[^/]+)(?:/versions/[^/]+)?(?:/infer)?/?\Z")


@dataclass(frozen=True, slots=True)
class Request:
    """path: as HTTP has it, also of a stream over gRPC. size_bytes: of the body if it is a file, else 0."""

    model: str
    path: str
    rows: int
    size_bytes: int


class _Input(msgspec.Struct):
    shape: list[int]


class _Body(msgspec.Struct):
    inputs: list[_Input]


def request_of(stream: Stream) -> Request:
    """Return the request of a stream. Raises CommandFailed unless it goes to a model."""
    parts, _, _ = address(stream.url)
    found = _MODEL.match(parts.path)
    if found is None:
        raise CommandFailed(
            f"stream {stream.name!r}: only requests to models can be simulated, http://host:port/v2/models/NAME/infer"
        )
    path = parts.path.rstrip("/").removesuffix("/infer") + "/infer"
    if not stream.body:
        return Request(found["name"], path, stream.rows or 1, 0)
    file = Path(stream.body)
    try:
        if file.stat().st_size > MAX_BODY_BYTES:
            raise CommandFailed(f"{file}: a body is at most {MAX_BODY_BYTES >> 20} MiB")
        data = file.read_bytes()
    except OSError as refused:
        raise CommandFailed(f"{file}: cannot be read ({refused.strerror})") from refused
    try:
        shape = msgspec.json.decode(data, type=_Body).inputs[0].shape
        rows = shape[0] if shape and shape[0] > 0 else 1
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        rows = 1  # not a v2 request in JSON: its rows are not known
    return Request(found["name"], path, min(rows, 65_536), len(data))
