"""W3C trace context and the spans of one request, without a tracing library.

A unit stamps `time.monotonic()` while it works and builds `Span`s only for sampled requests, afterwards;
`oriel_wire.observe.spans` exports them. Source: w3c/trace-context, sections 3.2 and 3.3.
"""

import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import msgspec

from oriel_wire.observe.sampling import ALWAYS, NEVER, Sampling
from oriel_wire.observe.unsampled import Unsampled

Scalar = str | int | float | bool

_BATCH = 128
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
# Ids need uniqueness, not secrecy: one generator seeded by the system, not a system call per request.
_random = random.Random(random.SystemRandom().getrandbits(128))
random_bits = _random.getrandbits
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
# The second digit of the flags as it came -> the flags as they are passed on: sampled (1) and random (2).
FLAGS: Final = {digit: f"0{int(digit, 16) & 3}" for digit in "0123456789abcdef"}
_WALL_OFFSET_NS = time.time_ns() - time.monotonic_ns()


def reseed() -> None:
    """Give a forked process ids of its own."""
    _random.seed(random.SystemRandom().getrandbits(128))


class TraceContext(msgspec.Struct, frozen=True):
    """One position in one trace: the span that is the parent of the next ones.

    random: True if the trace id is known to be random in its last 56 bits (level 2 of the recommendation).
    """

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""
    random: bool = False


def parse_traceparent(value: str | bytes, state: str = "") -> TraceContext | None:
    """Read a `traceparent`; None if it is invalid; `tracestate` is then ignored as well.

    A version above 00 is read by its 00 prefix; version ff, all-zero ids and upper case are invalid.
    """
    found = read_traceparent(value.decode("latin-1") if isinstance(value, bytes) else value, state)
    if found is None:
        return None
    trace, span, flags, state = found
    return TraceContext(int(trace, 16), int(span, 16), flags in ("01", "03"), state, flags in ("02", "03"))


def read_traceparent(value: str, state: str | None = None) -> tuple[str, str, str, str] | None:
    """Return trace id and span id in hex, the flags and the `tracestate` to pass on, without converting to numbers;
    see `parse_traceparent`.
    """
    match = _PARENT.match(value)
    if match is None:
        return None
    version, trace, span, flags, rest = match.groups()
    if version == "ff" or (rest and version == "00") or trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return trace, span, FLAGS[flags[1]], bounded_state(state) if state else ""


class TraceIds:
    """New ids in hex, generated in batches: `traces.pop()` gives one of 32 digits, `spans.pop()` one of 16.

    The caller checks first that there are enough, and calls `refill` otherwise.
    """

    __slots__ = ("spans", "traces")

    def __init__(self) -> None:
        self.traces: list[str] = []
        self.spans: list[str] = []

    def refill(self) -> None:
        """Generate a batch of both; no id is all zeros."""
        self.traces = [each for each in _random.randbytes(16 * _BATCH).hex(",", 16).split(",") if each != _NO_TRACE]
        self.spans = [each for each in _random.randbytes(16 * _BATCH).hex(",", 8).split(",") if each != _NO_SPAN]


def bounded_state(state: str) -> str:
    """A `tracestate` to pass on: at most 32 members and 512 characters, whole members are dropped from the end."""
    if not state.isascii() or not state.isprintable():
        return ""
    members = state.split(",", 32)[:32]
    while len(",".join(members)) > 512:
        members.pop()
    return ",".join(members)


def new_trace(sampled: bool) -> TraceContext:
    """Start a trace of our own."""
    return TraceContext(random_bits(128) or 1, random_bits(64) or 1, sampled, "", True)


def start_trace(sampling: Sampling) -> TraceContext:
    """Start a trace of our own, sampled or not as `sampling` decides by its id."""
    trace_id = random_bits(128) or 1
    kept = sampling.keeps(trace_id)
    return TraceContext(trace_id, random_bits(64) or 1, kept, sampling.state if kept else "", True)


