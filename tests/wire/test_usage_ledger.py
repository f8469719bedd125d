"""The usage ledger: on the disk each second, sealed each minute, whole after a crash, nothing twice."""

import asyncio
import errno
import gzip
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from oriel_wire.objects.errors import StoreUnavailable
from oriel_wire.usage.files import UsageFiles, minute_of, read_segment, segments
from oriel_wire.usage.ledger import Shipping, UsageLedger
from oriel_wire.usage.lines import UsageLine, decode_line, encode_lines, merge, missing, parse_segment
from oriel_wire.usage.metrics import ledger_metrics

MINUTE, NEXT = "2026-11-24T17:05", "2026-11-24T18:00"


def use(ns: int, tenant: str = "acme", minute: str = MINUTE) -> UsageLine:
    return UsageLine(minute=minute, unit="inference", tenant=tenant, device="host", device_ns=ns, requests=1)


def everything(folder: Path, *, with_open: bool = False) -> list[tuple[str, UsageLine]]:
    return [
        (f"{name}-{number}", line)
        for name, path in segments(folder, with_open=with_open)
        for number, line in read_segment(path)
        if line is not None
    ]


def test_a_minute_is_on_the_disk_before_it_is_sealed_and_added_up_when_it_is(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path, "a1")
    files.append(MINUTE, [use(5)])
    files.append(MINUTE, [use(7), use(1, "bolt")])
    assert [line.device_ns for _, line in everything(tmp_path, with_open=True)] == [5, 7, 1]
    assert everything(tmp_path) == []
    files.append(NEXT, [use(9, minute=NEXT)])
    sealed = everything(tmp_path)
    assert [(each, line.tenant, line.device_ns, line.requests) for each, line in sealed] == [
        ("a1-00000001-1", "acme", 12, 2),
        ("a1-00000001-2", "bolt", 1, 1),
    ]
    assert (tmp_path / "usage/v1/2026-11-24/17/a1-00000001.ndjson.gz").is_file()
    files.seal()
    assert sum(line.device_ns for _, line in everything(tmp_path, with_open=True)) == 22
    assert list((tmp_path / "usage/v1/open").iterdir()) == []


CRASHES = """
    import sys
    from pathlib import Path
    from oriel_wire.usage.files import UsageFiles
    from oriel_wire.usage.lines import UsageLine
    files = UsageFiles(Path(sys.argv[1]), "dead")
    for number in range(1, 4):
        line = UsageLine(minute="2026-11-24T17:05", unit="logic", tenant="acme", cpu_ns=number)
        files.append(line.minute, [line])
    print("written", flush=True)
    sys.stdin.read()
"""


def test_a_killed_server_loses_nothing_that_was_written_and_its_crash_is_reported(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CRASHES), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"written\n"
    alive = UsageFiles(tmp_path, "alive")
    assert alive.recovered == []  # it is still running
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    (open_one,) = (tmp_path / "usage/v1/open").glob("*.ndjson")
    with open_one.open("ab") as file:
        file.write(b'{"minute":"2026-11-24T17:05","unit":"log')  # the write that the crash cut off
    after = UsageFiles(tmp_path, "after")
    assert after.recovered == ["dead-00000001"]
    found = everything(tmp_path)
    assert [(line.kind, line.cpu_ns) for _, line in found] == [("use", 6), ("crash", 0)]
    assert UsageFiles(tmp_path, "again").recovered == []
    assert everything(tmp_path) == found


def crash(files: UsageFiles) -> None:
    """Let go of the open segment as the end of a process does."""
    assert files._file is not None
    files._file.close()


