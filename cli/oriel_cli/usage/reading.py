"""Reads the lines of a period from the usage ledger: a folder, or an object store."""

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_wire.objects.client import location_of
from oriel_wire.objects.errors import BadStoreUrl, ClientUnusable, ObjectStoreError
from oriel_wire.objects.opening import open_client
from oriel_wire.usage.files import ROOT, read_segment, segments
from oriel_wire.usage.lines import UsageLine, missing, parse_segment

MAX_OBJECTS = 1_000_000
MAX_LINES = 20_000_000
MAX_OBJECT_BYTES = 64 << 20


@dataclass(slots=True)
class Usage:
    """The lines of a period. lines: (id, line), in the order of their minutes.

    repeats: lines that were left out because their identity came before. gaps: segments that are missing between
    others of their instance. unread: lines that this version cannot read. later: folders of ledgers of later versions.
    crashes: servers that ended without a stop. lost_ns: nanoseconds for which, at most, what
    they used is missing.
    """

    lines: list[tuple[str, UsageLine]] = field(default_factory=list)
    repeats: int = 0
    gaps: list[str] = field(default_factory=list)
    unread: int = 0
    later: list[str] = field(default_factory=list)
    crashes: int = 0
    lost_ns: int = 0


def read(where: str, begin: str, end: str, *, with_open: bool = False) -> Usage:
    """Read the lines of the minutes from `begin` until before `end`.

    where: a state folder, or the URL of an object store. Raises CommandFailed.
    """
    if "://" not in where:
        folder = Path(where)
        if not folder.joinpath(*ROOT).is_dir():
            raise CommandFailed(f"no usage is recorded in {where}: pass --state DIR or the URL of the store")
        usage = collect(_of_folder(folder, begin, end, with_open=with_open), begin, end)
        usage.later = sorted(f"{ROOT[0]}/{each.name}" for each in folder.glob(f"{ROOT[0]}/v*") if each.name != ROOT[1])
        return usage
    with tempfile.TemporaryDirectory(prefix="oriel-usage-") as copy:
        try:
            asyncio.run(_fetch(where, Path(copy), begin, end))
        except (BadStoreUrl, ClientUnusable, ObjectStoreError) as error:
            raise CommandFailed(str(error)) from error
        return collect(_of_folder(Path(copy), begin, end, with_open=False), begin, end)


def collect(found: Iterator[tuple[str, int, UsageLine | None]], begin: str, end: str) -> Usage:
    """Sort out lines of segments: (segment, number, line). Repeated ones are dropped."""
    usage = Usage()
    seen: set[tuple[str, int]] = set()
    sequences: dict[str, set[int]] = {}
    for segment, number, line in found:
        if (segment, number) in seen:
            usage.repeats += 1
            continue
        seen.add((segment, number))
        parsed = parse_segment(segment)
        if parsed is not None:
            sequences.setdefault(parsed[0], set()).add(parsed[1])
        if line is None:
            usage.unread += 1
            continue
        if not begin <= line.minute < end:
            continue
        if len(usage.lines) >= MAX_LINES:
            raise CommandFailed(f"more than {MAX_LINES} lines: choose a shorter period")
        if line.kind == "crash":
            usage.crashes += 1
            usage.lost_ns += line.wall_ns or 10**9
        usage.lines.append((f"{segment}-{number}", line))
    usage.gaps = missing(sequences)
    usage.lines.sort(key=lambda each: each[1].minute)
    return usage


def moment(text: str) -> str:
    """Return a time of the command line as a minute of the ledger: a day, or a day and a time, in UTC. Raises
    CommandFailed.
    """
    try:
        given = datetime.fromisoformat(text)
    except ValueError as error:
        raise CommandFailed(f"{text[:40]!r} is no time: write 2026-11-24 or 2026-11-24T17:05") from error
    given = given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)
    return given.strftime("%Y-%m-%dT%H:%M")


def _of_folder(folder: Path, begin: str, end: str, *, with_open: bool) -> Iterator[tuple[str, int, UsageLine | None]]:
    for name, path in segments(folder, with_open=with_open):
        if path.suffix == ".gz" and not _may_hold(path, begin, end):
            continue
        try:
            for number, line in read_segment(path):
                yield name, number, line
        except FileNotFoundError:
            continue  # it was sealed or shipped meanwhile
        except (OSError, EOFError) as error:
            raise CommandFailed(f"{path} cannot be read: {error}") from error


def _may_hold(path: Path, begin: str, end: str) -> bool:
    hour = f"{path.parts[-3]}T{path.parts[-2]}"
    return begin[:13] <= hour <= end[:13]


async def _fetch(url: str, copy: Path, begin: str, end: str) -> None:
    """Copy the segments of a period to a folder of the same form."""
    location = location_of(url)
    client = open_client(location)
    try:
        prefix = location.prefix + "/".join(ROOT) + "/"
        for stored in await client.list(prefix, limit=MAX_OBJECTS):
            target = copy.joinpath(*ROOT) / stored.key.removeprefix(prefix)
            parts = stored.key.removeprefix(prefix).split("/")
            if len(parts) != 3 or not _may_hold(target, begin, end) or ".." in parts:
                continue
            if stored.size > MAX_OBJECT_BYTES:
                raise CommandFailed(f"{stored.key} is larger than a segment can be")
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as file:
                if stored.size:
                    async for chunk in client.read(stored.key, start=0, end=stored.size, etag=stored.etag):
                        file.write(chunk)
    finally:
        await client.close()
