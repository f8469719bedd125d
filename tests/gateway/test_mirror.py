"""The local copy of policies in an object store: it changes in whole sets only, and stays during an outage of the
store.
"""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time

import pytest

from oriel_gateway.documents import mirror as module
from oriel_gateway.documents.mirror import Mirror, MirrorLimits
from oriel_gateway.documents.source import KINDS, FolderSource, store_location
from oriel_gateway.documents.stored import Listed, Moved, StoreFailed
from oriel_policies.errors import BadDocument
from oriel_wire.objects.client import Location
from oriel_wire.objects.errors import BadStoreUrl

from ..waiting import TIMEOUT_S

URL = store_location("s3://bucket/policies")
MakeMirror = Callable[..., Mirror]


class Shelf:
    """Documents in memory. before: called with a document's name before it is fetched, and with "" before each
    listing.
    """

    def __init__(self, **texts: str) -> None:
        self.texts = {f"{name}.toml": text for name, text in texts.items()}
        self.fetched: list[str] = []
        self.before: Callable[[str], None] = lambda name: None
        self.sizes: dict[str, int] = {}
        self.listings = 0

    async def listing(self) -> dict[str, Listed]:
        self.listings += 1
        self.before("")
        return {
            name: Listed(etag=text, size=self.sizes.get(name, len(text.encode()))) for name, text in self.texts.items()
        }

    async def fetch(self, name: str, listed: Listed, into: Path) -> None:
        self.before(name)
        if self.texts.get(name) != listed.etag:
            raise Moved(name)
        self.fetched.append(name)
        into.write_text(listed.etag)


def away(name: str) -> None:
    raise StoreFailed("s3://bucket/policies cannot be listed: no connection")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MakeMirror]:
    """Create mirrors that are closed at the end; their state is in `tmp_path` if no other folder is given."""
    mirrors: list[Mirror] = []

    def make(shelf: Shelf, state: Path | None = tmp_path, now: Callable[[], float] = time, **limits: float) -> Mirror:
        mirrors.append(Mirror(URL, shelf, state, limits=MirrorLimits(**{"settle_s": 0.0, **limits}), now=now))
        return mirrors[-1]

    yield make
    for each in mirrors:
        each.close()


def held(mirror: Mirror) -> dict[str, str]:
    return {name: data.decode() for name, data in FolderSource(mirror.folder).read().items()}


async def test_only_what_is_new_is_fetched_and_the_set_is_swapped_whole(made: MakeMirror) -> None:
    shelf = Shelf(a="a1", b="b1")
    mirror = made(shelf)
    await mirror.start()
    assert held(mirror) == {"a.toml": "a1", "b.toml": "b1"}
    source = FolderSource(mirror.folder)
    stamp, set_before = source.stamp(), mirror.folder.resolve()
    await mirror.poll()
    assert source.stamp() == stamp and mirror.folder.resolve() == set_before
    del shelf.texts["a.toml"]
    shelf.texts |= {"b.toml": "b2", "c.toml": "c1"}
    await mirror.poll()
    assert held(mirror) == {"b.toml": "b2", "c.toml": "c1"} and source.stamp() != stamp
    assert shelf.fetched == ["a.toml", "b.toml", "b.toml", "c.toml"]
    # A reader may have the previous set open.
    assert (set_before / "a.toml").read_text() == "a1"
    shelf.texts["d.toml"] = "d1"
    await mirror.poll()
    assert not set_before.exists()


async def test_workers_start_from_the_copy_of_the_first_one_while_the_store_is_away(
    made: MakeMirror, tmp_path: Path
) -> None:
    shelf = Shelf(a="a1", b="b1")
    await made(shelf).start()
    shelf.before = away
    second = Mirror(URL, shelf, tmp_path, borrowed=True)
    await second.start()
    assert held(second) == {"a.toml": "a1", "b.toml": "b1"}
    second.close()
    assert not second.folder.exists() and list(tmp_path.glob("*/.lock"))


async def test_a_set_that_changes_while_it_is_fetched_is_taken_when_it_holds_still(made: MakeMirror) -> None:
    shelf = Shelf(a="a1", b="b1")
    mirror = made(shelf)
    await mirror.start()
    shelf.texts |= {"a.toml": "a2", "b.toml": "b2"}
    seen: list[dict[str, str]] = []

    def change(name: str) -> None:
        seen.append(held(mirror))
        if name == "b.toml" and shelf.texts["a.toml"] == "a2":
            shelf.texts |= {"a.toml": "a3", "b.toml": "b3"}

    shelf.before = change
    await mirror.poll()
    assert held(mirror) == {"a.toml": "a3", "b.toml": "b3"}
    assert {"a.toml": "a1", "b.toml": "b1"} in seen and all(set(each.values()) == {"a1", "b1"} for each in seen)