def left_for(path: Path, seconds: float) -> None:
    """Make a file as old as if nothing had been written to it for some seconds."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("first", [[use(5)], []])
def test_the_time_since_a_crashed_server_wrote_last_is_told(
    tmp_path: Path, first: list[UsageLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full for six seconds before the crash, and "its last second" was said to be lost."""
    files = UsageFiles(tmp_path, "dead")
    files.append(MINUTE, first)

    def full(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            return
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    if first:
        (open_one,) = (tmp_path / "usage/v1/open").glob("*.ndjson")
        left_for(open_one, 60.0)
    with pytest.raises(OSError, match="space"):
        files.append(MINUTE, [use(7)])
    monkeypatch.undo()
    (open_one,) = (tmp_path / "usage/v1/open").glob("*.ndjson")
    if not first:
        left_for(open_one, 60.0)
    crash(files)
    after = UsageFiles(tmp_path, "after")
    assert 60.0 <= after.lost_s < 3600.0 and after.recovered == ["dead-00000001"]
    (told,) = [line for _, line in everything(tmp_path) if line.kind == "crash"]
    assert 60 * 10**9 <= told.wall_ns == int(after.lost_s * 1e9)
    assert sum(line.device_ns for _, line in everything(tmp_path)) == sum(line.device_ns for line in first)


def test_a_server_that_is_idle_before_its_crash_loses_nothing_of_that_time(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path, "dead")
    files.append(MINUTE, [use(5)])
    (open_one,) = (tmp_path / "usage/v1/open").glob("*.ndjson")
    left_for(open_one, 86_400.0)
    files.append(MINUTE, [])
    crash(files)
    assert UsageFiles(tmp_path, "after").lost_s < 3600.0


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_only_their_own_user_reads_the_files(tmp_path: Path, umask: int) -> None:
    """They had the modes that the umask left, also where the folder was there before."""
    before = os.umask(umask)
    try:
        files = UsageFiles(tmp_path, "a1")
        files.append(MINUTE, [use(5)])
        files.append(NEXT, [use(6)])
    finally:
        os.umask(before)
    found = [path for path in (tmp_path / "usage").rglob("*") if path.is_file()]
    assert len(found) == 2 and {path.stat().st_mode & 0o777 for path in found} == {0o600}
    files.seal()


def test_a_crash_between_sealing_and_removing_the_open_segment_counts_nothing_twice(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path, "a1")
    files.append(MINUTE, [use(5)])
    open_one = tmp_path / "usage/v1/open/a1-00000001.ndjson"
    data = open_one.read_bytes()
    files.seal()
    open_one.write_bytes(data)
    assert sum(line.device_ns for _, line in everything(tmp_path, with_open=True)) == 5
    UsageFiles(tmp_path, "a2")
    assert sum(line.device_ns for _, line in everything(tmp_path, with_open=True)) == 5


def test_the_oldest_segments_go_when_the_folder_is_full(tmp_path: Path) -> None:
    files = UsageFiles(tmp_path, "a1")
    for minute in (MINUTE, NEXT):
        files.append(minute, [use(1, minute=minute)])
    files.seal()
    newest = files.sealed_segments()[-1]
    assert files.prune(newest.stat().st_size) == 1
    assert files.sealed_segments() == [newest]


def test_lines_read_back_as_written_and_rubbish_is_none() -> None:
    line = UsageLine(minute=MINUTE, unit="gateway", tenant="ä\n", estimated=True, bytes_out=2**62)
    assert decode_line(encode_lines([line]).rstrip(b"\n")) == line
    for bad in (b"", b"{", b"[]", b'{"minute":1,"unit":"x"}', b"\xff", b"x" * 5000):
        assert decode_line(bad) is None
    assert minute_of(1763996700.0) == "2025-11-24T15:05"


def test_missing_segments_are_named() -> None:
    assert missing({"a": {3, 5, 6, 8}, "b": {1}}) == ["a-00000004", "a-00000007"]
    assert parse_segment("a1-00000007") == ("a1", 7)
    assert parse_segment("../x-1") is None


def test_of_the_open_device_time_the_last_counts() -> None:
    first = UsageLine(kind="device", minute=MINUTE, unit="inference", device="host", busy_ns=1, wall_ns=10, open_ns=1)
    second = UsageLine(kind="device", minute=MINUTE, unit="inference", device="host", busy_ns=2, wall_ns=10, open_ns=0)
    (both,) = merge([first, second])
    assert (both.busy_ns, both.wall_ns, both.open_ns) == (3, 20, 0)


class Store:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.broken = False

    async def put(self, key: str, data: bytes) -> bool:
        if self.broken:
            raise StoreUnavailable("the store cannot be reached")
        return self.objects.setdefault(key, data) is data

    async def close(self) -> None:
        pass


class Server:
    """A ledger whose clock and use the test sets."""

    def __init__(self, folder: Path, store: Store | None = None, **more: int) -> None:
        self.now_s = 1763996700.0
        self.used_ns = 0
        self.ledger = UsageLedger(
            folder, "inference", self.read, ship_to=store and Shipping(store, "p/"), now_s=lambda: self.now_s, **more
        )

    def read(self, minute: str) -> list[UsageLine]:
        used, self.used_ns = self.used_ns, 0
        return [use(used, minute=minute)] if used else []


async def test_sealed_segments_are_deleted_once_the_store_has_confirmed_them(tmp_path: Path) -> None:
    store = Store()
    server = Server(tmp_path, store)
    server.used_ns = 5
    await server.ledger.write()
    server.now_s += 60
    server.used_ns = 6
    store.broken = True
    await server.ledger.write()
    assert (server.ledger.counts.ship_failures, len(everything(tmp_path))) == (1, 1)
    store.broken = False
    await server.ledger.write()
    assert store.objects == {}  # not tried again at once
    server.now_s += 11
    await server.ledger.write()
    ((key, data),) = store.objects.items()
    assert key.startswith("p/usage/v1/2025-11-24/15/") and b'"device_ns":5' in gzip.decompress(data)
    assert everything(tmp_path) == []
    await server.ledger.close()
    assert len(store.objects) == 2 and b'"kind":"stop"' in gzip.decompress(list(store.objects.values())[1])


async def test_a_folder_that_cannot_be_written_delays_lines_and_loses_none(tmp_path: Path) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where a folder should be")
    server = Server(blocked)
    server.used_ns = 5
    await server.ledger.write()
    assert server.ledger.counts.write_failures == 1 and str(blocked) in server.ledger.counts.write_error
    blocked.unlink()
    server.used_ns = 6
    await server.ledger.write()
    assert server.ledger.counts.write_error == ""
    assert sum(line.device_ns for _, line in everything(blocked, with_open=True)) == 11
    await server.ledger.close()


async def test_lines_beyond_the_bound_are_lost_counted_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "state"
    blocked.write_text("a file where a folder should be")
    server = Server(blocked, max_held=2)
    for used_ns in (1, 2, 4, 8):
        server.used_ns = used_ns
        await server.ledger.write()
        server.now_s += 60
    assert (server.ledger.counts.write_failures, server.ledger.counts.lost_lines) == (4, 2)
    assert [record.getMessage()[:13] for record in caplog.records].count("usage is lost") == 1
    blocked.unlink()
    await server.ledger.write()
    assert [line.device_ns for _, line in everything(blocked, with_open=True)] == [4, 8]
    families = {family.name: family for family in ledger_metrics(server.ledger.counts)}
    samples = [*families["oriel_usage_ledger_failures"].samples, *families["oriel_usage_ledger_lost"].samples]
    found = {(sample.name, sample.labels["what"]): sample.value for sample in samples}
    assert found["oriel_usage_ledger_failures_total", "write"] == 4
    assert found["oriel_usage_ledger_lost_total", "lines"] == 2
    await server.ledger.close()


async def test_a_running_ledger_says_that_it_started_and_stopped(tmp_path: Path) -> None:
    server = Server(tmp_path)
    running = asyncio.create_task(server.ledger.run())
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await server.ledger.close()
    assert [line.kind for _, line in everything(tmp_path)] == ["start", "stop"]


def test_a_segment_that_cannot_be_begun_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = UsageFiles(tmp_path, "a1")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(3):
        with pytest.raises(OSError, match="space"):
            files.append(MINUTE, [use(7)])
    assert list((tmp_path / "usage/v1/open").iterdir()) == []
