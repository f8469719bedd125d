"""Both public ports over TLS, and certificates that change while they are served."""

import asyncio
import json
import logging
import re
import shutil
import socket
import ssl
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import httpx
import pytest

from oriel_gateway.admin.app import admin_app
from oriel_gateway.app import serve
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import ClientConnection, serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.settings import Settings
from oriel_policies.documents import compile_documents
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .certificates import certificate, needs_openssl
from .gate import INFER
from .process import gateway_process
from .stack import GOLD, Client, documents, upstream

pytestmark = needs_openssl
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    return {name: certificate(folder, name) for name in ("first", "second")}


@pytest.fixture
def files(tmp_path: Path, pairs: dict[str, Pair]) -> Pair:
    """Create the files that are served, with the first certificate and its key."""
    served = tmp_path / "tls.crt", tmp_path / "tls.key"
    put(pairs["first"], served)
    return served


def put(pair: Pair, served: Pair) -> None:
    """Replace both files, each in one step, as in a mounted secret."""
    for source, target in zip(pair, served, strict=True):
        fresh = target.with_suffix(".new")
        shutil.copy(source, fresh)
        fresh.replace(target)


def trusting(*pairs: Pair, versions: tuple[str, ...] = ("http/1.1",)) -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols([*versions])
    for chain, _ in pairs:
        context.load_verify_locations(chain)
    return context


def common_name(writer: asyncio.StreamWriter) -> str:
    subject = writer.get_extra_info("peercert")["subject"]
    return next(value for ((key, value),) in subject if key == "commonName")


class TlsClient(Client):
    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(port)
        self._context = context

    async def __aenter__(self) -> "TlsClient":
        self.reader, self.writer = await asyncio.open_connection(
            "localhost", self._port, ssl=self._context, family=socket.AF_INET
        )
        return self


async def test_both_ports_serve_over_tls_and_change_to_a_new_certificate(files: Pair, pairs: dict[str, Pair]) -> None:
    async with upstream() as up, AsyncExitStack() as exits:
        core = Gateway(compile_documents(documents([up.port])), limiter=EmbeddedLimiter(), sink=ListSink())
        exits.push_async_callback(core.close)
        certificates = Certificates(*files, http2=True)
        server = HttpServer(HttpLimits())
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
        await server.open(lambda: ClientConnection(server, core), sockets[0], tls=certificates.context)
        exits.push_async_callback(server.drain, 0.0)
        ingress = await serve_public(core, sockets[1], tls=certificates.context)
        exits.push_async_callback(ingress.drain, 0.0)
        context = trusting(*pairs.values())

        async def health(name: str) -> bytes:
            credentials = grpc.ssl_channel_credentials(pairs[name][0].read_bytes())
            async with grpc.aio.secure_channel(f"localhost:{ingress.port}", credentials) as channel:
                check = channel.unary_unary("/grpc.health.v1.Health/Check")
                answer: bytes = await check(b"", timeout=60)
                return answer

        body = bytes(range(256)) * 3000
        async with TlsClient(server.port, context) as old:
            protocol = old.writer.get_extra_info("ssl_object")
            assert (protocol.selected_alpn_protocol(), common_name(old.writer)) == ("http/1.1", "first")
            assert (await old.ask(INFER, body)).status == 200 and body in [seen.body for seen in up.seen]
            assert await health("first") == b"\x08\x01"
            put(pairs["second"], files)
            assert certificates.poll() and not certificates.poll()
            async with TlsClient(server.port, context) as new:
                assert common_name(new.writer) == "second"
                assert (await new.ask(INFER, b"x")).status == 200
            assert await health("second") == b"\x08\x01"
            with pytest.raises(grpc.aio.AioRpcError):
                await health("first")
            assert (await old.ask(INFER, b"y")).status == 200  # open connections are kept


