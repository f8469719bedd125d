"""A remote repository as a store: what is fetched, resumed, checked, refused, kept and thrown away."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import memory_objects
import pytest
from memory_objects import MemoryObjects

from oriel_inference.errors import LoadFailed, ObjectChanged, StoreUnavailable, TooManyObjects
from oriel_inference.repository.scan import Repository
from oriel_inference.stores import cache as caches
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.remote import RemoteStore, StoreLimits
from oriel_inference.stores.snapshot import snapshot
from oriel_inference.stores.source import OUTAGE_S, Corrupt

from .remote_stores import Clock, remote

LARGE = os.urandom((1 << 20) + 1000)
KEY = "repo/m/1/model.onnx"


@pytest.fixture
def objects() -> MemoryObjects:
    return MemoryObjects({KEY: LARGE, "repo/m/config.pbtxt": b"max_batch_size: 4"})


def fetched(store: RemoteStore, version: int = 1) -> bytes:
    store.models()
    return store.artifact("m", version, "model.onnx").read_bytes()


def reads(objects: MemoryObjects) -> list[tuple[object, ...]]:
    return [each for each in objects.requests if each[0] == "read"]


# Fetching ----------------------------------------------------------------------------------------------------------


def test_what_is_in_the_cache_is_not_asked_for_again(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path) as store:
        assert fetched(store) == LARGE and store.text("m", "config.pbtxt") == "max_batch_size: 4"
        asked = len(objects.requests)
        assert store.artifact("m", 1, "model.onnx").read_bytes() == LARGE
        assert store.text("m", "config.pbtxt") and len(objects.requests) == asked
    with remote(objects, tmp_path) as store:
        assert fetched(store) == LARGE and store.text("m", "config.pbtxt")
    assert objects.requests[asked:] == [("list", "repo/")] and objects.closed


def test_a_connection_that_breaks_is_resumed_where_it_broke(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.breaks, objects.breaks_after = 2, 3 << 16
    with remote(objects, tmp_path) as store:
        assert fetched(store) == LARGE
        assert store.counts.read_bytes == len(LARGE)
    starts = [each[2] for each in reads(objects)]
    assert starts == [0, 3 << 16, 6 << 16]


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.append(sys.argv[3])
from memory_objects import MemoryObjects
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.remote import RemoteStore
from oriel_inference.stores.source import Source

folder, file = Path(sys.argv[1]), Path(sys.argv[2])

class Stops(MemoryObjects):
    async def read(self, key, **part):
        left = 1 << 19
        async for piece in super().read(key, **part):
            yield piece
            left -= len(piece)
            if not left:
                print("half a MiB is there", flush=True)
                await asyncio.Event().wait()

source = Source(Stops({"repo/m/1/model.onnx": file.read_bytes()}))
store = RemoteStore(source, "repo/", Cache(folder, max_bytes=1 << 30), shown="")
store.models()
store.artifact("m", 1, "model.onnx")
"""


