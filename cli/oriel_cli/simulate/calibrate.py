"""`oriel simulate profile`: measures on a running server how long the batches of a model take.

First one caller at a time sends requests of 1, 2, 4, ... rows. Each answer gives a sample of the whole time, and the
server's statistics give the time of its batch, so the rest of it is the overhead. Then so many callers send requests of
one row that calls always wait: that gives the time of batches under load, how many run at once, and how long instances
rest between two although calls wait, because the server reads requests and writes answers meanwhile. The statistics are
read every WATCH_S then: where one batch has ended in between, its own time is known. The server should have nothing
else to do.
"""

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from oriel_cli.closed_loop import Shot, drive
from oriel_cli.errors import CommandFailed
from oriel_cli.load.bodies import prepare
from oriel_cli.load.scenario import Stream, address
from oriel_cli.simulate.profile import Profile, Size, spread_of
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError

ANSWER_WITHIN_S = 30.0
MOST_CALLERS = 256
MOST_SIZES = 12
WATCH_S = 0.01
OFTEN = 20  # batches of a size that make a mean
ENOUGH = 100  # batches that make a spread


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
        help="per size, and three times that under load (%(default)s)",
    )
    parser.add_argument(
        "--rows", type=int, default=1, metavar="N", help="rows of each request of the load (%(default)s)"
    )
    parser.add_argument("--device-class", default="cpu", metavar="NAME", help="what prices are for (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, write the profile and print what it says."""
    if not 0.05 <= args.seconds <= 600.0:
        raise CommandFailed("--seconds is 0.05 to 600")
    if not args.out.parent.is_dir():
        raise CommandFailed(f"{args.out}: there is no such folder")
    parts, _, _ = address(args.url)
    if parts.scheme != "http":
        raise CommandFailed("--url is the server's HTTP address, http://host:port")
    try:
        profile = asyncio.run(
            measured(args.url, args.model, seconds=args.seconds, rows=args.rows, device_class=args.device_class)
        )
    except UpstreamError as error:
        raise CommandFailed(f"{args.url}: {error}") from error
    try:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(profile)) + b"\n")
    except OSError as refused:
        raise CommandFailed(f"{args.out}: cannot be written ({refused.strerror})") from refused
    print("\n".join(as_text(profile)))
    return 0


def as_text(profile: Profile) -> list[str]:
    """The lines that a person reads."""
    sizes = ", ".join([f"{size.rows}: {size.mean_ms:.3f}" for size in profile.sizes])
    return [
        f"{profile.model}: batches of N rows take (ms) {sizes}",
        f"{profile.instances} at once; beside the batch {profile.overhead_ms:.3f} ms for each answer, and "
        f"{profile.row_ms:.3f} ms for each row",
        f"about {profile.capacity:.0f} rows per second",
    ]


@dataclass(frozen=True, slots=True)
class _Counts:
    """Batches of one size so far: how many, and their seconds in all."""

    batches: int
    seconds: float


