"""Remembers the latest requests whose traces are not kept, so that their spans can still be sent when asked for.

A gateway decides only at the end of a request that its trace is worth keeping, and then asks the servers that worked on
it. Until then each of them holds one tuple per request, from which the spans are made. Pure.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

__all__ = ["MAX_TRACES", "MAX_NOTED", "Noted", "Unsampled", "requested_traces", "keep_body"]

SEGMENT: Final = 1024
SEGMENTS: Final = 20
MAX_NOTED: Final = SEGMENT * SEGMENTS  # about 16 MiB, and 10 s at 2,000 requests a second
MAX_TRACES: Final = 256  # trace ids of one request
_ID: Final = 32

Build = Callable[..., Iterable[Any]]
# A trace's id, what makes its spans of the record, and about how many they are. None: the spans were sent already.
Noted = tuple[int, Build | None, tuple[Any, ...], int]


class Unsampled:
    """A ring of requests, the latest `MAX_NOTED` of them. For one thread.

    They lie in segments. The traces of a segment are indexed when they are first asked for, so that a server that
    nobody asks pays for an append only; and a segment is forgotten as a whole.
    """

    __slots__ = ("_indexed", "_latest", "_segments")

    def __init__(self, segments: int = SEGMENTS) -> None:
        self._latest: list[Noted] = []
        self._segments: deque[list[Noted]] = deque([self._latest], maxlen=segments)
        self._indexed: dict[int, tuple[int, dict[int, list[int]]]] = {}

    def note(self, trace_id: int, build: Build | None, record: tuple[Any, ...], spans: int) -> None:
        """Remember a request; see `Noted`. The record holds nothing that is large or alive."""
        latest = self._latest
        if len(latest) >= SEGMENT:
            if len(self._segments) == self._segments.maxlen:
                self._indexed.pop(id(self._segments[0]), None)
            latest = self._latest = []
            self._segments.append(latest)
        latest.append((trace_id, build, record, spans))

    def sent(self, trace_id: int, record: tuple[Any, ...] = ()) -> None:
        """Remember that the spans of a request were sent without being asked for."""
        self.note(trace_id, None, record, 0)

    def pop(self, traces: Iterable[int]) -> tuple[int, list[Noted]]:
        """Return how many of these traces are known, and what was noted of them; it is given out only once."""
        known: set[int] = set()
        found: list[Noted] = []
        wanted = list(traces)
        for segment in self._segments:
            index = self._index(segment)
            for trace_id in wanted:
                positions = index.get(trace_id)
                if positions is None:
                    continue
                known.add(trace_id)
                for position in positions:
                    noted = segment[position]
                    if noted[2]:
                        found.append(noted)
                        segment[position] = (trace_id, None, (), 0)
        return len(known), found

    def _index(self, segment: list[Noted]) -> dict[int, list[int]]:
        """Return the positions of each trace in a segment, bringing the index up to date."""
        done, index = self._indexed.get(id(segment), (0, {}))
        for position in range(done, len(segment)):
            index.setdefault(segment[position][0], []).append(position)
        self._indexed[id(segment)] = len(segment), index
        return index


def requested_traces(body: bytes) -> list[int] | None:
    """Return the trace ids of a request to keep their spans: hexadecimal, one a line. None: it is no such request."""
    if not body or len(body) > MAX_TRACES * (_ID + 1):
        return None
    lines = body.split()
    if len(lines) > MAX_TRACES or any(len(line) != _ID for line in lines):
        return None
    try:
        return [int(line, 16) for line in lines]
    except ValueError:
        return None


def keep_body(traces: Iterable[str]) -> bytes:
    """Return the body of a request to keep the spans of these traces, at most `MAX_TRACES`."""
    return "\n".join(traces).encode("ascii")
