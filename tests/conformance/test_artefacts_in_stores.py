"""Servers that share artefacts through each kind of store, and through S3 over a network that fails."""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest

from oriel_inference.artefacts.folder import ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore, GroupStoreFailed
from oriel_wire.objects.client import location_of
from oriel_wire.objects.opening import open_client, open_writer

from ..conftest import Run
from ..inference.artefact_folders import FILES, key_of_here, other_folder, published
from ..inference.artefact_server import COMPILED, outcomes, served, until_state
from ..inference.artefact_stores import LONG_S, group
from ..inference.control_server import times
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


def member(server: ObjectServer, request_s: float = LONG_S) -> AbstractContextManager[GroupStore]:
    """Give the store as one more server of the group uses it."""
    location = location_of(server.url)
    return group(open_client(location), open_writer(location), request_s)


async def test_of_servers_that_send_an_artefact_at_once_one_wins_and_the_others_fetch_it(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    key = key_of_here()
    built = [
        published(tmp_path / f"{number}", key, LARGE | {"optimised.onnx": f"graph {number}".encode()})
        for number in range(3)
    ]
    folders = [other_folder(tmp_path / f"other-{number}") for number in range(2)]
    with ExitStack() as stack:
        stores = [stack.enter_context(member(server)) for _ in built]
        assert not await stores[0].fetch(folders[0], key.fingerprint, LONG_S)
        await asyncio.gather(
            *(store.send(folder, key.fingerprint) for store, folder in zip(stores, built, strict=True))
        )
        await asyncio.gather(
            *(store.fetch(folder, key.fingerprint, LONG_S) for store, folder in zip(stores, folders, strict=False))
        )
    manifests = [folder.find(key.fingerprint) for folder in folders]
    (winner,) = [folder for folder in built if folder.find(key.fingerprint) == manifests[0]]
    assert manifests[0] == manifests[1]
    for folder in folders:
        for name in LARGE:
            assert (folder.root / key.fingerprint / name).read_bytes() == (
                winner.root / key.fingerprint / name
            ).read_bytes()


@pytest.mark.parametrize(
    "server",
    ["s3", pytest.param("gs", marks=pytest.mark.long), pytest.param("az", marks=pytest.mark.long)],
    indirect=True,
)
async def test_model_and_artefact_of_a_server_are_in_one_bucket(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    server.put_many({"models/double/config.pbtxt": COMPILED.encode()})
    server.put_many({"models/double/1/model.onnx": times(2.0).SerializeToString()})
    store, sent = location_of(f"{server.url}/engines"), asyncio.Event()
    send = GroupStore.send

    async def sending(self: GroupStore, folder: ArtefactFolder, fingerprint: str) -> None:
        await send(self, folder, fingerprint)
        sent.set()

    monkeypatch.setattr(GroupStore, "send", sending)
    for number, expected in enumerate(({"built": 1}, {"found": 1})):
        folder, cache = tmp_path / f"artefacts-{number}", tmp_path / f"cache-{number}"
        async with served(f"{server.url}/models", folder, artefact_store=store, model_cache=cache) as one:
            await until_state(one, "serving")
            assert outcomes(one) == expected
            assert await one.answer() == 2.0
            await sent.wait()


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
            await one.fetch(folder, key.fingerprint, LONG_S)
    assert list(folder.root.iterdir()) == []


async def test_without_its_bucket_a_store_is_not_used(
    server: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_to(monkeypatch, server)
    server.bucket += "-missing"
    key = key_of_here()
    with member(server) as one:
        with pytest.raises(GroupStoreFailed, match="no such bucket"):
            await one.fetch(other_folder(tmp_path / "other"), key.fingerprint, LONG_S)
        with pytest.raises(GroupStoreFailed):
            await one.send(published(tmp_path / "one", key), key.fingerprint)


async def test_a_network_that_loses_everything_costs_a_bounded_time(
    s3: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = Proxy(s3.port)
    await proxy.open()
    point_to(monkeypatch, s3, proxy.port)
    fingerprint, folder = key_of_here().fingerprint, other_folder(tmp_path)
    with member(s3, request_s=0.5) as one, member(s3) as other:
        await proxy.set("blackhole")
        with pytest.raises(GroupStoreFailed, match=r"did not answer within 0\.5 s"):
            await one.fetch(folder, fingerprint, LONG_S)
        await proxy.set("refuse")
        with pytest.raises(GroupStoreFailed, match="no connection"):
            await one.fetch(folder, fingerprint, LONG_S)
        await proxy.set("through")
        assert not await other.fetch(folder, fingerprint, LONG_S)
    await proxy.close()