async def test_an_upload_of_several_documents_is_waited_for(made: MakeMirror) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    coming = iter(["b", "c"])
    shelf.texts["a.toml"] = "a2"
    sets: list[int] = []

    def upload(name: str) -> None:
        sets.append(len(held(mirror)))
        if not name and shelf.listings > 3 and (more := next(coming, "")):
            shelf.texts[f"{more}.toml"] = "1"

    shelf.before = upload
    await mirror.poll()
    assert held(mirror) == {"a.toml": "a2", "b.toml": "1", "c.toml": "1"} and set(sets) == {1}
    assert shelf.fetched.count("a.toml") == 2, "what an earlier attempt has fetched is not fetched again"


async def test_a_set_that_never_holds_still_is_taken_in_the_end(made: MakeMirror) -> None:
    shelf = Shelf(a="0", b="b")
    mirror = made(shelf, max_rounds=3)
    await mirror.start()

    def move(name: str) -> None:
        if not name:
            shelf.texts["a.toml"] += "x"

    shelf.before = move
    await mirror.poll()
    assert held(mirror)["a.toml"].startswith("0x") and mirror.state.reason == ""

    def always(name: str) -> None:
        shelf.texts["a.toml"] += "x"

    shelf.before = always
    with pytest.raises(StoreFailed, match="cannot be read consistently"):
        await mirror.poll()


async def test_an_outage_keeps_the_documents_and_is_asked_about_less_and_less(
    made: MakeMirror, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waits: list[float] = []
    enough = asyncio.Event()

    def waited(low: float, high: float) -> float:
        assert (low, high) == (1.0, 1.2)
        waits.append(mirror._poll_s)
        if len(waits) == 7:
            shelf.before = lambda name: None
        if len(waits) == 9:
            enough.set()
        return 0.0

    monkeypatch.setattr(module, "uniform", waited)
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    before = held(mirror)
    shelf.before = away
    running = asyncio.ensure_future(mirror.run())
    await enough.wait()
    running.cancel()
    await asyncio.wait([running])
    assert waits[:9] == [10.0, 20.0, 40.0, 80.0, 120.0, 120.0, 120.0, 10.0, 10.0]
    assert held(mirror) == before and mirror.state.reason == ""
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "s3://bucket/policies cannot be listed: no connection; the policies in force stay"
    ]


async def test_somebody_who_asks_does_not_wait(made: MakeMirror) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    listed = asyncio.Event()
    shelf.before = lambda name: listed.set()
    running = asyncio.ensure_future(mirror.run())
    mirror.ask()
    async with asyncio.timeout(5):
        await listed.wait()
    running.cancel()
    await asyncio.wait([running])


