"""The one request of a stream, as a simulation knows it: its model, its rows and size, and what its headers say."""

from dataclasses import dataclass
from pathlib import Path
from re import compile as pattern

import msgspec

from oriel_cli.errors import CommandFailed
from oriel_tools.load.bodies import MAX_BODY_BYTES
from oriel_tools.load.scenario import Stream, address
from oriel_wire.context import CLIENT_TIMEOUT_MS, PRIORITY, TENANT, TIMEOUT_MS, parse_timeout_ms

MAX_BAND = 255
MAX_ROWS = 65_536
_MODEL = pattern(r"/v2/models/(?P<name>[^/]+)(?:/versions/[^/]+)?(?:/infer)?/?\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request of one stream.

    path: HTTP path, also for a stream over gRPC. size_bytes: size of a body that is a file, else 0. timeout_s: None if
    the request has none. band, tenant: band and tenant for a server that trusts its caller.
    """

    model: str
    path: str
    rows: int
    size_bytes: int
    timeout_s: float | None
    band: int
    tenant: str


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
    fields = {name.lower(): value for name, value in stream.headers.items()}
    band = fields.get(PRIORITY, "0")
    if not band.isdigit() or int(band) > MAX_BAND:
        raise CommandFailed(f"stream {stream.name!r}: {PRIORITY} must be 0 to {MAX_BAND}")
    timeouts = [parse_timeout_ms(fields[name]) for name in (TIMEOUT_MS, CLIENT_TIMEOUT_MS) if name in fields]
    timeouts.append(None if stream.deadline_ms is None else stream.deadline_ms / 1e3)
    rows, size_bytes = _size(stream)
    return Request(
        model=found["name"],
        path=parts.path.rstrip("/").removesuffix("/infer") + "/infer",
        rows=rows,
        size_bytes=size_bytes,
        timeout_s=min([each for each in timeouts if each is not None], default=None),
        band=int(band),
        tenant=fields.get(TENANT, ""),
    )


def _size(stream: Stream) -> tuple[int, int]:
    """Return the rows and the bytes of the request."""
    if not stream.body:
        return stream.rows or 1, 0
    file = Path(stream.body)
    try:
        if file.stat().st_size > MAX_BODY_BYTES:
            raise CommandFailed(f"{file}: a body may have at most {MAX_BODY_BYTES >> 20} MiB")
        data = file.read_bytes()
    except OSError as refused:
        raise CommandFailed(f"{file}: cannot be read ({refused.strerror})") from refused
    try:
        shape = msgspec.json.decode(data, type=_Body).inputs[0].shape
        rows = shape[0] if shape and shape[0] > 0 else 1
    except (msgspec.MsgspecError, UnicodeDecodeError, IndexError):
        rows = 1  # not a v2 request in JSON: its rows are not known
    return min(rows, MAX_ROWS), len(data)
