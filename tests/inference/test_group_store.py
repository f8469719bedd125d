"""The lease of a build in an object store, and what a server does when the store fails."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from memory_objects import MemoryObjects, MemoryWriter

from oriel_inference.artefacts import group_store
from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed
from oriel_policies.artefacts.refusals import Circumstances, Refusal, RefusalKind
from oriel_wire.objects.errors import ObjectChanged, StoreUnavailable

from ..waiting import until
from .artefact_folders import FILES, key_of_here, other_folder, published
from .artefact_stores import PREFIX, UNDER, Silent, Tasks, wait
from .artefact_stores import group as group_of


@contextmanager
def group(objects: MemoryObjects, writer: MemoryWriter | None = None, **more: float) -> Iterator[GroupStore]:
    with group_of(objects, writer or MemoryWriter(objects), **more) as store:
        yield store


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    yield tasks
    await tasks.end()


def numbers(objects: MemoryObjects, fingerprint: str) -> list[int]:
    prefix = f"{PREFIX}{fingerprint}/lease/"
    return sorted(int(key.removeprefix(prefix)) for key in list(objects.objects) if key.startswith(prefix))


async def test_of_two_servers_one_builds_and_the_other_takes_what_it_sent(tmp_path: Path, tasks: Tasks) -> None:
    objects, key = MemoryObjects(), key_of_here()
    fingerprint, waited = key.fingerprint, asyncio.Event()
    mine, theirs = published(tmp_path / "one", key), other_folder(tmp_path / "other")
    with group(objects) as one, group(objects) as other:
        assert await wait(one, theirs, fingerprint) == await wait(other, theirs, fingerprint) == 1
        lease = one.lease(fingerprint, 1)
        assert await lease.take(tasks.spawn)
        assert not await other.lease(fingerprint, 1).take(tasks.spawn)
        waiting = tasks.spawn(wait(other, theirs, fingerprint, waited.set))
        await waited.wait()
        await lease.send(mine)
        assert await waiting is None
    assert theirs.find(fingerprint) == mine.find(fingerprint)
    assert (theirs.root / fingerprint / "more").read_bytes() == FILES["more"]
    puts = [key for kind, key, *_ in objects.requests if kind == "put"]
    assert puts[-1] == f"engines/{fingerprint}/manifest.json", "so that what has one is whole"
    assert numbers(objects, fingerprint) == [1]


async def test_a_builder_renews_its_lease_and_gives_it_back(tmp_path: Path, tasks: Tasks) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint
    with group(objects, beat_s=0.001) as one, group(objects) as other:
        lease = one.lease(fingerprint, 1)
        assert await lease.take(tasks.spawn)
        await until(lambda: len(numbers(objects, fingerprint)) >= 4)
        known = await other.find(fingerprint)
        assert known.lease is not None and known.lease.holder == one.holder
        await lease.end()
        last = numbers(objects, fingerprint)
        assert last == list(range(1, len(last) + 1)), "no record is ever removed"
        assert await wait(other, other_folder(tmp_path), fingerprint) == last[-1] + 1


async def test_the_lease_of_a_builder_that_is_gone_is_taken_over(tmp_path: Path, tasks: Tasks) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint
    with group(objects) as gone, group(objects, expire_s=0.05) as other:
        assert await gone.lease(fingerprint, 1).take(tasks.spawn)
        assert await wait(other, other_folder(tmp_path), fingerprint) == 2
        assert await other.lease(fingerprint, 2).take(tasks.spawn)
        known = await gone.find(fingerprint)
        assert known.lease is not None and known.lease.holder == other.holder


async def test_a_builder_whose_lease_was_taken_over_stops_to_renew_it(tasks: Tasks) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint
    with group(objects, beat_s=0.05) as slow, group(objects) as other:
        assert await slow.lease(fingerprint, 1).take(tasks.spawn)
        assert await other.lease(fingerprint, (await other.find(fingerprint)).number + 1).take(tasks.spawn)
        await tasks.all[0]
        known = await other.find(fingerprint)
        assert known.lease is not None and known.lease.holder == other.holder


async def test_a_refused_build_is_not_tried_again_under_the_same_circumstances(tmp_path: Path, tasks: Tasks) -> None:
    objects, fingerprint, folder = MemoryObjects(), key_of_here().fingerprint, other_folder(tmp_path)
    refusal = Refusal(kind=RefusalKind.TIMED_OUT, reason="it took longer than 1 s", under=UNDER)
    with group(objects) as one, group(objects) as other:
        lease = one.lease(fingerprint, 1)
        assert await lease.take(tasks.spawn)
        await lease.end(refusal)
        assert await wait(other, folder, fingerprint) == refusal
        longer = Circumstances(seconds=2.0, memory_bytes=0, artefact_bytes=1)
        assert await wait(other, folder, fingerprint, under=longer) == 3


class ForgetfulWriter(MemoryWriter):
    """Stores an object and then breaks the connection, as often as `forgets` says."""

    forgets = 0

    async def put(self, key: str, data: bytes) -> bool:
        stored = await super().put(key, data)
        if self.forgets:
            self.forgets -= 1
            raise StoreUnavailable("the connection broke")
        return stored


async def test_a_record_whose_answer_was_lost_is_found_to_be_ones_own(tmp_path: Path, tasks: Tasks) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint
    writer = ForgetfulWriter(objects)
    with group(objects, writer, beat_s=0.001) as one, group(objects) as other:
        lease = one.lease(fingerprint, 1)
        assert await lease.take(tasks.spawn)
        writer.forgets = 1
        await until(lambda: writer.forgets == 0 and len(numbers(objects, fingerprint)) >= 4)
        await lease.end()
        assert await wait(other, other_folder(tmp_path), fingerprint) == numbers(objects, fingerprint)[-1] + 1


async def test_a_store_that_fails_is_said_so_and_nothing_else_happens(tmp_path: Path, tasks: Tasks) -> None:
    objects, key = MemoryObjects(), key_of_here()
    folder, writer = published(tmp_path / "one", key), MemoryWriter(objects)
    with group(objects, writer) as one:
        writer.denied = True
        with pytest.raises(GroupStoreFailed, match="does not take"):
            await one.lease(key.fingerprint, 1).take(tasks.spawn)
        with pytest.raises(GroupStoreFailed, match="does not take"):
            await one.lease(key.fingerprint, 1).send(folder)
        objects.down = True
        with pytest.raises(GroupStoreFailed, match="the store is down"):
            await wait(one, folder, key.fingerprint)
    assert objects.objects == {} and tasks.all == []


async def test_a_store_that_does_not_answer_is_left_after_a_bounded_time(tmp_path: Path) -> None:
    with group(Silent(), request_s=0.01) as one:
        with pytest.raises(GroupStoreFailed, match=r"did not answer within 0\.01 s"):
            await wait(one, other_folder(tmp_path), key_of_here().fingerprint)


async def test_a_store_that_goes_away_while_another_server_builds_counts_until_the_lease_expires(
    tmp_path: Path, tasks: Tasks
) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint

    def down() -> None:
        objects.down = True

    with group(objects) as one, group(objects, expire_s=0.05) as other:
        assert await one.lease(fingerprint, 1).take(tasks.spawn)
        assert await wait(other, other_folder(tmp_path), fingerprint, down) == 2
        with pytest.raises(GroupStoreFailed):
            await other.lease(fingerprint, 2).take(tasks.spawn)


async def test_a_version_that_left_waits_no_longer(tmp_path: Path, tasks: Tasks) -> None:
    objects, fingerprint = MemoryObjects(), key_of_here().fingerprint
    left = False

    def leave() -> None:
        nonlocal left
        left = True

    with group(objects) as one, group(objects) as other:
        assert await one.lease(fingerprint, 1).take(tasks.spawn)
        folder = other_folder(tmp_path)
        assert await wait(other, folder, fingerprint, leave, left=lambda: left) is None
        assert list(folder.root.iterdir()) == []


async def test_a_fetch_that_breaks_is_tried_again_and_a_damaged_artefact_is_not(tmp_path: Path, tasks: Tasks) -> None:
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one, group(objects) as other:
        lease = one.lease(key.fingerprint, 1)
        assert await lease.take(tasks.spawn)
        await lease.send(published(tmp_path / "one", key))
        folder = other_folder(tmp_path / "other")
        objects.spoils.update(name for name, data in objects.objects.items() if data == b"graph")
        with pytest.raises(GroupStoreFailed, match=r"remove it there: optimised\.onnx is not the file that was built"):
            await wait(other, folder, key.fingerprint)
        assert list(folder.root.iterdir()) == []
        objects.spoils.clear()
        objects.breaks, objects.breaks_after = 3, 0
        with pytest.raises(GroupStoreFailed, match="the connection broke"):
            await wait(other, folder, key.fingerprint)
        objects.breaks = 2
        assert await wait(other, folder, key.fingerprint) is None
        assert folder.find(key.fingerprint) is not None


async def test_an_artefact_with_a_file_that_is_too_large_to_send_stays_here(
    tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_store, "MAX_SENT_FILE_BYTES", 6)
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one, group(objects) as other:
        lease = one.lease(key.fingerprint, 1)
        assert await lease.take(tasks.spawn)
        with pytest.raises(GroupStoreFailed, match="a file of more than 6 bytes"):
            await lease.send(published(tmp_path / "one", key))
        assert await wait(other, other_folder(tmp_path / "other"), key.fingerprint) == 3, "the lease was given back"


async def test_an_artefact_that_is_larger_than_the_folder_may_be_is_not_fetched(tmp_path: Path) -> None:
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one, group(objects) as other:
        await one.send(published(tmp_path / "one", key), key.fingerprint)
        small = ArtefactFolder(tmp_path / "small", max_bytes=11)
        assert small.open() == ""
        with pytest.raises(GroupStoreFailed, match="its 12 bytes are more than this server's folder may have"):
            await wait(other, small, key.fingerprint)
        assert list(small.root.iterdir()) == []
        assert not [key for kind, key, *_ in objects.requests if kind == "read" and "manifest.json" not in str(key)]


@pytest.mark.parametrize(
    "record",
    [b"", b"nonsense", b'{"holder": "x", "refusal": {"kind": "none"}}', b"x" * (1 << 20)],
    ids=["empty", "nonsense", "unknown", "large"],
)
async def test_a_record_that_cannot_be_read_counts_as_one_that_nobody_renews(tmp_path: Path, record: bytes) -> None:
    fingerprint = key_of_here().fingerprint
    objects = MemoryObjects({f"{PREFIX}{fingerprint}/lease/00000001": record})
    with group(objects, expire_s=0.05) as one:
        assert await wait(one, other_folder(tmp_path), fingerprint) == 2


async def test_a_refusal_of_the_store_is_one_line_of_a_log(tmp_path: Path) -> None:
    fingerprint, under = key_of_here().fingerprint, {"seconds": 1, "memory_bytes": 0, "artefact_bytes": 1}
    refusal = {"kind": "not_compiled", "reason": "no\nERROR forged " + "x" * 5000, "under": under}
    record = json.dumps({"holder": "", "refusal": refusal}).encode()
    with group(MemoryObjects({f"{PREFIX}{fingerprint}/lease/00000007": record})) as one:
        found = await wait(one, other_folder(tmp_path), fingerprint)
    assert isinstance(found, Refusal) and found.reason.startswith("no ERROR forged x") and len(found.reason) == 2000


async def test_a_refusal_of_a_build_does_not_hold_for_what_was_sent_afterwards(tmp_path: Path, tasks: Tasks) -> None:
    objects, key = MemoryObjects(), key_of_here()
    with group(objects) as one, group(objects) as other:
        lease = one.lease(key.fingerprint, 1)
        assert await lease.take(tasks.spawn)
        await lease.end(Refusal(kind=RefusalKind.CRASHED, reason="it ended with -11", under=UNDER))
        await one.send(published(tmp_path / "one", key), key.fingerprint)
        assert await wait(other, other_folder(tmp_path / "other"), key.fingerprint) is None


class Contended(MemoryWriter):
    """A store in which another process is always writing the same key."""

    async def put(self, key: str, data: bytes) -> bool:
        raise ObjectChanged(f"{key} is being written by another process")


async def test_a_lease_that_another_server_is_taking_right_now_is_not_taken(tasks: Tasks) -> None:
    objects = MemoryObjects()
    with group(objects, Contended(objects)) as one:
        assert not await one.lease(key_of_here().fingerprint, 1).take(tasks.spawn)
    assert tasks.all == []
