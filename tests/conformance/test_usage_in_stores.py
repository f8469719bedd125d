"""The usage ledger with each kind of store, and with S3 over a network that fails: nothing is lost or counted twice."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from oriel_cli.usage.reading import Usage, read
from oriel_wire.objects.client import location_of
from oriel_wire.usage.files import segments
from oriel_wire.usage.ledger import UsageLedger, open_ledger
from oriel_wire.usage.lines import UsageLine

from ..conftest import Run
from ..waiting import until
from .object_stores import SERVERS, ObjectServer, client_of, object_server, point_to
from .redis_server import Proxy

NOON_S = 1_795_521_600.0  # 2026-11-24T12:00
DAY = ("2026-11-24T00:00", "2026-11-25T00:00")


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, run: Run) -> Iterator[ObjectServer]:
    with object_server(request.param, run) as running:
        yield running


@pytest.fixture
def s3(run: Run) -> Iterator[ObjectServer]:
    with object_server("s3", run) as running:
        yield running


class Recorder:
    """A ledger that ships to the store, with a clock and a use that the test sets."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.now_s = NOON_S
        self.used_ns = 0
        self.ledger: UsageLedger = open_ledger(folder, "inference", self._read, store=location_of(url))
        self.ledger._now_s = lambda: self.now_s

    async def use(self, ns: int) -> None:
        """Record some use in a minute of its own, which seals the minute before."""
        self.now_s += 60.0
        self.used_ns = ns
        await self.ledger.write()

    def kept(self) -> int:
        """Return how many sealed segments are still on this machine."""
        return len(list(segments(self.folder)))

    def _read(self, minute: str) -> list[UsageLine]:
        used, self.used_ns = self.used_ns, 0
        return [UsageLine(minute=minute, unit="inference", tenant="acme", device_ns=used)] if used else []


async def stored(url: str) -> Usage:
    return await asyncio.to_thread(read, url, *DAY)


def used(usage: Usage) -> list[int]:
    """Return the device time of each line, after the check that no line is there twice or missing."""
    assert (usage.repeats, usage.gaps, usage.crashes) == (0, [], 0)
    return [line.device_ns for _, line in usage.lines if line.kind == "use"]


async def test_segments_go_to_the_store_and_are_read_from_it(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    url = f"{server.url}/a/prefix"
    one, two = Recorder(tmp_path, url), Recorder(tmp_path, url)  # two servers of one machine share a folder
    for ns in (1, 4, 16):
        await asyncio.gather(one.use(ns), two.use(2 * ns))
    await asyncio.gather(one.ledger.close(), two.ledger.close())
    assert sorted(used(await stored(url))) == [1, 2, 4, 8, 16, 32] and one.kept() == 0


async def test_a_network_that_fails_in_between_loses_nothing_and_counts_nothing_twice(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(s3.port)
    await proxy.open()
    point_to(monkeypatch, s3, proxy.port)
    recorder = Recorder(tmp_path, s3.url)
    await recorder.use(1)
    await proxy.set("refuse")
    await recorder.use(2)
    await recorder.use(4)
    assert (recorder.kept(), recorder.ledger.counts.ship_failures) == (2, 2)

    await proxy.set("deaf")  # the store takes what it is sent, and its answer is lost
    recorder.now_s += 60.0
    writing = asyncio.create_task(recorder.ledger.write())
    point_to(monkeypatch, s3)
    direct, _ = client_of(s3.url)
    await until(lambda: direct.list("", limit=10))
    await proxy.set("reset")
    await writing
    assert (recorder.kept(), recorder.ledger.counts.ship_failures) == (3, 3), "nobody has confirmed anything yet"
    assert used(await stored(s3.url)) == [1]

    await proxy.set("through")
    await recorder.use(8)
    await recorder.ledger.close()
    assert recorder.kept() == 0 and recorder.ledger.counts.ship_failures == 3
    assert used(await stored(s3.url)) == [1, 2, 4, 8]
    await direct.close()
    await proxy.close()


async def test_what_a_stopped_server_could_not_send_is_sent_by_the_next_one(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(s3.port)
    await proxy.open()
    point_to(monkeypatch, s3, proxy.port)
    await proxy.set("refuse")
    stopped = Recorder(tmp_path, s3.url)
    await stopped.use(1)
    await stopped.ledger.close()
    assert stopped.kept() == 1
    await proxy.set("through")
    following = Recorder(tmp_path, s3.url)
    await following.use(2)
    await following.ledger.close()
    assert following.kept() == 0 and sorted(used(await stored(s3.url))) == [1, 2]
    await proxy.close()
