"""`oriel simulate profile`: measures on a running server how long the batches of a model take.

First one caller sends requests one after the other: the server's statistics say how long the batch of each answer took,
so the rest is the overhead. Then there are 2, 4, 8, ... callers, who wait for random times before they send the next
request: batches of all sizes are executed beside the work that their requests make. In a last and longest turn
enough callers send without pauses for calls to wait at all times: this shows how many batches run at once, and how long
instances rest between two although calls wait.

A server of this project also reports how long its event loop has been busy. The time of the loop for each call and each
batch is fitted to all turns of the measurement. The time of one turn of the loop itself is the difference between
refused calls that come one by one and refused calls that come together.

In the first part of each turn the statistics are read every WATCH_S: where one batch has ended in between, its own time
is known. These readings make a server of quick models slower, so only the rest of the turn is counted for the means.
The server should have nothing else to do.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec
import numpy as np

from oriel_cli.demo.closed_loop import Shot, drive
from oriel_cli.errors import CommandFailed
from oriel_policies.waiting.batch import non_decreasing
from oriel_tools.load.bodies import prepare
from oriel_tools.load.command import write
from oriel_tools.load.scenario import Stream, address
from oriel_tools.simulate.profile import LoopMs, Profile, Size, mean_ms, spread_of
from oriel_wire.context import LOOP_US
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError

ANSWER_WITHIN_S = 30.0
MOST_CALLERS = 256
MOST_SIZES = 128
WATCH_S = 0.01
WATCHED = 0.3  # part of a turn in which batches are watched one by one; the server is slower meanwhile
OFTEN = 10  # batches of a size that make a mean
ENOUGH = 50  # batches that make a spread
TOGETHER, APART = 64, 32  # callers whose calls are refused
APART_S = 0.02  # a mean pause before a call, so that calls are read one by one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate profile`."""
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", metavar="URL", help="the inference server (%(default)s)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="write the profile there")
    parser.add_argument(
        "--seconds",
        type=float,
        default=2.0,
        metavar="S",
        help="for each number of callers (%(default)s)",
    )
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="of each request (%(default)s)")
    parser.add_argument("--device-class", default="cpu", metavar="NAME", help="what prices are for (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the profile and print what it says."""
    if not 0.05 <= args.seconds <= 600.0:
        raise CommandFailed("--seconds must be 0.05 to 600")
    if not args.out.parent.is_dir():
        raise CommandFailed(f"{args.out}: there is no such folder")
    parts, _, _ = address(args.url)
    if parts.scheme != "http":
        raise CommandFailed("--url must be the server's HTTP address, http://host:port")
    try:
        profile = asyncio.run(
            measured(args.url, args.model, seconds=args.seconds, rows=args.rows, device_class=args.device_class)
        )
    except UpstreamError as error:
        raise CommandFailed(f"{args.url}: {error}") from error
    write(args.out, msgspec.json.format(msgspec.json.encode(profile)).decode() + "\n")
    print("\n".join(as_text(profile)))
    return 0


def as_text(profile: Profile) -> list[str]:
    """The lines that a person reads."""
    sizes = ", ".join([f"{size.rows}: {size.mean_ms:.3f}" for size in profile.sizes])
    return [
        f"{profile.model}: batches of N rows take (ms) {sizes}",
        f"{profile.instances} at once; beside the batch {profile.overhead_ms:.3f} ms for each answer, and "
        f"{profile.row_ms:.3f} ms for each row",
        f"of the event loop {profile.loop.turn_ms:.3f} ms for each turn, {profile.loop.call_ms:.3f} ms for each call, "
        f"{profile.loop.batch_ms:.3f} ms for each batch",
        f"about {profile.capacity:.0f} rows per second",
    ]


@dataclass(frozen=True, slots=True)
class Counts:
    """Batches of one size so far: how many, and their seconds in all."""

    batches: int
    seconds: float


@dataclass(frozen=True, slots=True)
class _Statistics:
    """The counters of a server at one moment.

    counts: batches by their rows. loop_s: seconds for which its event loop was busy; None if it does not report that.
    """

    counts: dict[int, Counts]
    loop_s: float | None


async def measured(
    url: str, model: str, *, seconds: float, rows: int = 1, device_class: str = "cpu", instances: int = 0
) -> Profile:
    """Measure one model. Raises CommandFailed, and UpstreamError if the server cannot be reached.

    instances: executions that can run at once; 0 if that is not known: then as many as did on average count.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    client = HttpClient(host=parts.hostname, port=parts.port or 80, max_connections=MOST_CALLERS + 1)
    try:
        config, _ = await _read(client, f"/v2/models/{quote(model, safe='')}/config")
        max_rows = int(config.get("max_batch_size") or 0)
        batching = config.get("dynamic_batching")
        found = batching if isinstance(batching, dict) else {}
        if not 1 <= rows <= max(1, max_rows):
            raise CommandFailed(f"--rows must be 1 to {max(1, max_rows)}, the model's max_batch_size")
        shot = await _shot(url, model, rows)
        first = await _turn(client, model, shot, 1, seconds)
        turns = [first]
        for callers in callers_of(max_rows, rows):
            turns.append(await _turn(client, model, shot, callers, seconds, think_s=turns[-1].mean_s))
        full = min(MOST_CALLERS, max(8, 4 * max_rows // rows))
        turns.append(await _turn(client, model, shot, full, 3.0 * seconds))
        turn_s = 0.0 if first.loop_s is None else await _loop_turn_s(client, model, shot, seconds)
    finally:
        await client.close()
    counts = together([turn.counts for turn in turns])
    single = [each for turn in turns for each in turn.single]
    spreads = _spreads({size: mean_s for size, (_, mean_s) in counts.items()}, single, first.latencies_s)
    loop = loop_of(turns, turn_s)
    instances, row_s = turns[-1].saturation(instances, (loop.turn_ms + loop.batch_ms) / 1e3)
    overhead_s = first.mean_s - first.busy_s / first.batches - loop.alone_ms / 1e3
    return Profile(
        model=model,
        max_rows=max_rows if max_rows and (batching is not None or any(size > rows for size in counts)) else 0,
        sizes=[
            Size(rows=size, mean_ms=round(mean_s * 1e3, 4), batches=batches, spread=spreads[size])
            for size, (batches, mean_s) in counts.items()
        ],
        max_delay_ms=int(found.get("max_queue_delay_microseconds") or 0) / 1e3,
        preferred_rows=[int(each) for each in found.get("preferred_batch_size") or ()],
        instances=instances,
        overhead_ms=round(max(0.0, overhead_s - row_s) * 1e3, 4),
        row_ms=round(row_s * 1e3, 4),
        loop=loop,
        device_class=device_class,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        server=f"{url}, 1 to {full} callers of {rows} rows, {seconds:g} s each",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Some callers at once, for a while. latencies_s: seconds of each answer. counts: rows -> batches meanwhile.

    single: (rows, seconds) of batches that were seen one by one. loop_s: busy seconds of the server's event loop.
    """

    elapsed_s: float
    loop_s: float | None
    latencies_s: Sequence[float]
    counts: Mapping[int, Counts]
    single: Sequence[tuple[int, float]]

    @property
    def mean_s(self) -> float:
        return sum(self.latencies_s) / len(self.latencies_s)

    @property
    def batches(self) -> int:
        return sum([each.batches for each in self.counts.values()])

    @property
    def busy_s(self) -> float:
        return sum([each.seconds for each in self.counts.values()])

    @property
    def inline_s(self) -> float:
        """The time of batches that are so short that the server runs them on its event loop."""
        from oriel_inference.batching.service_times import INLINE_S

        found = [each.seconds for each in self.counts.values() if each.seconds < INLINE_S * each.batches]
        return 0.0 if self.loop_s is None else sum(found)

    def saturation(self, known: int, batch_s: float) -> tuple[int, float]:
        """Return how many batches ran at once, and the rest of an instance between two, for each row.

        known: number of batches that can run at once; 0 if unknown.
        batch_s: seconds of the event loop for a batch, which do not count as rest.
        """
        instances = known or max(1, round(self.busy_s / self.elapsed_s))
        executed = sum([rows * each.batches for rows, each in self.counts.items()])
        return instances, max(0.0, (instances * self.elapsed_s - self.busy_s - self.batches * batch_s) / executed)


async def _turn(
    client: HttpClient, model: str, shot: Shot, callers: int, seconds: float, *, think_s: float = 0.0
) -> _Turn:
    think_s = min(think_s, 0.2 * seconds)  # with a slow model's long pauses nobody would call
    first_s = min(0.3, seconds)  # the first ones are slower
    single: list[tuple[int, float]] = []
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(client, model, first_s, single))
        watched = await drive(client, shot, callers=callers, duration_s=first_s + WATCHED * seconds, think_s=think_s)
        watch.cancel()
    before, began_s = await _statistics(client, model), monotonic()
    figures = await drive(client, shot, callers=callers, duration_s=(1.0 - WATCHED) * seconds, think_s=think_s)
    elapsed_s = monotonic() - began_s
    after = await _statistics(client, model)
    counts = _since(before.counts, after.counts, model)
    if failed := watched.others or figures.others or ({} if figures.latencies_s else "none ended"):
        raise CommandFailed(f"the server failed calls of {callers} concurrent callers: {failed}")
    return _Turn(
        elapsed_s=elapsed_s,
        loop_s=_loop_s(before, after),
        latencies_s=figures.latencies_s,
        counts=counts,
        single=single,
    )