def follow_trace(parent: TraceContext, sampling: Sampling) -> TraceContext:
    """Return a caller's position in its trace with the decision that holds here: its own, or that of `sampling`."""
    if sampling.parent_based:
        return parent
    kept, state = sampling.decided(parent.trace_id, parent.state)
    return TraceContext(parent.trace_id, parent.span_id, kept, state, parent.random)


def child(parent: TraceContext) -> TraceContext:
    """The same trace with a fresh span id."""
    return TraceContext(parent.trace_id, random_bits(64) or 1, parent.sampled, parent.state, parent.random)


def format_traceparent(ctx: TraceContext) -> str:
    """`ctx` as a version 00 `traceparent` (also the form of `traceresponse`)."""
    return f"00-{ctx.trace_id:032x}-{ctx.span_id:016x}-0{ctx.sampled | ctx.random << 1}"


def wall_ns(monotonic_s: float) -> int:
    """Epoch nanoseconds of a `time.monotonic()` stamp of this process.

    The offset between the clocks is fixed, so a jump of the wall clock moves no span.
    """
    return int(monotonic_s * 1e9) + _WALL_OFFSET_NS


@dataclass(slots=True, kw_only=True)
class Span:
    """The work of one stage on a request. Times are `time.monotonic()` seconds; `parent_id` 0 means none.

    failed: True if its status is Error. error: a description, only where no attribute says why.
    """

    name: str
    context: TraceContext
    parent_id: int
    start_s: float
    end_s: float
    kind: Literal["server", "client", "internal"] = "internal"
    attributes: Mapping[str, Scalar] = field(default_factory=dict)
    failed: bool = False
    error: str = ""


def server_span(
    name: str,
    context: TraceContext,
    parent_id: int,
    times: tuple[float, float],
    attributes: Mapping[str, Scalar],
    failed: bool,
) -> Span:
    """Return the span of a whole request in a server. times: monotonic seconds of its start and end."""
    return Span(
        name=name,
        context=context,
        parent_id=parent_id,
        start_s=times[0],
        end_s=times[1],
        kind="server",
        attributes=attributes,
        failed=failed,
    )


def internal_span(
    name: str,
    parent: TraceContext,
    start_s: float,
    end_s: float,
    attributes: Mapping[str, Scalar],
    failed: bool = False,
) -> Span:
    """Return the span of a stage of a request. parent: the position of the span that it belongs to."""
    return Span(
        name=name,
        context=child(parent),
        parent_id=parent.span_id,
        start_s=start_s,
        end_s=end_s,
        attributes=attributes,
        failed=failed,
    )


class SpanSink(Protocol):
    """The destination of finished spans. `keep` and `record` never block and never raise.

    enabled: if False, callers need not call `keep` at all.
    sampling: the decision for traces that begin in this process.
    ring: the requests whose traces are not kept.
    """

    enabled: bool
    sampling: Sampling
    ring: Unsampled

    def keep(self, build: Callable[..., Iterable[Span]], record: tuple[Any, ...], spans: int) -> None:
        """Take what `build(*record)` returns, about `spans` spans. It is called later, and in another thread."""

    def record(self, span: Span) -> None:
        """Take one span."""

    def close(self) -> None: ...


class NullSink:
    """A sink that discards all spans."""

    enabled = False
    sampling = NEVER
    ring = Unsampled()

    def keep(self, build: Callable[..., Iterable[Span]], record: tuple[Any, ...], spans: int) -> None:
        """Discard the record."""

    def record(self, span: Span) -> None:
        """Discard the span."""

    def close(self) -> None:
        """Nothing has to be flushed."""


class ListSink:
    """Test double: keeps every span in `spans`."""

    enabled = True

    def __init__(self, sampling: Sampling = ALWAYS) -> None:
        self.sampling = sampling
        self.ring = Unsampled()
        self.spans: list[Span] = []

    def keep(self, build: Callable[..., Iterable[Span]], record: tuple[Any, ...], spans: int) -> None:
        self.spans += build(*record)

    def record(self, span: Span) -> None:
        self.spans.append(span)

    def close(self) -> None:
        """Spans stay readable."""
