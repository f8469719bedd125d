"""A measured profile of one model: how long its batches take, and what a request costs beside them. Pure but `read`."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
from msgspec import Meta

from oriel_cli.errors import CommandFailed
from oriel_wire.process.allowed import with_values

MAX_BYTES = 1 << 20
QUANTILES = 40  # steps between the quantiles of `spread`
Milliseconds = Annotated[float, Meta(ge=0.0, le=3_600_000.0)]
Rows = Annotated[int, Meta(ge=1, le=65_536)]


class Size(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Batches of one size. rows: the rows of a batch. mean_ms: the mean of `batches` of them, in milliseconds.

    spread: quantiles of a batch's time over the mean, at equal steps from the least to the largest.
    """

    rows: Rows
    mean_ms: Annotated[float, Meta(gt=0.0, le=3_600_000.0)]
    batches: Annotated[int, Meta(ge=1)] = 1
    spread: Annotated[list[Annotated[float, Meta(ge=0.0, le=1000.0)]], Meta(min_length=1, max_length=1000)] = (
        msgspec.field(default_factory=lambda: [1.0])
    )


class LoopMs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The times of the server's event loop in milliseconds; all 0 for a loop that is never busy.

    turn_ms: one turn of the loop, which handles everything that came meanwhile. call_ms, batch_ms: further time for
    each call, answered or refused, and for each batch.
    """

    turn_ms: Milliseconds = 0.0
    call_ms: Milliseconds = 0.0
    batch_ms: Milliseconds = 0.0

    @property
    def alone_ms(self) -> float:
        """The time of a call that meets no other: it is read, its batch begins and ends, in one turn each."""
        return 3 * self.turn_ms + self.call_ms + self.batch_ms


class Profile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of machine.

    max_rows: largest batch; 0 for a model that runs every request alone.
    max_delay_ms, preferred_rows: as in Triton's `dynamic_batching`.
    instances: executions that ran at once.
    overhead_ms: time of an answer beside its batch and the event loop: the network, the hand-over to a thread.
    row_ms: pause of an instance after a batch, for each row, although calls wait; the event loop is not in it.
    sizes: mean times by rows, ascending.
    device_class: the class for which policy documents have a price.
    measured, server: the time of the measurement, and its server; for people.
    """

    model: Annotated[str, Meta(min_length=1, max_length=128)]
    max_rows: Annotated[int, Meta(ge=0, le=65_536)]
    sizes: Annotated[list[Size], Meta(min_length=1, max_length=256)]
    max_delay_ms: Milliseconds = 0.0
    preferred_rows: Annotated[list[Rows], Meta(max_length=64)] = []
    instances: Annotated[int, Meta(ge=1, le=1024)] = 1
    overhead_ms: Milliseconds = 0.0
    row_ms: Milliseconds = 0.0
    loop: LoopMs = msgspec.field(default_factory=LoopMs)
    device_class: str = "cpu"
    measured: str = ""
    server: str = ""

    @property
    def capacity(self) -> float:
        """Rows per second in full batches on all instances, if the event loop keeps up."""
        rows = max(1, self.max_rows)
        each_ms = mean_ms(self.sizes, rows) + rows * self.row_ms + self.loop.batch_ms + self.loop.turn_ms
        return self.instances * rows / (each_ms / 1e3)


def read(path: Path) -> Profile:
    """Read a profile. Raises CommandFailed with file, place and reason."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CommandFailed(f"{path}: a profile may have at most {MAX_BYTES >> 20} MiB")
        found = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as refused:
        raise CommandFailed(f"{path}: cannot be read ({refused.strerror})") from refused
    except msgspec.ValidationError as wrong:
        raise CommandFailed(f"{path}: {with_values(wrong, Profile)}") from wrong
    except msgspec.DecodeError as wrong:
        raise CommandFailed(f"{path}: {wrong}") from wrong
    rows = [size.rows for size in found.sizes]
    if rows != sorted(set(rows)):
        raise CommandFailed(f"{path}: 'sizes' have to ascend by 'rows'")
    if any(size.spread != sorted(size.spread) for size in found.sizes):
        raise CommandFailed(f"{path}: every 'spread' has to ascend")
    if any(each > found.max_rows for each in found.preferred_rows):
        raise CommandFailed(f"{path}: 'preferred_rows' must be at most 'max_rows'")
    return found


def mean_ms(sizes: Sequence[Size], rows: int) -> float:
    """Return the mean time of a batch of `rows`: between two sizes and above the largest one on a straight line.

    Below the smallest size it is the time of that one; a single size stands for a time that grows with the rows.
    """
    known = [size.rows for size in sizes]
    if rows <= known[0]:
        return sizes[0].mean_ms
    if len(sizes) == 1:
        return sizes[0].mean_ms * rows / known[0]
    high = min(bisect_left(known, rows), len(sizes) - 1)
    low, above = sizes[high - 1], sizes[high]
    slope = (above.mean_ms - low.mean_ms) / (above.rows - low.rows)
    return max(low.mean_ms, low.mean_ms + slope * (rows - low.rows))


def drawn(profile: Profile, chance: Random) -> Callable[[int], float]:
    """Return a function from rows to the seconds of one batch, drawn anew at each call.

    A batch spreads as those of the next larger size do.
    """
    known = [size.rows for size in profile.sizes]
    learned: dict[int, tuple[float, list[float]]] = {}

    def seconds(rows: int) -> float:
        found = learned.get(rows)
        if found is None:
            size = profile.sizes[min(bisect_left(known, rows), len(known) - 1)]
            found = learned[rows] = mean_ms(profile.sizes, rows) / 1e3, size.spread
        mean_s, spread = found
        place = chance.random() * (len(spread) - 1)
        low = int(place)
        high = min(low + 1, len(spread) - 1)
        return mean_s * (spread[low] + (spread[high] - spread[low]) * (place - low))

    return seconds


def spread_of(samples: Sequence[float]) -> list[float]:
    """Return the quantiles of `samples` over their mean, at QUANTILES equal steps; their own mean is 1.

    samples: positive. The distribution between the quantiles is taken as even, as `drawn` does.
    """
    ordered = sorted(samples)
    if len(ordered) < 2:
        return [1.0]
    last = len(ordered) - 1
    found = []
    for step in range(QUANTILES + 1):
        place = step / QUANTILES * last
        low = int(place)
        high = min(low + 1, last)
        found.append(ordered[low] + (ordered[high] - ordered[low]) * (place - low))
    between = [(one + other) / 2 for one, other in zip(found, found[1:], strict=False)]
    mean = sum(between) / len(between)
    return [round(each / mean, 4) for each in found] if mean else [1.0]
