"""Describes a load: a TOML file, or flags turned into the same values."""

import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from oriel_cli.errors import CommandFailed
from oriel_tools.load.arrivals import trace_offsets
from oriel_wire.process.allowed import with_values

Positive = Annotated[float, Meta(gt=0, le=1e6)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Encoding = Literal["raw", "json", "binary"]
PORTS = {"http": 80, "grpc": 8001}
MAX_STREAMS = 64
MAX_PHASES = 256


class Stream(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One kind of request of one tenant. Paths are relative to the scenario's folder."""

    url: str
    name: str = "load"
    tier: str = ""  # a label: streams of one tier are counted together; the stream's name if empty
    key: str = ""
    key_env: str = ""  # name of an environment variable that holds the key
    method: str = "POST"
    headers: dict[str, str] = {}
    body: str = ""
    rows: Annotated[int, Meta(ge=0, le=65_536)] = 0  # without a body: rows of random v2 inputs
    content_type: str = ""
    encoding: Encoding = "raw"  # json, binary: the body is a v2 JSON request and travels so
    target_ms: Positive | None = None
    deadline_ms: Positive | None = None  # sent to the server
    timeout_s: Seconds | None = None  # when this side gives up
    weight: Positive = 1.0  # share of a phase's `rate`

    @property
    def gives_up_s(self) -> float:
        """Seconds after sending: `timeout_s`, else a second past the deadline, else 10."""
        if self.timeout_s is not None:
            return self.timeout_s
        return self.deadline_ms / 1e3 + 1 if self.deadline_ms is not None else 10.0


class Phase(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stretch of time with one kind of arrivals. `rate`: calls per second of all streams; `rates`: by stream."""

    seconds: Seconds
    name: str = ""
    rate: Positive | None = None
    rates: dict[str, Annotated[float, Meta(ge=0, le=1e6)]] = {}
    arrivals: Literal["poisson", "bursty", "ramp", "uniform", "trace"] = "poisson"
    burst_factor: Annotated[float, Meta(ge=1, le=1000)] = 5.0
    burst_s: Seconds = 0.5
    ramp_factor: Annotated[float, Meta(ge=0, le=1000)] = 4.0
    trace: str = ""
    warm_up: bool = False  # sent and counted, never quoted


class Scenario(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The whole of it. max_in_flight bounds requests under way, and with them connections and memory."""

    stream: Annotated[list[Stream], Meta(min_length=1, max_length=MAX_STREAMS)]
    phase: Annotated[list[Phase], Meta(min_length=1, max_length=MAX_PHASES)]
    title: str = ""
    seed: int = 1
    max_in_flight: Count = 1024
    max_lag_ms: Positive = 10.0
    grpc_channels: Annotated[int, Meta(ge=1, le=64)] = 4

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phase)


def read(path: Path) -> Scenario:
    """The scenario in this file. Raises CommandFailed with file, place and reason."""
    try:
        found = msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except (OSError, UnicodeDecodeError) as refused:
        raise CommandFailed(f"{path}: cannot be read ({refused})") from refused
    except tomllib.TOMLDecodeError as wrong:
        raise CommandFailed(f"{path}: {wrong}") from wrong
    except msgspec.ValidationError as wrong:
        raise CommandFailed(f"{path}: {with_values(wrong, Scenario)}") from wrong
    for index, stream in enumerate(found.stream):
        if stream.name == "load" and len(found.stream) > 1:
            stream.name = f"stream-{index + 1}"
    try:
        return checked(found, path.parent)
    except CommandFailed as wrong:
        raise CommandFailed(f"{path}: {wrong}") from wrong


def checked(scenario: Scenario, folder: Path) -> Scenario:
    """`scenario` with names filled in, keys read and paths made relative to `folder`. Raises CommandFailed."""
    names = [stream.name for stream in scenario.stream]
    if len(set(names)) < len(names):
        raise CommandFailed("two streams have the same name")
    for stream in scenario.stream:
        _check_stream(stream, folder)
    for number, phase in enumerate(scenario.phase, 1):
        phase.name = phase.name or (f"phase {number}" if len(scenario.phase) > 1 else phase.arrivals)
        where = f"phase {phase.name!r}"
        if unknown := set(phase.rates) - set(names):
            raise CommandFailed(
                f"{where}: 'rates' names {', '.join(sorted(unknown))}, which is not the name of a stream"
            )
        if phase.arrivals == "trace":
            if not phase.trace:
                raise CommandFailed(f"{where}: trace arrivals need 'trace', a file")
            if phase.rate is not None or phase.rates:
                raise CommandFailed(f"{where}: trace arrivals have the trace's own rate: leave out 'rate' and 'rates'")
            phase.trace = str(folder / phase.trace)
        elif (phase.rate is None) == (not phase.rates):
            raise CommandFailed(f"{where}: give either 'rate' or 'rates'")
    return scenario


def _check_stream(stream: Stream, folder: Path) -> None:
    where = f"stream {stream.name!r}"
    address(stream.url)
    stream.tier = stream.tier or stream.name
    if stream.key_env:
        stream.key = os.environ.get(stream.key_env, "")
        if not stream.key:
            raise CommandFailed(f"{where}: the environment variable {stream.key_env} is empty")
    if stream.body and stream.rows:
        raise CommandFailed(f"{where}: give either 'body' or 'rows'")
    fields = [*stream.headers, *stream.headers.values(), stream.key, stream.content_type, stream.method, stream.url]
    if any(not field.isprintable() or not field.isascii() for field in fields):
        raise CommandFailed(f"{where}: url, method, key and headers must be printable ASCII")
    if " " in stream.url + stream.method:
        raise CommandFailed(f"{where}: url and method must have no blanks")
    if stream.body:
        stream.body = str(folder / stream.body)


def address(url: str) -> tuple[SplitResult, str, int]:
    """The parts of `url`, its host and its port. Raises CommandFailed unless it is http:// or grpc://."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as wrong:
        raise CommandFailed(f"{url!r} is no URL: {wrong}") from wrong
    if parts.scheme not in PORTS or not parts.hostname:
        raise CommandFailed(f"{url!r}: a URL must begin with http:// or grpc:// and name a host (without TLS)")
    return parts, parts.hostname, port or PORTS[parts.scheme]


def trace_of(phase: Phase, stream: Stream) -> list[float]:
    """The recorded arrivals of `stream` in `phase`. Raises CommandFailed."""
    try:
        with Path(phase.trace).open(encoding="utf-8") as lines:
            return trace_offsets(iter(lines), stream.name)
    except (OSError, UnicodeDecodeError) as refused:
        raise CommandFailed(f"{phase.trace}: cannot be read ({refused})") from refused
    except ValueError as wrong:
        raise CommandFailed(f"{phase.trace}: {wrong}") from wrong