def _loop_s(before: _Statistics, after: _Statistics) -> float | None:
    return None if before.loop_s is None or after.loop_s is None else after.loop_s - before.loop_s


async def _loop_turn_s(client: HttpClient, model: str, shot: Shot, seconds: float) -> float:
    """Return the seconds of one turn of the event loop without the work in it.

    It is the difference between calls that the loop reads one by one and calls that come together. The calls lack the
    last byte of their tensor, so that they are refused before anything is executed or learned from them. A caller whose
    call is refused pauses for 10 ms: without more pauses all of them send at once again.
    """
    short = replace(shot, body=shot.body[:-1])
    apart_s = await _refusal_s(client, model, short, callers=APART, seconds=seconds, think_s=APART_S)
    together_s = await _refusal_s(client, model, short, callers=TOGETHER, seconds=seconds, think_s=0.0)
    return max(0.0, apart_s - together_s)


async def _refusal_s(
    client: HttpClient, model: str, shot: Shot, *, callers: int, seconds: float, think_s: float
) -> float:
    """Return the event loop's seconds for one of these calls."""
    before = await _statistics(client, model)
    figures = await drive(client, shot, callers=callers, duration_s=seconds, think_s=think_s)
    loop_s = _loop_s(before, await _statistics(client, model))
    if figures.latencies_s or set(figures.others) != {"400"}:
        raise CommandFailed(f"the server does not refuse incomplete calls as it should: {figures.others}")
    return (loop_s or 0.0) / figures.others["400"]