@pytest.mark.parametrize("damaged", [False, True])
def test_a_process_that_was_killed_leaves_its_bytes_to_the_next(
    objects: MemoryObjects, tmp_path: Path, damaged: bool
) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cache = tmp_path / "cache"
    command = [sys.executable, "-c", KILLED, str(cache), str(tmp_path / "large")]
    with subprocess.Popen(
        [*command, str(Path(memory_objects.__file__).parent)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "half a MiB is there\n"
        process.kill()
    assert list((cache / "versions").iterdir()) == []
    (partial,) = (cache / "partial").iterdir()
    if damaged:
        with (partial / "files/model.onnx").open("r+b") as file:
            file.write(b"a disk that forgets")
    with remote(objects, cache) as store:
        assert fetched(store) == LARGE
        assert store.counts.failures["corrupt"] == damaged
    whole = [(0, len(LARGE))] if damaged else []
    assert [each[2:] for each in reads(objects)] == [(1 << 19, len(LARGE)), *whole]


def test_an_object_that_is_written_anew_while_it_is_read_is_refused(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path) as store:
        store.models()
        objects.put(KEY, b"other bytes")
        with pytest.raises(ObjectChanged, match="m/1/model.onnx was overwritten since"):
            store.artifact("m", 1, "model.onnx")
        objects.put("repo/m/config.pbtxt", b"other")
        with pytest.raises(ObjectChanged):
            store.text("m", "config.pbtxt")
        assert fetched(store) == b"other bytes" and store.text("m", "config.pbtxt") == "other"


def test_bytes_that_change_on_their_way_are_never_published(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.spoils |= {KEY, "repo/m/config.pbtxt"}
    with remote(objects, tmp_path) as store:
        with pytest.raises(Corrupt, match="m/1/model.onnx does not match the md5 that the object store reports"):
            fetched(store)
        with pytest.raises(Corrupt, match="config.pbtxt does not match the md5"):
            store.text("m", "config.pbtxt")
        assert list((tmp_path / "versions").iterdir()) == [] and store.counts.failures["corrupt"] == 4
        before = store.fingerprint("m")
        objects.spoils.clear()
        store.models()
        # Nothing was written anew, and yet there is a reason to try again.
        assert store.fingerprint("m").versions[1] != before.versions[1]
        assert fetched(store) == LARGE and store.text("m", "config.pbtxt") == "max_batch_size: 4"


def test_without_checksums_of_the_store_the_version_may_bring_its_own(tmp_path: Path) -> None:
    sums = f"{sha256(LARGE).hexdigest()} *model.onnx\n{sha256(b'w').hexdigest()}  ./parts/w.bin\n"
    objects = MemoryObjects({KEY: LARGE, "repo/m/1/SHA256SUMS": sums.encode()}, checksums=False)
    with remote(objects, tmp_path) as store:
        with pytest.raises(LoadFailed, match="m/1 is incomplete: parts/w.bin, named in SHA256SUMS, is missing"):
            fetched(store)
        objects.put("repo/m/1/parts/w.bin", b"other")
        with pytest.raises(Corrupt, match="m/1/parts/w.bin does not agree with its line in SHA256SUMS"):
            fetched(store)
        objects.put("repo/m/1/parts/w.bin", b"w")
        assert fetched(store) == LARGE
        objects.put("repo/m/1/SHA256SUMS", b"no sums\n")
        with pytest.raises(LoadFailed, match="SHA256SUMS: line 1 is not a SHA-256 and a name"):
            fetched(store)


def test_an_upload_that_the_store_confirms_is_not_fetched_again_for_its_wrong_sums(
    objects: MemoryObjects, tmp_path: Path
) -> None:
    objects.put("repo/m/1/SHA256SUMS", f"{sha256(b'other').hexdigest()}  model.onnx\n".encode())
    with remote(objects, tmp_path) as store:
        for _ in range(2):
            with pytest.raises(Corrupt, match="m/1/model.onnx does not agree with its line in SHA256SUMS"):
                fetched(store)
    assert [each[1] for each in reads(objects)].count(KEY) == 1


# Names and bounds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("repo/m/1/../../x", "leads out"),
        ("repo/m/1//x", "empty part"),
        ("repo/m/1/./x", "leads out"),
        ("repo/m/1/a\nb", "control characters"),
        ("repo/m/1/" + "d/" * 20 + "x", "folders deep"),
        ("repo/m/1/" + "x" * 256, "more than 255 bytes"),
        ("repo/m/1/model.onnx/x", "a file and a folder at once"),
    ],
)
def test_a_key_that_is_no_file_of_a_version_refuses_it_by_name(
    objects: MemoryObjects, tmp_path: Path, key: str, reason: str
) -> None:
    objects.put(key, b"x")
    with remote(objects, tmp_path / "cache") as store:
        with pytest.raises(LoadFailed, match=reason):
            fetched(store)
    assert not reads(objects) and list(tmp_path.iterdir()) == [tmp_path / "cache"]


def test_keys_that_are_no_models_are_left_out(tmp_path: Path) -> None:
    names = ("repo/.x/1/a", "repo/..", "repo//1/a", "repo/x", "repo/a b/1/c", "repo/m/../x", "repo/m//x", "other/m/1/a")
    objects = MemoryObjects({**dict.fromkeys(names, b"x"), "repo/m/2/": b"", "repo/m/": b""})
    with remote(objects, tmp_path) as store:
        assert (store.models(), store.versions("m"), store.files("m", 2)) == (["m"], [2], [])
        assert store.text("m", "x") is None


def test_more_objects_or_bytes_than_are_taken(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path / "a", limits=StoreLimits(objects=1)) as store, pytest.raises(TooManyObjects):
        store.models()
    with remote(objects, tmp_path / "b", limits=StoreLimits(version_bytes=len(LARGE) - 1)) as store:
        with pytest.raises(LoadFailed, match=f"m/1 holds more than {len(LARGE) - 1} bytes"):
            fetched(store)
    found = snapshot([], "repo/", max_version_bytes=1)
    assert found == {} and not reads(objects)


def test_a_small_file_that_is_large_is_not_read(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.put("repo/m/config.pbtxt", bytes((1 << 20) + 1))
    with remote(objects, tmp_path) as store:
        store.models()
        with pytest.raises(LoadFailed, match="m/config.pbtxt is larger than 1048576 bytes"):
            store.text("m", "config.pbtxt")
    assert not reads(objects)


def test_its_code_does_not_run() -> None:
    assert RemoteStore.runs_code is False


# The cache ---------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_makes_room_and_never_what_serves(tmp_path: Path) -> None:
    objects = MemoryObjects({f"repo/m/{version}/model.onnx": bytes([version]) * 1000 for version in range(1, 6)})
    serves: list[str] = []
    with remote(objects, tmp_path, max_bytes=3000, in_use=lambda: serves, handed_s=-1.0) as store:
        for version in (1, 2, 3):
            fetched(store, version)
        looks = store.fingerprint("m").versions
        for age, version in enumerate((2, 3, 1)):  # the oldest first
            os.utime(tmp_path / "versions" / looks[version] / "manifest.json", (age, age))
        serves[:] = [f"shared.{looks[2]}"]
        fetched(store, 4)
        assert {each.name for each in (tmp_path / "versions").iterdir()} == {looks[1], looks[2], looks[4]}
        assert store.cache_bytes == 3000
        serves[:] = [f"shared.{looks[version]}" for version in (1, 2, 4)]
        with pytest.raises(LoadFailed, match="no room for 1000 beside what serves"):
            fetched(store, 5)
        assert len(list((tmp_path / "versions").iterdir())) == 3


def test_what_is_being_loaded_is_not_evicted(tmp_path: Path) -> None:
    objects = MemoryObjects({f"repo/m/{version}/model.onnx": bytes(1000) for version in (1, 2)})
    clock = Clock()
    with remote(objects, tmp_path, max_bytes=1500, clock=clock) as store:
        fetched(store, 1)
        with pytest.raises(LoadFailed, match="no room"):
            fetched(store, 2)
        clock.now_s += caches.HANDED_S + 1
        fetched(store, 2)


@pytest.mark.parametrize("damage", ["bytes", "shorter", "gone", "manifest"])
def test_a_cache_that_was_damaged_is_fetched_anew(objects: MemoryObjects, tmp_path: Path, damage: str) -> None:
    with remote(objects, tmp_path) as store:
        fetched(store)
    (version,) = (tmp_path / "versions").iterdir()
    file = version / "files/model.onnx"
    if damage == "bytes":
        with file.open("r+b") as opened:
            opened.write(b"\xff\0\xff\0")
    elif damage == "shorter":
        os.truncate(file, 10)
    elif damage == "gone":
        file.unlink()
    else:
        (version / "manifest.json").write_bytes(b"{")
    with remote(objects, tmp_path) as store:
        assert fetched(store) == LARGE
    assert len(reads(objects)) == 2


def test_a_small_file_that_was_damaged_is_fetched_anew(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path) as store:
        store.models()
        store.text("m", "config.pbtxt")
        (kept,) = (tmp_path / "shared").iterdir()
        kept.write_bytes(kept.read_bytes() + b"!")
        assert store.text("m", "config.pbtxt") == "max_batch_size: 4"


def test_two_servers_do_not_share_a_cache(tmp_path: Path) -> None:
    first = Cache(tmp_path, max_bytes=1)
    with pytest.raises(LoadFailed, match="another server uses this --model-cache"):
        Cache(tmp_path, max_bytes=1)
    first.close()
    Cache(tmp_path, max_bytes=1).close()


def test_what_the_store_has_no_more_leaves_its_pieces(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path) as store:
        fetched(store)
        store.text("m", "config.pbtxt")
        assert [each.name for each in (tmp_path / "models").iterdir()] == ["m.json"]
        objects.put("repo/n/1/model.onnx", b"n")
        objects.remove("repo/m")
        store.models()
        assert not list((tmp_path / "models").iterdir()) and not list((tmp_path / "shared").iterdir())
        with pytest.raises(LoadFailed, match="is not in the store"):
            store.versions("m")


async def test_a_listing_that_has_lost_most_models_at_once_changes_nothing(
    objects: MemoryObjects, tmp_path: Path
) -> None:
    """A wrong prefix or a broken proxy answered with no objects, and every model was unloaded."""
    for number in range(8):
        objects.put(f"repo/m{number}/1/model.onnx", b"n")
    with remote(objects, tmp_path) as store:
        repository = Repository(store)
        assert await repository.scan() and fetched(store) == LARGE
        for number in range(4):
            objects.remove(f"repo/m{number}")
        assert await repository.scan() and store.up, "four of nine were deleted"
        for number in range(4, 8):
            objects.remove(f"repo/m{number}")
        before = dict(repository.found or {})
        assert not await repository.scan() and not store.up
        assert "lacks 4 of 5 models at once" in repository.failure and "restart this server" in repository.failure
        objects.remove("repo")
        assert not await repository.scan() and repository.found == before and store.versions("m") == [1]
        objects.put("repo/m4/1/model.onnx", b"n")
        objects.put("repo/m5/1/model.onnx", b"n")
        objects.put("repo/m6/1/model.onnx", b"n")
        assert await repository.scan() and store.up and sorted(repository.found or ()) == ["m4", "m5", "m6"]
        repository.close()
    objects.remove("repo")
    with remote(objects, tmp_path) as again:
        assert not again.models(), "a server that starts takes what it finds"


# Outages -----------------------------------------------------------------------------------------------------------


def test_a_store_that_is_down_is_asked_once_in_ten_seconds(objects: MemoryObjects, tmp_path: Path) -> None:
    clock = Clock()
    with remote(objects, tmp_path, clock=clock) as store:
        fetched(store)
        objects.requests.clear()
        objects.down = True
        asked_at: list[float] = []
        for _ in range(100):
            before = len(objects.requests)
            for ask in (store.models, lambda: store.text("m", "config.pbtxt")):
                with pytest.raises(StoreUnavailable):
                    ask()
            asked_at += [clock.now_s] * (len(objects.requests) - before)
            clock.now_s += 1
        assert asked_at == [1000.0 + 10.0 * number for number in range(10)] and not store.up
        objects.down = False
        clock.now_s += OUTAGE_S
        store.models()
        assert store.up and store.text("m", "config.pbtxt")


def test_a_start_without_the_store_serves_what_the_cache_holds(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.put("repo/m/2/model.onnx", b"never fetched")
    objects.put("repo/n/1/model.onnx", b"neither")
    with remote(objects, tmp_path) as store:
        store.text("m", "config.pbtxt") if store.models() else None
        fetched(store)
        before = store.fingerprint("m")
    objects.down = True
    clock = Clock()
    with remote(objects, tmp_path, clock=clock) as store:
        for _ in range(3):
            assert (store.models(), store.versions("m"), store.up) == (["m"], [1], False)
        assert store.artifact("m", 1, "model.onnx").read_bytes() == LARGE
        assert store.text("m", "config.pbtxt") == "max_batch_size: 4"
        offline = store.fingerprint("m")
        assert (offline.shared, offline.versions[1]) == (before.shared, before.versions[1])
        objects.down = False
        clock.now_s += OUTAGE_S
        assert (list(store.models()), store.versions("m"), store.up) == (["m", "n"], [1, 2], True)
        # Nothing of what serves is loaded a second time.
        assert store.fingerprint("m").versions[1] == before.versions[1]


def test_a_start_without_the_store_and_without_a_cache_says_why(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.down = True
    with remote(objects, tmp_path) as store, pytest.raises(StoreUnavailable, match="the store is down"):
        store.models()


def test_a_version_that_was_taken_back_is_not_started_with(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.put("repo/m/2/model.onnx", b"two")
    with remote(objects, tmp_path) as store:
        fetched(store, 1)
        fetched(store, 2)
        objects.remove("repo/m/2")
        store.models()
    objects.down = True
    with remote(objects, tmp_path) as store:
        assert (store.models(), store.versions("m")) == (["m"], [1])


def test_an_upload_that_was_never_whole_does_not_hide_what_served(objects: MemoryObjects, tmp_path: Path) -> None:
    with remote(objects, tmp_path) as store:
        fetched(store)
        objects.put(KEY, b"a bad upload in its place")
        objects.spoils.add(KEY)
        with pytest.raises(Corrupt):
            fetched(store)
        objects.put("repo/m/2/model.onnx", b"two")
        fetched(store, 2)
    objects.down = True
    with remote(objects, tmp_path) as store:
        assert (store.models(), store.versions("m")) == (["m"], [1, 2])
        assert store.artifact("m", 1, "model.onnx").read_bytes() == LARGE


def test_a_fetch_that_an_outage_cut_off_is_tried_again_when_it_is_over(objects: MemoryObjects, tmp_path: Path) -> None:
    clock = Clock()
    with remote(objects, tmp_path, clock=clock) as store:
        store.models()
        objects.down = True
        with pytest.raises(StoreUnavailable):
            store.artifact("m", 1, "model.onnx")
        before = store.fingerprint("m")
        clock.now_s += OUTAGE_S
        with pytest.raises(StoreUnavailable):
            store.models()
        assert store.fingerprint("m") == before
        objects.down = False
        clock.now_s += OUTAGE_S
        store.models()
        assert store.fingerprint("m").versions[1] != before.versions[1]
        assert fetched(store) == LARGE


def test_a_stop_ends_a_fetch_under_way(objects: MemoryObjects, tmp_path: Path) -> None:
    objects.held = asyncio.Event()
    with ThreadPoolExecutor(1) as thread, remote(objects, tmp_path) as store:
        store.models()
        under_way = thread.submit(store.artifact, "m", 1, "model.onnx")
        while not reads(objects):
            pass
        store.close()
        with pytest.raises(StoreUnavailable, match="the server is stopping"):
            under_way.result(60)


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    assert not [each.name for each in threading.enumerate() if each.name == "oriel-model-store"]
