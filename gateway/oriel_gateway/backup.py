"""`oriel state export|import`: what a gateway has counted, from its folder and its Redis, in one file, and back.

The file is a tar archive, compressed, of these parts:
    quotas.ndjson, objectives.ndjson, sums.ndjson    rows, each a JSON array
    usage/v1/...                                     segments of the usage ledger, as they are
    manifest.json                                    see `Manifest`; the last one, so that a cut file has none

Counters only grow. Those of the file that are ahead of the ones here are taken; those that are behind are refused, or
taken too with --replace; those of an earlier day or month than here are over, and left out. Segments never change: one
that is here stays.
"""

import argparse
import asyncio
import fcntl
import os
import re
import socket
import sqlite3
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from oriel_gateway.limits import quota_file
from oriel_gateway.limits.ledger import LedgerLost
from oriel_gateway.observe import budget_file
from oriel_gateway.settings import key_prefix
from oriel_gateway.state_file import LaterForm, StateFile, read_copy
from oriel_policies.bounds.ledger import WINDOW, Ask
from oriel_wire.distribution import installed_version
from oriel_wire.errors import StartFailed
from oriel_wire.process.shared_settings import state_folder
from oriel_wire.usage.files import segments, write_segment

FORM: Final = 1
MANIFEST: Final = "manifest.json"
MAX_PART_BYTES: Final = 256 << 20
BATCH: Final = 500  # quotas or sums that are sent to Redis at a time
_SEGMENT = re.compile(r"usage/v1/(open|\d{4}-\d\d-\d\d/\d\d)/[A-Za-z0-9]{1,32}-\d{1,12}\.ndjson(\.gz)?")
Row = tuple[Any, ...]
Counters = dict[Row, Row]  # the columns that name a counter, and those that grow


class Part(NamedTuple):
    """Describes the rows of a part.

    kind: the type of a row.
    names: the number of columns that name a counter; those after them grow.
    file, table, schema, put: the place in a state folder, and the statement that writes a row there.
    """

    kind: Any
    names: int
    file: str = ""
    table: str = ""
    schema: str = ""
    put: str = ""


QUOTAS, OBJECTIVES, SUMS = "quotas.ndjson", "objectives.ndjson", "sums.ndjson"
_PUT = "INSERT INTO quotas VALUES (?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET number = excluded.number, "
_PUT += "used = excluded.used WHERE number <= excluded.number"
PARTS: Final = {
    QUOTAS: Part(tuple[str, str, str, int, int], 4, "quotas.db", "quotas", quota_file.SCHEMA, _PUT),
    OBJECTIVES: Part(
        tuple[str, str, str, int, int, int, int], 5, budget_file.NAME, "slots", budget_file.SCHEMA, budget_file.UPSERT
    ),
    SUMS: Part(tuple[str, str, int], 2),  # month, name, value: what gateways share in Redis of use and objectives
}


