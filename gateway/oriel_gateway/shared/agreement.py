"""Compares two answers to the same v2 infer call: the largest error, and the share of rows with the same class.

The rules are those of the check of compiled artefacts (`oriel_policies.artefacts`). Bodies of up to `MOST_BYTES` are
compared, JSON or with binary tensors, at most `RATE` pairs a second, in a thread: numpy is imported there by the first.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, NamedTuple

MOST_BYTES: Final = 64 * 1024  # largest answer that is compared
RATE: Final = 10
AT_ONCE: Final = 4
WINDOW: Final = 1000  # the latest pairs of one model and pool
MAX_PAIRS: Final = 256  # pairs of a model and a pool
RESULTS: Final = ("agrees", "differs", "not_comparable")
_LENGTH: Final = b"inference-header-content-length:"
_ENCODING: Final = b"content-encoding:"


class Compared(NamedTuple):
    """The result of one pair. agrees: every element is within its tolerance.

    rows: the share of rows with the same class; of answers without classes None. elements: the share of elements within
    their tolerance. error: the largest difference.
    """

    agrees: bool
    rows: float | None
    elements: float
    error: float


class Body:
    """One answer, collected to be compared. It is given up when it is too large or encoded."""

    def __init__(self, lines: list[bytes]) -> None:
        self._pieces: list[bytes] | None = []
        self._size = 0
        self.header_length = ""
        for line in lines:
            lower = line[: len(_LENGTH)].lower()
            if lower == _LENGTH:
                self.header_length = line[len(_LENGTH) :].strip().decode("latin-1")
            elif lower.startswith(_ENCODING):
                self._pieces = None

    def feed(self, data: bytes) -> None:
        """Take more of the body."""
        self._size += len(data)
        if self._size > MOST_BYTES:
            self._pieces = None
        if self._pieces is not None and data:
            self._pieces.append(bytes(data))

    def whole(self) -> bytes | None:
        """Return the body; None if it was given up."""
        return None if self._pieces is None else b"".join(self._pieces)


class Latest:
    """The latest pairs of one model and one pool. counts: the number of pairs by result."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(RESULTS, 0)
        self._pairs: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def add(self, found: Compared | None) -> None:
        """Count a pair; None: the two could not be compared."""
        if found is None:
            self.counts["not_comparable"] += 1
            return
        self.counts["agrees" if found.agrees else "differs"] += 1
        self._pairs.append((found.elements if found.rows is None else found.rows, found.error))

    @property
    def ratio(self) -> float | None:
        """The mean share of rows with the same class, or where there are no classes of elements within tolerance."""
        return sum(share for share, _ in self._pairs) / len(self._pairs) if self._pairs else None

    @property
    def error(self) -> float | None:
        """The largest difference of all pairs that are kept."""
        return max((error for _, error in self._pairs), default=None)


class Agreement:
    """The comparisons of a gateway. Single writer: the loop. latest: the latest pairs by (model, pool and version
    compared with).
    """

    def __init__(self, *, clock: Callable[[], float] = monotonic) -> None:
        self.latest: dict[tuple[str, str], Latest] = {}
        self._clock = clock
        self._second_s = 0.0
        self._in_second = 0
        self._under_way = 0

    def lowest(self) -> dict[str, float]:
        """Return the ratio of each model that was compared; of several, the lowest one."""
        found: dict[str, float] = {}
        for (model, _), latest in self.latest.items():
            if (ratio := latest.ratio) is not None:
                found[model] = min(ratio, found.get(model, 1.0))
        return found

    def compare(self, key: tuple[str, str], first: Body, second: Body, then: Callable[[Compared], None]) -> None:
        """Compare two answers in a thread, unless that is too much now; `then` gets the result on the loop."""
        one, other = first.whole(), second.whole()
        if one is None or other is None or not self._has_room(key):
            return
        self._under_way += 1
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(None, compared, one, first.header_length, other, second.header_length)

        def work_done(done: "asyncio.Future[Compared | None]") -> None:
            self._under_way -= 1
            if done.cancelled() or done.exception() is not None:
                return
            found = done.result()
            self.latest.setdefault(key, Latest()).add(found)
            if found is not None:
                then(found)

        work.add_done_callback(work_done)

    def _has_room(self, key: tuple[str, str]) -> bool:
        now = self._clock()
        if now - self._second_s >= 1.0:
            self._second_s, self._in_second = now, 0
        if self._in_second >= RATE or self._under_way >= AT_ONCE:
            return False
        if key not in self.latest and len(self.latest) >= MAX_PAIRS:
            return False
        self._in_second += 1
        return True


def compared(one: bytes, one_header: str, other: bytes, other_header: str) -> Compared | None:
    """Compare two bodies; `other` is the reference. None: one of them is no v2 answer. Blocks, and never raises."""
    from oriel_policies.artefacts.comparison import disagreement, tolerance_of
    from oriel_policies.artefacts.differences import measure
    from oriel_wire.errors import BadMessage
    from oriel_wire.v2.http import decode_response, parse_header_length

    try:
        found = decode_response(one, parse_header_length(one_header or None), json_limit=MOST_BYTES)
        reference = decode_response(other, parse_header_length(other_header or None), json_limit=MOST_BYTES)
    except (BadMessage, RecursionError, MemoryError):
        return None
    tensors = {each.name: each for each in found.outputs}
    if not reference.outputs or tensors.keys() != {each.name for each in reference.outputs}:
        return Compared(False, 0.0, 0.0, 0.0)
    errors = [
        measure(each.name, each.datatype, [(tensors[each.name].array, each.array)], tolerance_of(each.datatype))
        for each in reference.outputs
    ]
    if any(each.shapes for each in errors):
        return Compared(False, 0.0, 0.0, 0.0)
    classes = [each.top1 for each in errors if each.top1 is not None]
    total = sum(each.elements for each in errors)
    inside = (total - sum(each.outside for each in errors)) / total if total else 1.0
    error = max(each.absolute for each in errors)
    return Compared(not disagreement(errors), min(classes) if classes else None, inside, error)