def loop_of(turns: "Sequence[_Turn]", turn_s: float) -> LoopMs:
    """Return the event loop's times; zeros if the server does not report how long its loop was busy.

    turns: measurements with growing numbers of callers. In the last one callers send as soon as they are answered, so
    calls come together, and one batch ends where the next one begins. In the others the loop reads nearly every call
    alone. turn_s: seconds of one turn of the loop.
    """
    if any(turn.loop_s is None for turn in turns):
        return LoopMs()
    found = []
    for turn in turns:
        calls, batches = len(turn.latencies_s), turn.batches
        loop_turns = 2 * batches + (0 if turn is turns[-1] else calls)
        found.append(((turn.loop_s or 0.0) - turn.inline_s - loop_turns * turn_s, calls, batches))
    call_s, batch_s = loop_times(found)
    return LoopMs(turn_ms=round(turn_s * 1e3, 4), call_ms=round(call_s * 1e3, 4), batch_ms=round(batch_s * 1e3, 4))


def loop_times(turns: Sequence[tuple[float, int, int]]) -> tuple[float, float]:
    """Return the seconds of each call and of each batch that come closest to the seconds of all turns, none negative.

    turns: (seconds, calls, batches).
    """
    times = np.array([seconds for seconds, _, _ in turns])
    counts = np.array([(calls, batches) for _, calls, batches in turns], float)
    fits = [np.linalg.lstsq(counts[:, kept], times, rcond=None)[0] for kept in ([0, 1], [0], [1])]
    both, calls_alone, batches_alone = [[float(each) for each in fit] for fit in fits]
    if min(both) >= 0.0:
        return both[0], both[1]
    return (max(0.0, calls_alone[0]), 0.0) if both[1] < 0.0 else (0.0, max(0.0, batches_alone[0]))


async def _shot(url: str, model: str, rows: int) -> Shot:
    made = await prepare(Stream(url=f"{url.rstrip('/')}/v2/models/{model}/infer", rows=rows, encoding="binary"))
    return Shot(target=made.path, headers=made.fields, body=made.body)


async def _statistics(client: HttpClient, model: str) -> _Statistics:
    """Read the batches of all versions from the statistics extension, by size."""
    document, loop_us = await _read(client, f"/v2/models/{quote(model, safe='')}/stats")
    found: dict[int, Counts] = {}
    for version in document.get("model_stats") or ():
        for each in version.get("batch_stats") or ():
            stages = [each.get(name) or {} for name in ("compute_input", "compute_infer", "compute_output")]
            rows, batches = int(each.get("batch_size") or 0), int(stages[1].get("count") or 0)
            seconds = sum([int(stage.get("ns") or 0) for stage in stages]) / 1e9
            known = found.get(rows, Counts(0, 0.0))
            found[rows] = Counts(known.batches + batches, known.seconds + seconds)
    return _Statistics(found, int(loop_us) / 1e6 if loop_us.isdecimal() else None)


