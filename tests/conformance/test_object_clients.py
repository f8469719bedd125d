"""The tests that every `ObjectClient` has to pass, against servers of each kind: moto for S3, Google's emulator,
Azurite.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest

from oriel_wire.objects.client import ClientLimits, ObjectClient, Stored, location_of
from oriel_wire.objects.errors import ObjectChanged, ObjectStoreError, StoreUnavailable, TooManyObjects
from oriel_wire.objects.opening import open_writer

from ..conftest import Run
from ..waiting import wait_until
from .object_stores import PAGE, SERVERS, ObjectServer, Stub, client_of, object_server, point_to

MANY = 2 * PAGE + 3  # on three pages
# Names that a bucket may hold, and that a file system, a URL or XML may treat specially.
ODD = ["é ü", "100%", "%2F", "a+b", "?q=1", "#h", "back\\slash", "&lt;x>", "snow☃", "..x", "~t", " lead", "x" * 200]
SECRET = "sig=S3CRET-OF-THE-STORE"


@pytest.fixture(params=sorted(SERVERS))
def server(request: pytest.FixtureRequest, run: Run) -> Iterator[ObjectServer]:
    with object_server(request.param, run) as running:
        yield running


@pytest.fixture
async def client(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ObjectClient]:
    point_to(monkeypatch, server)
    client, prefix = client_of(server.url, ClientLimits(page_objects=PAGE))
    assert prefix == ""
    yield client
    await client.close()
    await client.close()


async def read(client: ObjectClient, key: str, start: int, end: int, etag: str) -> bytes:
    return b"".join([chunk async for chunk in client.read(key, start=start, end=end, etag=etag)])


async def only(client: ObjectClient, prefix: str) -> Stored:
    (stored,) = await client.list(prefix, limit=10)
    return stored


async def test_listing_goes_on_behind_a_page_and_keeps_to_its_prefix(
    server: ObjectServer, client: ObjectClient
) -> None:
    names = [f"many/{place % 7}/{place:04}" for place in range(MANY)]
    server.put_many(dict.fromkeys(names, b"x") | {"many-more/1": b"x", "manx": b"x"})
    found = await client.list("many/", limit=2000)
    assert [each.key for each in found] == sorted(names)
    assert {each.size for each in found} == {1} and all(each.etag for each in found)
    assert [each.key for each in await client.list("many/3/", limit=2000)] == [
        each for each in sorted(names) if "/3/" in each
    ]
    assert await client.list("nothing/", limit=10) == []


async def test_more_than_the_limit_is_refused(server: ObjectServer, client: ObjectClient) -> None:
    server.put_many({f"limit/{place}": b"" for place in range(4)})
    assert len(await client.list("limit/", limit=4)) == 4
    with pytest.raises(TooManyObjects, match="more than 3"):
        await client.list("limit/", limit=3)


async def test_names_come_back_as_they_are_and_can_be_read(server: ObjectServer, client: ObjectClient) -> None:
    names = [name for name in ODD if server.kind != "az" or "\\" not in name]  # Azure turns a backslash into a slash
    server.put_many({f"odd/{name}/f": name.encode() for name in names})
    found = {each.key: each for each in await client.list("odd/", limit=100)}
    assert set(found) == {f"odd/{name}/f" for name in names}
    for name in names:
        each = found[f"odd/{name}/f"]
        assert await read(client, each.key, 0, each.size, each.etag) == name.encode(), name
        assert (await client.head(each.key)).etag == each.etag


async def test_ranges(server: ObjectServer, client: ObjectClient) -> None:
    data = bytes(range(256)) * 4096  # several chunks
    server.put("range/f", data)
    each = await only(client, "range/")
    assert each.size == len(data)
    for start, end in ((0, 1), (0, len(data)), (5, 300_000), (len(data) - 1, len(data))):
        assert await read(client, each.key, start, end, each.etag) == data[start:end]


async def test_an_empty_object_and_the_mark_of_an_empty_folder(server: ObjectServer, client: ObjectClient) -> None:
    server.put_many({"empty/f": b"", "empty/folder/": b"", "empty/folder/g": b"1"})
    found = [each for each in await client.list("empty/", limit=10) if not each.key.endswith("/")]
    assert [(each.key, each.size) for each in found] == [("empty/f", 0), ("empty/folder/g", 1)]


async def test_a_checksum_is_of_the_bytes(server: ObjectServer, client: ObjectClient) -> None:
    server.put("sum/f", b"hello")
    head = await client.head("sum/f")
    assert (head.key, head.size, head.etag) == ("sum/f", 5, (await only(client, "sum/")).etag)
    # obstore reports no checksum; the one of S3 has to be right.
    assert head.checksum == (("md5", "5d41402abc4b2a76b9719d911017c592") if server.kind == "s3" else None)


async def test_what_is_written_reads_back_and_is_never_replaced(server: ObjectServer, client: ObjectClient) -> None:
    writer = open_writer(location_of(server.url))
    stored = [await writer.put("written/f", data) for data in (b"one", b"one", b"two, and longer")]
    assert stored == [True, False, False]
    each = await only(client, "written/")
    assert await read(client, each.key, 0, each.size, each.etag) == b"one"
    await writer.close()


async def test_a_changed_object_is_noticed(server: ObjectServer, client: ObjectClient) -> None:
    server.put("changed/f", b"one")
    before = await only(client, "changed/")
    server.put("changed/f", b"two, and longer")
    assert (await only(client, "changed/")).etag != before.etag
    with pytest.raises(ObjectChanged):
        await read(client, before.key, 0, 3, before.etag)


async def test_a_missing_object_is_said_to_be_gone(server: ObjectServer, client: ObjectClient) -> None:
    server.put("gone/f", b"one")
    each = await only(client, "gone/")
    server.remove("gone/f")
    with pytest.raises(ObjectChanged, match="gone"):
        await read(client, each.key, 0, 3, each.etag)
    with pytest.raises(ObjectChanged, match="gone"):
        await client.head(each.key)


async def test_a_missing_bucket_is_named(server: ObjectServer, client: ObjectClient) -> None:
    other, _ = client_of(server.url.replace(server.bucket, "no-such-bucket"))
    with pytest.raises(StoreUnavailable, match="no-such-bucket.* there is no such"):
        await other.list("", limit=10)
    await other.close()


async def test_a_store_that_is_away_and_back(server: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from .redis_server import Proxy

    proxy = Proxy(server.port)
    await proxy.open()
    point_to(monkeypatch, server, proxy.port)
    client, _ = client_of(server.url)
    server.put("away/f", b"one")
    each = await only(client, "away/")
    await proxy.set("refuse")
    with pytest.raises(StoreUnavailable):
        await client.list("away/", limit=10)
    with pytest.raises(StoreUnavailable):
        await read(client, each.key, 0, 3, each.etag)
    await proxy.set("reset")
    with pytest.raises(StoreUnavailable):
        await client.list("away/", limit=10)
    await proxy.set("through")
    assert await read(client, each.key, 0, 3, each.etag) == b"one"
    await client.close()
    await proxy.close()


FORBIDDEN = f"<Error><Code>AccessDenied</Code><Message>{SECRET}</Message></Error>"


def answer(status: str, body: str = "", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", "content-type: application/xml", *headers, "", body]
    return "\r\n".join(lines).encode()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (answer("403 Forbidden", FORBIDDEN), "403"),
        (answer("503 Service Unavailable", SECRET), "503"),
        (answer("200 OK", SECRET), "cannot be|answers 500"),
        (answer("200 OK"), "cannot be|does not answer with a listing"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "cannot be"),
    ],
    ids=["forbidden", "busy", "not-a-listing", "nothing", "not-http"],
)
@pytest.mark.parametrize("kind", sorted(SERVERS))
async def test_what_goes_wrong_is_said_without_secrets(
    kind: str, said: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SERVERS[kind]()
    async with Stub(said) as stub:
        point_to(monkeypatch, server, stub.port)
        client, _ = client_of(server.url)
        with pytest.raises(StoreUnavailable, match=reason) as caught:
            await client.list("", limit=10)
        await client.close()
    for text in (str(caught.value), repr(caught.value)):
        assert "S3CRET" not in text and "AZURE_STORAGE_ACCOUNT_KEY" not in text
        assert not any(value in text for name, value in server.environment(1).items() if "KEY" in name)


PART = (
    b'HTTP/1.1 206 Partial Content\r\ncontent-length: 100\r\ncontent-range: bytes 0-99/100\r\netag: "e"\r\n'
    b"last-modified: Thu, 01 Jan 2026 00:00:00 GMT\r\nx-goog-generation: 1\r\n\r\nten bytes."
)


@pytest.mark.parametrize("kind", sorted(SERVERS))
async def test_a_store_that_falls_silent_is_left_after_a_bounded_time(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SERVERS[kind]()
    for said, call in ((b"", "list"), (PART, "read")):
        async with Stub(said) as stub:
            point_to(monkeypatch, server, stub.port)
            client, _ = client_of(server.url, ClientLimits(read_s=0.2))
            async with asyncio.timeout(60):
                with pytest.raises(StoreUnavailable):
                    await (client.list("", limit=10) if call == "list" else read(client, "f", 0, 100, "e"))
                await stub.left.wait()
            await client.close()


@pytest.mark.parametrize("kind", sorted(SERVERS))
async def test_who_is_cancelled_lets_go_of_the_connection(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SERVERS[kind]()
    for said, call in ((b"", "list"), (PART, "read")):
        async with Stub(said) as stub:
            point_to(monkeypatch, server, stub.port)
            client, _ = client_of(server.url)
            work = client.list("", limit=10) if call == "list" else read(client, "f", 0, 100, "e")
            task = asyncio.ensure_future(work)
            async with asyncio.timeout(60):
                await stub.asked.wait()
                task.cancel()
                await asyncio.wait([task])
                await stub.left.wait()
            assert task.cancelled()
            await client.close()


@pytest.mark.parametrize("kind", sorted(SERVERS))
async def test_a_reader_that_ends_early_lets_go_of_the_connection(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = SERVERS[kind]()
    size = 1 << 20
    began = PART.replace(b"length: 100", b"length: %d" % size).replace(b"0-99/100", b"0-%d/%d" % (size - 1, size))
    async with Stub(began + b"x" * (size // 2)) as stub:
        point_to(monkeypatch, server, stub.port)
        client, _ = client_of(server.url)
        async with asyncio.timeout(60):
            async with aclosing(client.read("f", start=0, end=size, etag="e")) as chunks:
                assert await anext(chunks)
            await stub.left.wait()
        await client.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("gs://user:password@bucket/models", "credentials"),
        ("az://account/container/models?sig=x", "credentials"),
        ("ftp://bucket/models", "not a known object store"),
        ("az://account", "az://account/container/prefix"),
    ],
)
def test_urls_that_are_refused(url: str, said: str) -> None:
    with pytest.raises(ObjectStoreError, match=said) as caught:
        client_of(url)
    assert "password" not in str(caught.value)


@pytest.mark.parametrize("url", ["gs://bucket/models", "az://account/container/models"])
def test_without_the_package_the_extra_is_named(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.delitem(sys.modules, "oriel_wire.objects.obstore", raising=False)
    with pytest.raises(ObjectStoreError, match=r"pip install 'oriel-serving\[(gcs|azure)\]'"):
        client_of(url)


async def test_an_object_no_file_can_be_named_after_is_named(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with object_server("gs", run) as server:
        point_to(monkeypatch, server)
        client, _ = client_of(server.url)
        server.put_many({"m/1/model.onnx": b"x", "m//x": b"x"})
        with pytest.raises(StoreUnavailable, match="m//x.*remove it"):
            await client.list("", limit=10)


async def test_credentials_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "!not-base64-S3CRET!")
    with pytest.raises(ObjectStoreError, match="az://account/container: the credentials") as caught:
        client_of("az://account/container")
    assert "S3CRET" not in str(caught.value) and caught.value.__cause__ is None


def test_a_server_of_the_run_ends_after_the_process_that_it_is_for(tmp_path: Path) -> None:
    wanted = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    server, log = SERVERS["gs"](), tmp_path / "log"
    server.start(log, wanted.pid)
    server.make_bucket()
    wanted.communicate()
    wait_until(lambda: "ended: -9" in log.read_text())
    with pytest.raises(httpx.ConnectError):
        server.make_bucket()
    server.close()