async def test_one_port_serves_each_version_that_a_client_offers(files: Pair, pairs: dict[str, Pair]) -> None:
    """HTTP/2 if the client offers it, otherwise HTTP/1.1, also for a client that offers nothing."""
    async with upstream() as up, AsyncExitStack() as exits:
        core = Gateway(compile_documents(documents([up.port])), limiter=EmbeddedLimiter(), sink=ListSink())
        exits.push_async_callback(core.close)
        sock = socket.create_server(("127.0.0.1", 0))
        server = await serve_public(core, sock, tls=Certificates(*files, http2=True).context)
        exits.push_async_callback(server.drain, 0.0)
        body = bytes(range(256)) * 3000
        for http2, version in ((True, "HTTP/2"), (False, "HTTP/1.1")):
            context = ssl.create_default_context(cafile=str(pairs["first"][0]))
            async with httpx.AsyncClient(http2=http2, verify=context, trust_env=False, timeout=60) as client:
                url = f"https://localhost:{server.port}{INFER}"
                answer = await client.post(url, content=body, headers={"x-api-key": GOLD})
                assert (answer.status_code, answer.http_version) == (200, version)
                assert body in [seen.body for seen in up.seen]
                denied = await client.post(url, content=b"", headers={"x-api-key": "nobody's"})
                assert denied.status_code == 401 and denied.http_version == version
        context = ssl.create_default_context(cafile=str(pairs["first"][0]))
        async with TlsClient(server.port, context) as client:
            assert (await client.ask(INFER, body)).status == 200


async def test_old_versions_of_tls_are_cut_and_plain_http_is_answered_in_plain_http(files: Pair) -> None:
    server = HttpServer(HttpLimits())
    core = Gateway(compile_documents(documents([1])), limiter=EmbeddedLimiter(), sink=ListSink())
    await server.open(
        lambda: ClientConnection(server, core),
        socket.create_server(("127.0.0.1", 0)),
        tls=Certificates(*files, http2=True).context,
    )
    old = trusting((files[0], files[1]))
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("localhost", server.port, ssl=old, family=socket.AF_INET)
    for request in (b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n", b"PATCH / HTTP/1.1\r\n" + b"x" * 100_000, b"P"):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n") and b"this port speaks HTTPS only" in answer
        head, _, body = answer.partition(b"\r\n\r\n")
        assert json.loads(body)["error"]["request_id"].encode() in head
        writer.close()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"\x80\x01nothing that anybody speaks")
    try:
        assert b"HTTP" not in await reader.read()
    except ConnectionError:
        pass
    writer.close()
    await until(lambda: not server.connections and not server.handshakes)
    await server.drain(0.0)
    await core.close()


def test_a_pair_that_does_not_go_together_keeps_the_old_one_and_is_named_once(
    files: Pair, pairs: dict[str, Pair], caplog: pytest.LogCaptureFixture
) -> None:
    certificates = Certificates(*files, http2=True)
    before = certificates.pem
    with caplog.at_level(logging.INFO):
        put((pairs["second"][0], pairs["first"][1]), files)
        assert not certificates.poll() and not certificates.poll()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "the key is not the certificate's" in caplog.text and str(files[0].parent) not in caplog.text
        files[1].unlink()
        assert not certificates.poll() and not certificates.poll()
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 2
        files[1].write_text("nonsense")
        assert not certificates.poll()
        assert certificates.pem == before
        put(pairs["second"], files)
        assert certificates.poll() and certificates.pem[0] == pairs["second"][0].read_bytes()
        assert caplog.records[-1].levelname == "INFO"


