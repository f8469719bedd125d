"""Servers that share artefacts through each kind of store, and through S3 over a network that fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path

import pytest

from oriel_inference import assembly
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed
from oriel_policies.artefacts.refusals import Refusal, RefusalKind
from oriel_wire.objects.client import location_of
from oriel_wire.objects.opening import open_client, open_writer

from ..conftest import Run
from ..inference.artefact_folders import FILES, key_of_here, other_folder, published
from ..inference.artefact_server import COMPILED, outcomes, served, until_state
from ..inference.artefact_stores import UNDER, Tasks, group, wait
from ..inference.control_server import times
from ..waiting import until
from .object_stores import SERVERS, ObjectServer, object_server, point_to
from .redis_server import Proxy

LARGE = FILES | {"large": bytes(range(256)) * (24 << 10)}  # more than a client sends in one part by default


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, run: Run) -> Iterator[ObjectServer]:
    with object_server(request.param, run) as running:
        yield running


@pytest.fixture
def s3(run: Run) -> Iterator[ObjectServer]:
    with object_server("s3", run) as running:
        yield running


@pytest.fixture
async def tasks() -> AsyncIterator[Tasks]:
    tasks = Tasks()
    yield tasks
    await tasks.end()


def member(server: ObjectServer, **more: float) -> AbstractContextManager[GroupStore]:
    """Give the store as one more server of the group uses it."""
    location = location_of(server.url)
    return group(open_client(location), open_writer(location), **more)


async def test_of_servers_that_start_together_one_builds_and_the_others_fetch(
    server: ObjectServer, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    key = key_of_here()
    mine = published(tmp_path / "mine", key, LARGE)
    folders = [other_folder(tmp_path / f"{number}") for number in range(3)]
    with ExitStack() as stack:
        stores = [stack.enter_context(member(server)) for _ in folders]
        both = list(zip(stores, folders, strict=True))
        numbers = await asyncio.gather(*(wait(store, folder, key.fingerprint) for store, folder in both))
        assert numbers == [1, 1, 1]
        leases = [store.lease(key.fingerprint, 1) for store in stores]
        taken = await asyncio.gather(*(lease.take(tasks.spawn) for lease in leases))
        assert sorted(taken) == [False, False, True]
        waiting = [asyncio.Event() for _ in folders]
        fetches = [
            tasks.spawn(wait(store, folder, key.fingerprint, event.set))
            for (store, folder), event in zip(both, waiting, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in waiting))
        await leases[taken.index(True)].send(mine)
        assert await asyncio.gather(*fetches) == [None, None, None]
    manifest = mine.find(key.fingerprint)
    for folder in folders:
        assert folder.find(key.fingerprint) == manifest
        assert {name: (folder.root / key.fingerprint / name).read_bytes() for name in LARGE} == LARGE


@pytest.mark.parametrize(
    "server",
    ["s3", pytest.param("gs", marks=pytest.mark.long), pytest.param("az", marks=pytest.mark.long)],
    indirect=True,
)
async def test_two_servers_find_model_and_artefact_in_one_bucket(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    monkeypatch.setattr(assembly, "GroupStore", partial(GroupStore, poll_s=0.02))
    server.put_many({"models/double/config.pbtxt": COMPILED.encode()})
    server.put_many({"models/double/1/model.onnx": times(2.0).SerializeToString()})
    store = location_of(f"{server.url}/engines")
    async with AsyncExitStack() as stack:
        starts = (
            served(
                f"{server.url}/models",
                tmp_path / f"artefacts-{number}",
                artefact_store=store,
                model_cache=tmp_path / f"cache-{number}",
            )
            for number in range(2)
        )
        servers = await asyncio.gather(*map(stack.enter_async_context, starts))
        await asyncio.gather(*(until_state(each, "serving") for each in servers))
        assert sorted(outcome for each in servers for outcome in outcomes(each)) == ["built", "found"]
        assert [await each.answer() for each in servers] == [2.0, 2.0]


async def test_a_lease_is_renewed_and_ends_with_the_refusal_of_its_build(
    server: ObjectServer, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    fingerprint, folder = key_of_here().fingerprint, other_folder(tmp_path)
    refusal = Refusal(kind=RefusalKind.NOT_COMPILED, reason="it has an unknown operator", under=UNDER)
    with member(server, beat_s=0.01) as one, member(server) as other:
        lease = one.lease(fingerprint, 1)
        assert await lease.take(tasks.spawn)

        async def renewed() -> bool:
            known = await other.find(fingerprint)
            return known.lease is not None and known.lease.holder == one.holder and known.number >= 3

        await until(renewed)
        await lease.end(refusal)
        assert await wait(other, folder, fingerprint) == refusal


async def test_an_object_that_was_replaced_is_not_published(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    key = key_of_here()
    mine, folder = published(tmp_path / "mine", key), other_folder(tmp_path / "other")
    manifest = mine.find(key.fingerprint)
    assert manifest is not None
    with member(server) as one:
        await one.send(mine, key.fingerprint)
        server.put(f"engines/{key.fingerprint}/{manifest.files['optimised.onnx'].sha256}", b"GRAPH")
        with pytest.raises(GroupStoreFailed, match=r"remove it there: optimised\.onnx is not the file that was built"):
            await wait(one, folder, key.fingerprint)
    assert list(folder.root.iterdir()) == []


async def test_without_its_bucket_a_store_is_not_used(
    server: ObjectServer, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    server.bucket += "-missing"
    key = key_of_here()
    with member(server) as one:
        with pytest.raises(GroupStoreFailed, match="no such bucket"):
            await wait(one, other_folder(tmp_path / "other"), key.fingerprint)
        with pytest.raises(GroupStoreFailed):
            await one.lease(key.fingerprint, 1).take(tasks.spawn)
        with pytest.raises(GroupStoreFailed):
            await one.send(published(tmp_path / "one", key), key.fingerprint)


async def test_a_network_that_loses_everything_costs_a_bounded_time(
    s3: ObjectServer, tmp_path: Path, tasks: Tasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(s3.port)
    await proxy.open()
    point_to(monkeypatch, s3, proxy.port)
    fingerprint, folder = key_of_here().fingerprint, other_folder(tmp_path)
    with member(s3, request_s=0.5) as one, member(s3) as other:
        await proxy.set("blackhole")
        with pytest.raises(GroupStoreFailed, match=r"did not answer within 0\.5 s"):
            await wait(one, folder, fingerprint)
        await proxy.set("refuse")
        with pytest.raises(GroupStoreFailed, match="no connection"):
            await one.lease(fingerprint, 1).take(tasks.spawn)
        await proxy.set("through")
        assert await wait(other, folder, fingerprint) == 1
        assert await other.lease(fingerprint, 1).take(tasks.spawn)
    await proxy.close()