class Manifest(msgspec.Struct, kw_only=True):
    """Describes the file.

    oriel: the version that wrote it. instance: the machine's name. at: when, in UTC. parts: name -> SHA-256.
    """

    form: int = FORM
    oriel: str = ""
    instance: str = ""
    at: str = ""
    parts: dict[str, str] = {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    export = actions.add_parser("export", help="write quotas, objectives and the usage ledger into one file")
    load = actions.add_parser("import", help="read such a file into the state of a gateway that is stopped")
    for each in (export, load):
        each.add_argument("file", type=Path, metavar="FILE", help="a .tar.gz; for export - is standard output")
        each.add_argument(
            "--state", type=Path, metavar="DIR", help="a state folder (default: ORIEL_STATE; without a Redis yours)"
        )
        each.add_argument("--limiter", metavar="URL", help="the Redis that has the quotas (default: ORIEL_LIMITER)")
        each.add_argument("--limiter-ca", type=Path, metavar="FILE", help="who signs for a rediss:// limiter, PEM")
        each.add_argument("--limiter-prefix", type=key_prefix, default="oriel:", metavar="TEXT", help="(%(default)s)")
    load.add_argument("--replace", action="store_true", help="also set counters back that are ahead of the file's")


def run(args: argparse.Namespace) -> int:
    """Run the action. Raises StartFailed."""
    args.limiter = (args.limiter or os.environ.get("ORIEL_LIMITER", "")).removeprefix("embedded")
    if args.limiter and not args.limiter.startswith(("redis://", "rediss://")):
        raise StartFailed("the limiter has to be redis://HOST:PORT/DB or rediss://...: pass --limiter URL")
    if args.state is None and (not args.limiter or "ORIEL_STATE" in os.environ):
        args.state = state_folder()
    try:
        report = _export(args) if args.action == "export" else _import(args)
    except (LaterForm, LedgerLost, msgspec.MsgspecError, ValueError, sqlite3.Error, OSError) as error:
        raise StartFailed(f"the state cannot be {args.action}ed: {error}") from error
    sys.stderr.write(f"{args.action}ed {report}\n")
    return 0


def _export(args: argparse.Namespace) -> str:
    here = asyncio.run(_redis(args, {}, {})) if args.limiter else {}
    for name, part in PARTS.items():
        if name not in here and args.state and part.file and (path := args.state / part.file).exists():
            here[name] = _named(part, read_copy(path, part.table))
    if not here and next(segments(args.state, with_open=True), None) is None:
        raise StartFailed(f"there is nothing to export in {args.state}: pass --state DIR or --limiter URL")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    manifest = Manifest(oriel=installed_version(), instance=socket.gethostname(), at=at)
    growing = 0
    shown = args.file == Path("-")
    with (
        open(
            1 if shown else args.file, "xb", closefd=not shown, opener=lambda name, how: os.open(name, how, 0o600)
        ) as out,
        tarfile.open(fileobj=out, mode="w|gz") as tar,
    ):
        for name, rows in here.items():
            lines = [msgspec.json.encode(key + counts) + b"\n" for key, counts in rows.items()]
            _add(tar, manifest, name, b"".join(lines))
        for name, data in _settled(args.state) if args.state else ():
            if data is None:
                growing += 1
            else:
                _add(tar, manifest, name, data)
        _add(tar, manifest, MANIFEST, msgspec.json.encode(manifest))
    left_out = f"; not in it: {growing} segments to which servers still write" * bool(growing)
    return f"{_counted(here)}{len(manifest.parts) - len(here) - 1} segments of usage{left_out}"


def _import(args: argparse.Namespace) -> str:
    manifest = _check(args.file)
    rows: dict[str, Counters] = {}
    left_out = 0  # parts for a folder, where none is named
    for name, data in _read(args.file):
        if args.state is None and name not in (QUOTAS, SUMS, MANIFEST):
            left_out += 1
        elif name in PARTS and (name != SUMS or args.limiter):
            rows[name] = _named(PARTS[name], msgspec.json.Decoder(PARTS[name].kind).decode_lines(data))
    here = asyncio.run(_redis(args, rows, {})) if args.limiter else {}
    with ExitStack() as stack:
        files = {name: stack.enter_context(_opened(args.state, PARTS[name])) for name in rows.keys() - here.keys()}
        for name, database in files.items():
            here[name] = _named(PARTS[name], database.execute(f"SELECT * FROM {PARTS[name].table}"))
        ahead = [
            key
            for name in rows
            if name != SUMS
            for key, counts in rows[name].items()
            if here[name].get(key, ()) > counts
        ]
        if ahead and not args.replace:
            raise StartFailed(
                f"nothing was imported: {len(ahead)} counters here are ahead of the file of {manifest.at}, such as "
                f"{'/'.join(map(str, ahead[0]))[:200]}: --replace sets them back"
            )
        known, written = {name for name, _ in segments(args.state, with_open=True)} if args.state else set(), 0
        for name, data in _read(args.file) if args.state else ():
            if _SEGMENT.fullmatch(name) and Path(name).name.partition(".")[0] not in known:
                write_segment(args.state / name, data)
                written += 1
        for name, database in files.items():
            database.executemany(PARTS[name].put, [key + counts for key, counts in rows[name].items()])
        if args.limiter:
            asyncio.run(_redis(args, rows, here))
    skipped = f"; left out: objectives or segments of usage, {left_out} parts (--state DIR takes them)" * bool(left_out)
    return f"{_counted(rows)}{written} segments of usage, of {manifest.instance} at {manifest.at}{skipped}"


@contextmanager
def _opened(folder: Path, part: Part) -> Iterator[sqlite3.Connection]:
    """Open a state file for one transaction, which an error undoes. Raises StartFailed if the file cannot be used."""
    file = StateFile(folder / part.file, part.schema, holds=f"{part.table} of {folder}")
    file.open(lambda database: None)
    if file.database is None:
        raise StartFailed(f"nothing was imported: {folder / part.file} cannot be used (see above): stop its gateway")
    with closing(file):
        file.database.execute("BEGIN IMMEDIATE")
        yield file.database
        file.database.execute("COMMIT")


async def _redis(
    args: argparse.Namespace, rows: Mapping[str, Counters], here: Mapping[str, Counters]
) -> dict[str, Counters]:
    """Return the quotas and sums in Redis; if `here` says what they are, write those of `rows` first."""
    from oriel_gateway.limits.redis_ledger import RedisLedger

    holder, password = f"state-{uuid4().hex[:12]}", os.environ.get("ORIEL_LIMITER_PASSWORD")
    ledger = RedisLedger(
        args.limiter, holder=holder, prefix=args.limiter_prefix, password=password, authorities=args.limiter_ca
    )
    today, sums = datetime.now(UTC), rows.get(SUMS, {})
    found: Counters = {}
    try:
        asks = [_ask(key, counts[0], here[QUOTAS]) for key, counts in rows.get(QUOTAS, {}).items() if here]
        for at in range(0, len(asks), BATCH):
            await ledger.ask(asks[at : at + BATCH])
        for month in (f"{today.replace(day=1) - timedelta(days=1):%Y-%m}", f"{today:%Y-%m}"):
            since = sums.get((month, "since"), (int(today.timestamp()),))[0]
            more = {
                key[1]: value - here[SUMS].get(key, (0,))[0]
                for key, (value,) in sums.items()
                if here and key[0] == month
            }
            added = [(name, value) for name, value in more.items() if value > 0 and name != "since"]
            for number, at in enumerate(range(0, len(added), BATCH), start=1):
                await ledger.add_use(month, number, dict(added[at : at + BATCH]), "", since)
            stored, _ = await ledger.add_use(month, 0, {}, "", since)
            found |= {(month, name): (value,) for name, value in sorted(stored.items()) if not name.startswith("#")}
        return {QUOTAS: _named(PARTS[QUOTAS], await ledger.quotas()), SUMS: found}
    finally:
        await ledger.close()


def _ask(key: Row, used: int, here: Counters) -> tuple[str, list[Ask]]:
    """Report the use of a quota, of which a ledger takes the larger one, and what is to be taken off that."""
    tenant, bound, period, number = key
    less = min(0, used - here.get(key, (0,))[0])
    ask = Ask(key=bound, kind=WINDOW, limit=1e15, step=float(period == "month"), number=number, used=used, debt=less)
    return tenant, [ask]


def _read(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of each part, and of the manifest. Raises StartFailed."""
    try:
        with tarfile.open(path, "r|gz") as tar:
            for member in tar:
                if not member.isreg() or member.size > MAX_PART_BYTES:
                    raise tarfile.TarError(f"{member.name[:80]} is no part of such a file")
                yield member.name, tar.extractfile(member).read()  # type: ignore[union-attr]
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise StartFailed(f"{path} cannot be read, or is damaged, and nothing was imported: {error}") from error


def _check(path: Path) -> Manifest:
    """Read the whole file, compare it with its manifest, and return that. Raises StartFailed."""
    sums, manifest = {}, Manifest()
    for name, data in _read(path):
        if name == MANIFEST:
            manifest = msgspec.json.decode(data, type=Manifest)
        else:
            sums[name] = sha256(data).hexdigest()
    if manifest.form > FORM:
        raise StartFailed(
            f"{path} is of form {manifest.form}, and this version of Oriel reads form {FORM}: import it with Oriel "
            f"{manifest.oriel[:40]}, which wrote it"
        )
    bad = [name for name in sums.keys() | manifest.parts.keys() if sums.get(name) != manifest.parts.get(name)]
    bad += [name for name in sums if name not in PARTS and not _SEGMENT.fullmatch(name)]
    if bad or not manifest.oriel:
        raise StartFailed(f"{path} is damaged, and nothing was imported: {min(bad, default=MANIFEST)[:80]}")
    return manifest


def _add(tar: tarfile.TarFile, manifest: Manifest, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    tar.addfile(info, BytesIO(data))
    manifest.parts[name] = sha256(data).hexdigest()


def _named(part: Part, rows: Iterable[Row]) -> Counters:
    return {row[: part.names]: row[part.names :] for row in rows}


def _counted(rows: Mapping[str, Counters]) -> str:
    return "".join(f"{len(found)} {name.partition('.')[0]}, " for name, found in rows.items())


def _settled(folder: Path) -> Iterator[tuple[str, bytes | None]]:
    """Yield (path below the folder, bytes) of every segment; None of one to which a server still writes."""
    for _, path in segments(folder, with_open=True):
        data = None
        # An open one without a lock was left by a crash; an empty one is of a server that is about to lock it.
        with suppress(FileNotFoundError, BlockingIOError), path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if path.suffix != ".gz" and size:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            data = file.read(size) or None
        yield path.relative_to(folder).as_posix(), data