async def test_when_the_certificate_in_force_expires_is_a_metric(files: Pair, pairs: dict[str, Pair]) -> None:
    core = Gateway(compile_documents(documents([1])), limiter=EmbeddedLimiter(), sink=ListSink())
    certificates = Certificates(*files, http2=True)
    transport = httpx.ASGITransport(admin_app(core, certificates=certificates))  # type: ignore[arg-type]  # ASGI

    async def exposed() -> float:
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8082") as client:
            text = (await client.get("/metrics")).text
        (line,) = re.findall(r"(?m)^oriel_gateway_certificate_expires_timestamp_seconds (.+)$", text)
        return float(line)

    def ends(chain: Path) -> float:
        done = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", chain], capture_output=True, text=True)
        return ssl.cert_time_to_seconds(done.stdout.strip().removeprefix("notAfter="))

    assert await exposed() == ends(pairs["first"][0])
    chain = pairs["second"][0].read_bytes() + pairs["first"][0].read_bytes()
    files[0].write_bytes(chain)
    shutil.copy(pairs["second"][1], files[1])
    assert certificates.poll()
    assert await exposed() == min(ends(pairs[name][0]) for name in ("first", "second"))
    await core.close()


@pytest.mark.parametrize("broken", ["missing", "mixed", "half"])
async def test_without_a_usable_pair_nothing_starts(
    broken: str, files: Pair, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    cert, key = files
    if broken == "missing":
        cert.unlink()
    elif broken == "mixed":
        shutil.copy(pairs["second"][1], key)
    policies = tmp_path / "policies"
    policies.mkdir()
    (policies / "all.toml").write_bytes(documents([1])["all.toml"])
    settings = Settings(policies=policies, tls_cert=cert, tls_key=None if broken == "half" else key)
    with pytest.raises(StartFailed, match="--tls-key") as refused:
        await serve(settings, asyncio.Event())
    assert str(tmp_path) not in str(refused.value)


async def test_the_command_serves_tls_and_looks_at_its_files(
    files: Pair, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    words = ("--tls-cert", str(files[0]), "--tls-key", str(files[1]))
    async with upstream() as up, gateway_process(tmp_path, documents([up.port]), *words, plain=False) as process:
        context = trusting(*pairs.values())
        body = bytes(700_000)
        async with TlsClient(process.port, context) as client:
            for _ in range(2):
                assert (await client.ask(INFER, body)).status == 200 and body in [seen.body for seen in up.seen]
            put(pairs["second"], files)

            async def renewed() -> bool:
                async with TlsClient(process.port, context) as late:
                    assert (await late.ask(INFER)).status == 200
                    return common_name(late.writer) == "second"

            await until(renewed)
            assert (await client.ask(INFER)).status == 200


async def test_a_handshake_that_does_not_go_on_is_cut(files: Pair) -> None:
    server = HttpServer(HttpLimits(head_timeout_s=0.1))
    core = Gateway(compile_documents(documents([1])), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.create_server(("127.0.0.1", 0))
    await server.open(lambda: ClientConnection(server, core), sock, tls=Certificates(*files, http2=True).context)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"\x16\x03\x01")
    try:
        async with asyncio.timeout(60):
            assert await reader.read() == b""
    except ConnectionError:
        pass
    writer.close()
    await server.drain(0.0)
    await core.close()


async def test_handshakes_that_do_not_go_on_take_no_place_from_others(files: Pair, pairs: dict[str, Pair]) -> None:
    """Connections count from the start of their handshake; otherwise a few hundred could hold every file for ten
    seconds.
    """
    server = HttpServer(HttpLimits(max_connections=6))
    core = Gateway(compile_documents(documents([1])), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.create_server(("127.0.0.1", 0))
    await server.open(lambda: ClientConnection(server, core), sock, tls=Certificates(*files, http2=True).context)
    stalled = []
    for number in range(14):
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        if number % 2:
            writer.write(b"\x16\x03\x01")
        stalled.append(writer)
        async with asyncio.timeout(60), TlsClient(server.port, trusting(*pairs.values())) as client:
            assert (await client.ask("/v2/health/live", key=None, method="GET")).status == 200
            assert len(server.connections) + len(server.handshakes) <= 6
    for writer in stalled:
        writer.close()
    await until(lambda: not server.connections and not server.handshakes)
    await server.drain(0.0)
    await core.close()