async def test_a_start_without_the_store_takes_the_copy(
    made: MakeMirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(a="a1")
    first = made(shelf, now=lambda: 1000.0)
    await first.start()
    first.close()
    shelf.before = away
    again = made(shelf, now=lambda: 1600.0)
    await again.start()
    assert held(again) == {"a.toml": "a1"} and again.state.confirmed_at == 1000.0
    assert "the copy that was confirmed 10 minutes ago" in caplog.text and "no connection" in again.state.reason
    # When the store is back, no document is fetched that is here already.
    shelf.before, shelf.fetched = (lambda name: None), []
    await again.poll()
    assert shelf.fetched == [] and again.state.reason == "" and again.state.confirmed_at == 1600.0


async def test_a_copy_that_is_old_changed_or_open_to_others_does_not_count(
    made: MakeMirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(a="a1")
    first = made(shelf, now=lambda: 1000.0)
    await first.start()
    first.close()
    shelf.before = away
    old = made(shelf, now=lambda: 1001.0 + module.COPY_S)
    with pytest.raises(StoreFailed, match="no connection; the copy kept here is 24 hours old, too old to trust"):
        await old.start()
    old.close()
    (home,) = tmp_path.glob("policies-*")
    home.chmod(0o722)
    with pytest.raises(StoreFailed, match="no connection$"):
        await made(shelf, now=lambda: 1001.0).start()
    assert "other users can write" in caplog.text
    home.chmod(0o700)
    (home / "policies" / "a.toml").write_text("half of a longer one")
    with pytest.raises(StoreFailed, match="no connection$"):
        await made(shelf, now=lambda: 1001.0).start()


async def test_two_gateways_with_one_state_do_not_share_a_copy(
    made: MakeMirror, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = made(Shelf(a="a1")), made(Shelf(a="a2"))
    await first.start()
    await second.start()
    assert (held(first), held(second)) == ({"a.toml": "a1"}, {"a.toml": "a2"})
    assert "another gateway uses its folder" in caplog.text
    second.close()
    assert not second.folder.exists() and held(first) == {"a.toml": "a1"}


async def test_a_document_that_is_too_large_is_named(made: MakeMirror) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    shelf.texts["b.toml"], shelf.sizes["b.toml"] = "b1", KINDS[".toml"] + 1
    await mirror.poll()
    with pytest.raises(BadDocument, match=r"b\.toml: larger than 16777216 bytes"):
        held(mirror)
    assert shelf.fetched == ["a.toml"], "a document that is too large is not even fetched"


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_total_bytes": 3}, "together larger than 3 bytes"), ({"max_documents": 1}, "more than 1 documents")],
)
async def test_a_set_that_passes_a_bound_is_not_taken(made: MakeMirror, limits: dict[str, int], reason: str) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf, **limits)
    await mirror.start()
    shelf.texts["c.toml"] = "c1"
    with pytest.raises(StoreFailed, match=reason):
        await mirror.poll()
    assert held(mirror) == {"a.toml": "a1"}


async def test_a_store_that_never_answers_is_given_up(made: MakeMirror) -> None:
    shelf = Shelf(a="a1")

    async def never() -> dict[str, Listed]:
        await asyncio.Event().wait()
        raise AssertionError

    shelf.listing = never  # type: ignore[method-assign]
    with pytest.raises(StoreFailed, match="did not answer within"):
        await made(shelf, poll_timeout_s=0.01).start()


async def test_a_fetch_that_fails_or_is_cancelled_leaves_nothing_behind(made: MakeMirror, tmp_path: Path) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    (home,) = tmp_path.glob("policies-*")
    before = sorted(os.listdir(home))
    shelf.texts |= {"a.toml": "a2", "b.toml": "b1"}
    shelf.before = lambda name: away(name) if name == "b.toml" else None
    with pytest.raises(StoreFailed):
        await mirror.poll()
    assert sorted(os.listdir(home)) == before and held(mirror) == {"a.toml": "a1"}


async def test_a_set_that_somebody_removed_is_fetched_again(made: MakeMirror) -> None:
    shelf = Shelf(a="a1", b="b1")
    mirror = made(shelf)
    await mirror.start()
    shutil.rmtree(mirror.folder.resolve())
    await mirror.poll()
    assert held(mirror) == {"a.toml": "a1", "b.toml": "b1"}
    (mirror.folder / "a.toml").unlink()
    shelf.texts["b.toml"] = "b2"
    await mirror.poll()
    assert held(mirror) == {"a.toml": "a1", "b.toml": "b2"}


async def test_a_look_that_is_cancelled_while_it_swaps_leaves_a_whole_set(
    made: MakeMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(a="a1")
    mirror = made(shelf)
    await mirror.start()
    shelf.texts["a.toml"] = "a2"
    swap, swapping, go_on = mirror._swap, threading.Event(), threading.Event()

    def slow(listed: dict[str, Listed], into: Path) -> None:
        swapping.set()
        go_on.wait(TIMEOUT_S)
        swap(listed, into)
        swapped.set()

    swapped = threading.Event()
    monkeypatch.setattr(mirror, "_swap", slow)
    looking = asyncio.ensure_future(mirror.poll())
    await asyncio.to_thread(swapping.wait, TIMEOUT_S)
    looking.cancel()
    await asyncio.wait([looking])
    go_on.set()
    await asyncio.to_thread(swapped.wait, TIMEOUT_S)
    assert held(mirror) == {"a.toml": "a2"}


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/a/b/", Location(kind="s3", bucket="bucket", prefix="a/b/")),
        ("gs://bucket", Location(kind="gs", bucket="bucket", prefix="")),
        ("as://account/container//x", Location(kind="az", account="account", bucket="container", prefix="x/")),
    ],
)
def test_urls(text: str, url: Location) -> None:
    assert store_location(text) == url and store_location(str(url)) == url


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("s3://user:s3cret@bucket/x", "takes no credentials"),
        ("az://account/container?sig=s3cret", "takes no credentials"),
        ("https://s3cret/x", "not a known object store"),
        ("gs://bucket/../x", "is not gs://bucket/prefix"),
        ("s3://host:9000/bucket/x", "set AWS_ENDPOINT_URL to the address of the store"),
        ("az://account", "az://account/container/prefix"),
        ("s3://" + "b" * 2000, "more than 1024 characters"),
    ],
)
def test_urls_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(BadStoreUrl, match=said) as caught:
        store_location(text)
    assert "s3cret" not in str(caught.value)