async def measured(url: str, model: str, *, seconds: float, rows: int = 1, device_class: str = "cpu") -> Profile:
    """Measure one model. Raises CommandFailed, and UpstreamError if the server cannot be reached."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    client = HttpClient(host=parts.hostname, port=parts.port or 80, max_connections=MOST_CALLERS + 1)
    try:
        config = await _read(client, f"/v2/models/{quote(model, safe='')}/config")
        max_rows = int(config.get("max_batch_size") or 0)
        batching = config.get("dynamic_batching")
        found = batching if isinstance(batching, dict) else {}
        if not 1 <= rows <= max(1, max_rows):
            raise CommandFailed(f"--rows is 1 to {max(1, max_rows)}, the model's max_batch_size")
        alone = {size: await _alone(client, url, model, size, seconds) for size in _sizes(max(rows, max_rows))}
        loaded = await _loaded(client, url, model, rows, max_rows, 3.0 * seconds)
    finally:
        await client.close()
    counts = _merged([each.counts for each in alone.values()], loaded.counts)
    first = alone[min(alone)]
    overhead_s = max(0.0, first.mean_s - first.batch_s)
    return Profile(
        model=model,
        max_rows=max_rows if max_rows and (batching is not None or _batches(loaded.counts, rows)) else 0,
        sizes=[
            Size(rows=size, mean_ms=round(s / n * 1e3, 4), batches=n, spread=_spread(size, alone, loaded))
            for size, (n, s) in counts.items()
        ],
        max_delay_ms=int(found.get("max_queue_delay_microseconds") or 0) / 1e3,
        preferred_rows=[int(each) for each in found.get("preferred_batch_size") or ()],
        instances=loaded.instances,
        overhead_ms=round(max(0.0, overhead_s - loaded.row_s) * 1e3, 4),
        row_ms=round(loaded.row_s * 1e3, 4),
        device_class=device_class,
        measured=datetime.now(UTC).isoformat(timespec="seconds"),
        server=f"{url}, one caller and {loaded.callers}, {seconds:g} s each size",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """One caller. latencies_s: of its answers. counts: rows -> batches meanwhile."""

    latencies_s: Sequence[float]
    counts: Mapping[int, _Counts]

    @property
    def mean_s(self) -> float:
        return sum(self.latencies_s) / len(self.latencies_s)

    @property
    def batch_s(self) -> float:
        return sum([each.seconds for each in self.counts.values()]) / sum(
            [each.batches for each in self.counts.values()]
        )


async def _alone(client: HttpClient, url: str, model: str, rows: int, seconds: float) -> _Alone:
    shot = await _shot(url, model, rows)
    await drive(client, shot, callers=1, duration_s=min(0.2, seconds))  # the first ones are slower
    before = await _counts(client, model)
    figures = await drive(client, shot, callers=1, duration_s=seconds)
    after = await _counts(client, model)
    if figures.others or not figures.latencies_s:
        raise CommandFailed(f"the server did not answer requests of {rows} rows well: {figures.others or 'none ended'}")
    return _Alone(latencies_s=figures.latencies_s, counts=_since(before, after, model))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """So many callers that calls always wait. row_s: the rest of an instance between two batches, for each row.

    single: (rows, seconds) of batches that were seen one by one.
    """

    callers: int
    counts: Mapping[int, _Counts]
    instances: int
    row_s: float
    single: Sequence[tuple[int, float]]


async def _loaded(client: HttpClient, url: str, model: str, rows: int, max_rows: int, seconds: float) -> _Loaded:
    callers = min(MOST_CALLERS, max(8, 4 * (max_rows or 1) // rows))
    shot = await _shot(url, model, rows)
    await drive(client, shot, callers=callers, duration_s=min(1.0, seconds))
    before, began_s = await _counts(client, model), monotonic()
    single: list[tuple[int, float]] = []
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(_watch(client, model, single))
        figures = await drive(client, shot, callers=callers, duration_s=seconds)
        watch.cancel()
    elapsed_s = monotonic() - began_s
    counts = _since(before, await _counts(client, model), model)
    if figures.others:
        raise CommandFailed(f"the server did not answer {callers} callers well: {figures.others}")
    busy_s = sum([each.seconds for each in counts.values()])
    executed = sum([rows * each.batches for rows, each in counts.items()])
    instances = max(1, round(busy_s / elapsed_s))
    return _Loaded(
        callers=callers,
        counts=counts,
        instances=instances,
        row_s=max(0.0, (instances * elapsed_s - busy_s) / executed),
        single=single,
    )


async def _shot(url: str, model: str, rows: int) -> Shot:
    made = await prepare(Stream(url=f"{url.rstrip('/')}/v2/models/{model}/infer", rows=rows, encoding="binary"))
    return Shot(target=made.path, headers=made.fields, body=made.body)


async def _counts(client: HttpClient, model: str) -> dict[int, _Counts]:
    """Read the batches of all versions from the statistics extension, by size."""
    document = await _read(client, f"/v2/models/{quote(model, safe='')}/stats")
    found: dict[int, _Counts] = {}
    for version in document.get("model_stats") or ():
        for each in version.get("batch_stats") or ():
            stages = [each.get(name) or {} for name in ("compute_input", "compute_infer", "compute_output")]
            rows, batches = int(each.get("batch_size") or 0), int(stages[1].get("count") or 0)
            seconds = sum([int(stage.get("ns") or 0) for stage in stages]) / 1e9
            known = found.get(rows, _Counts(0, 0.0))
            found[rows] = _Counts(known.batches + batches, known.seconds + seconds)
    return found


def _since(before: Mapping[int, _Counts], after: Mapping[int, _Counts], model: str) -> dict[int, _Counts]:
    none = _Counts(0, 0.0)
    found = {
        rows: _Counts(each.batches - before.get(rows, none).batches, each.seconds - before.get(rows, none).seconds)
        for rows, each in after.items()
    }
    found = {rows: each for rows, each in found.items() if rows > 0 and each.batches > 0 and each.seconds > 0.0}
    if not found:
        raise CommandFailed(f"the server's statistics of {model!r} do not say how long its batches take")
    return found


def _merged(alone: Sequence[Mapping[int, _Counts]], loaded: Mapping[int, _Counts]) -> dict[int, tuple[int, float]]:
    """Put measurements together: what was seen under load counts where it was seen often enough, because a model is
    slower beside the work that its requests make. Other sizes are raised by as much as the known ones.
    """
    single: dict[int, _Counts] = {}
    for each in alone:
        single.update(each)
    often = {rows: each for rows, each in loaded.items() if each.batches >= OFTEN}
    both = [rows for rows in often if rows in single]
    slower = 1.0
    if both:
        ratios = [
            (often[rows].seconds / often[rows].batches) / (single[rows].seconds / single[rows].batches) for rows in both
        ]
        slower = max(1.0, sum(ratios) / len(ratios))
    found = {rows: (each.batches, each.seconds * slower) for rows, each in single.items()}
    found.update({rows: (each.batches, each.seconds) for rows, each in often.items()})
    return dict(sorted(found.items()))


async def _watch(client: HttpClient, model: str, single: list[tuple[int, float]]) -> None:
    """Read the statistics again and again; note every batch that was the only one since the last time."""
    before = await _counts(client, model)
    while True:
        await asyncio.sleep(WATCH_S)
        after = await _counts(client, model)
        none = _Counts(0, 0.0)
        more = [
            (rows, each.batches - before.get(rows, none).batches, each.seconds - before.get(rows, none).seconds)
            for rows, each in after.items()
        ]
        more = [each for each in more if each[1] > 0]
        if len(more) == 1 and more[0][1] == 1 and more[0][2] > 0.0:
            single.append((more[0][0], more[0][2]))
        before = after


def _spread(rows: int, alone: Mapping[int, _Alone], loaded: _Loaded) -> list[float]:
    """Return the spread of batches of one size: under load, if enough were seen one by one, else that of the answers to
    one caller, whose other time spreads as much.
    """
    single = [seconds for size, seconds in loaded.single if size == rows]
    if len(single) >= ENOUGH:
        return spread_of(single)
    nearest = min([size for size in alone if size >= rows], default=max(alone))
    return spread_of(alone[nearest].latencies_s)


def _sizes(most: int) -> list[int]:
    """1, 2, 4, ... and `most`; at most MOST_SIZES of them."""
    sizes = [1 << power for power in range(most.bit_length())]
    return sorted({*sizes[: MOST_SIZES - 1], most})


def _batches(counts: Mapping[int, _Counts], rows: int) -> bool:
    return any(size > rows for size in counts)


async def _read(client: HttpClient, target: str) -> dict[str, Any]:
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
    return document