def _since(before: Mapping[int, Counts], after: Mapping[int, Counts], model: str) -> dict[int, Counts]:
    none = Counts(0, 0.0)
    found = {
        rows: Counts(each.batches - before.get(rows, none).batches, each.seconds - before.get(rows, none).seconds)
        for rows, each in after.items()
    }
    found = {rows: each for rows, each in found.items() if rows > 0 and each.batches > 0 and each.seconds > 0.0}
    if not found:
        raise CommandFailed(f"the server's statistics of {model!r} do not say how long its batches take")
    return found


def together(turns: Sequence[Mapping[int, Counts]]) -> dict[int, tuple[int, float]]:
    """Add up turns: rows -> (batches, mean seconds), ascending.

    Neighbouring sizes that were seen less than OFTEN are taken together, as their mean size. The means do not decrease:
    a larger batch that looks quicker was measured at a quieter moment.
    """
    found: dict[int, Counts] = {}
    for turn in turns:
        for rows, each in turn.items():
            known = found.get(rows, Counts(0, 0.0))
            found[rows] = Counts(known.batches + each.batches, known.seconds + each.seconds)
    groups: list[list[tuple[int, Counts]]] = [[]]
    for size in sorted(found.items()):
        if sum([each.batches for _, each in groups[-1]]) >= OFTEN:
            groups.append([])
        groups[-1].append(size)
    if len(groups) > 1 and sum([each.batches for _, each in groups[-1]]) < OFTEN:
        groups[-2:] = [groups[-2] + groups[-1]]
    kept = [_mean_size(group) for group in groups]
    while len(kept) > MOST_SIZES:
        kept = [*kept[:-1:2], kept[-1]]
    means = non_decreasing([(each.seconds / each.batches, each.batches) for _, each in kept])
    return {rows: (each.batches, mean_s) for (rows, each), mean_s in zip(kept, means, strict=True)}


def _mean_size(sizes: Sequence[tuple[int, Counts]]) -> tuple[int, Counts]:
    batches = sum([each.batches for _, each in sizes])
    rows = sum([rows * each.batches for rows, each in sizes])
    return round(rows / batches), Counts(batches, sum([each.seconds for _, each in sizes]))


async def _watch(client: HttpClient, model: str, after_s: float, single: list[tuple[int, float]]) -> None:
    """Read the statistics again and again, from `after_s` on; note every batch that was the only one since the last
    time. Never raises.
    """
    none, before = Counts(0, 0.0), dict[int, Counts]()
    await asyncio.sleep(after_s)
    for number in count():
        try:
            after = (await _statistics(client, model)).counts
        except (CommandFailed, UpstreamError):
            return  # the callers, or the statistics after this turn, will say so
        more = [
            (rows, each.batches - before.get(rows, none).batches, each.seconds - before.get(rows, none).seconds)
            for rows, each in after.items()
        ]
        more = [each for each in more if each[1] > 0]
        if number and len(more) == 1 and more[0][1] == 1 and more[0][2] > 0.0:
            single.append((more[0][0], more[0][2]))
        before = after
        await asyncio.sleep(WATCH_S)


def _spreads(
    sizes: Mapping[int, float], single: Sequence[tuple[int, float]], answers_s: Sequence[float]
) -> dict[int, list[float]]:
    """Return the spread of the batches of each size, as `spread_of` does.

    sizes: rows -> mean seconds of a batch. single: (rows, seconds) of batches that were seen one by one. answers_s:
    seconds of the answers to one caller. The spread of a size is that of its own batches if enough were seen, else that
    of all sizes, else that of the answers, whose other time spreads as much.
    """
    profile = [Size(rows=rows, mean_ms=mean_s * 1e3) for rows, mean_s in sizes.items()]
    every = [seconds * 1e3 / mean_ms(profile, rows) for rows, seconds in single]
    common = spread_of(every if len(every) >= ENOUGH else answers_s)
    seen = {size: [seconds for rows, seconds in single if rows == size] for size in sizes}
    return {size: spread_of(seen[size]) if len(seen[size]) >= ENOUGH else common for size in sizes}


def callers_of(max_rows: int, rows: int) -> list[int]:
    """Return numbers of callers that double until their requests fill two of the largest batches."""
    most = min(MOST_CALLERS, max(2, 2 * max_rows // rows))
    return [1 << power for power in range(1, most.bit_length())]


async def _read(client: HttpClient, target: str) -> tuple[dict[str, Any], str]:
    """Return the document and how long the server says that its event loop was busy, "" if it does not."""
    answer = await client.request("GET", target, [], deadline=monotonic() + ANSWER_WITHIN_S)
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = None
    if answer.status != 200 or not isinstance(document, dict):
        reason = document.get("error") if isinstance(document, dict) else ""
        raise CommandFailed(
            f"the server answers {answer.status} to {target}{f': {str(reason)[:200]}' if reason else ''}"
        )
    return document, answer.get(LOOP_US) or ""
