"""Seeded schedules of arrivals. Pure; the same seed gives the same schedule everywhere."""

import heapq
import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import chain
from random import Random

import msgspec

MAX_TRACE_LINES = 5_000_000
MAX_TOTAL_MS = 7 * 86_400e3  # longest request that an access log may have
ANY = "load"  # the stream of a load without names, which replays the calls of everybody


def uniform(rate: float, seconds: float) -> Iterator[float]:
    """Offsets in seconds, 1/rate apart, the first one gap after the start."""
    number = 1
    while rate > 0 and (offset := number / rate) < seconds:
        yield offset
        number += 1


def poisson(rate: float, seconds: float, random: Random) -> Iterator[float]:
    """Offsets in seconds of a Poisson process of `rate` per second."""
    offset = 0.0
    while rate > 0 and (offset := offset + random.expovariate(rate)) < seconds:
        yield offset


def bursty(rate: float, seconds: float, random: Random, *, factor: float, burst_s: float) -> Iterator[float]:
    """Offsets of a Poisson process that is switched on and off (an interrupted Poisson process).

    While on it runs at factor x rate, while off it rests. Stays are exponential, `burst_s` on the mean while on and
    burst_s x (factor - 1) while off, so `rate` is the mean in the long run; a short phase may hold more or fewer.
    """
    if factor <= 1:
        yield from poisson(rate, seconds, random)
        return
    offset = 0.0
    on = random.random() < 1 / factor
    while rate > 0 and offset < seconds:
        until = offset + random.expovariate(1 / (burst_s if on else burst_s * (factor - 1)))
        while on and (offset := offset + random.expovariate(rate * factor)) < min(until, seconds):
            yield offset
        # The rest of the last gap is drawn anew in the next stay: the process has no memory.
        offset, on = until, not on


def ramp(rate: float, seconds: float, random: Random, *, factor: float) -> Iterator[float]:
    """Offsets of a Poisson process whose rate goes on a straight line from `rate` to factor x rate at the end."""
    highest = rate * max(1.0, factor)
    for offset in poisson(highest, seconds, random):
        if random.random() * highest < rate * (1.0 + (factor - 1.0) * offset / seconds):
            yield offset


def replayed(offsets: Sequence[float], seconds: float) -> Iterator[float]:
    """The recorded `offsets` (ascending) that lie within the phase."""
    for offset in offsets:
        if offset >= seconds:
            return
        yield offset


def merged(schedules: Sequence[Iterator[float]]) -> Iterator[tuple[float, int]]:
    """All arrivals in order of time, each with the index of its schedule."""

    def labelled(index: int) -> Iterator[tuple[float, int]]:
        for offset in schedules[index]:
            yield offset, index

    return heapq.merge(*[labelled(index) for index in range(len(schedules))])


def trace_offsets(lines: Iterator[str], stream: str) -> list[float]:
    """The arrivals of `stream` in a trace: one a line, `seconds` or `seconds,stream`; `#` begins a comment.

    A line without a name is an arrival of every stream that replays the file. The access log of a gateway is a trace as
    well: each line is an arrival of the streams that are named like its tenant or its tier, and of ANY. Raises
    ValueError with the line's number for one that is no time, or earlier than the one before, or beyond
    MAX_TRACE_LINES.
    """
    first = next(lines, "")
    numbered = enumerate(_bounded(chain([first], lines)), 1)
    return _logged(numbered, stream) if first.lstrip().startswith("{") else _written(numbered, stream)


def _bounded(lines: Iterator[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if number > MAX_TRACE_LINES:
            raise ValueError(f"line {number}: a trace may have at most {MAX_TRACE_LINES} lines")
        yield line


class _Logged(msgspec.Struct):
    """The fields of a line of an access log that a trace needs.

    time: time at which the request had ended. stages_ms: its stages in milliseconds, `total` among them.
    """

    time: datetime
    stages_ms: dict[str, float]
    tenant: str = ""
    tier: str = ""


def _logged(lines: Iterator[tuple[int, str]], stream: str) -> list[float]:
    """The arrivals in an access log, from the first one on. Its lines are in the order in which the requests ended."""
    decoder, arrivals, begin = msgspec.json.Decoder(_Logged), list[float](), math.inf
    for number, line in lines:
        if not line.strip():
            continue
        try:
            each = decoder.decode(line)
            arrived = each.time.timestamp() - each.stages_ms["total"] / 1e3
            if not 0.0 <= each.stages_ms["total"] <= MAX_TOTAL_MS:
                raise ValueError
        except (msgspec.DecodeError, KeyError, OverflowError, ValueError):
            raise ValueError(f"line {number}: this is not a line of a gateway's access log") from None
        begin = min(begin, arrived)
        if stream in (each.tenant, each.tier, ANY):
            arrivals.append(arrived)
    return [arrived - begin for arrived in sorted(arrivals)]


def _written(lines: Iterator[tuple[int, str]], stream: str) -> list[float]:
    found: list[float] = []
    last = 0.0
    for number, line in lines:
        text, _, name = line.partition("#")[0].partition(",")
        if not text.strip():
            continue
        try:
            offset = float(text)
        except ValueError:
            raise ValueError(f"line {number}: {text.strip()[:40]!r} is not a number of seconds") from None
        if not math.isfinite(offset) or offset < last:
            raise ValueError(f"line {number}: times must be finite, from 0 and ascending")
        last = offset
        if name.strip() in ("", stream):
            found.append(offset)
    return found
