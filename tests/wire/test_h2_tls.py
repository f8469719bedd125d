"""HTTP/2 and HTTP/1.1 on one TLS port: what the handshake chooses is what is spoken."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_wire.engine.limits import HttpLimits
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.tls import Certificates
from oriel_wire.h2.frames import GOAWAY, PREFACE, PROTOCOL_ERROR, SETTINGS
from oriel_wire.h2.limits import H2Limits

from ..gateway.certificates import certificate, needs_openssl
from ..waiting import until
from .engine_client import bound
from .h2.recorders import frames_of
from .h2_peers import HTTP1_ANSWER, App, Front, Library
from .judges import run

pytestmark = needs_openssl
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Ours = tuple[HttpServer, App, Path]


@pytest.fixture
async def ours(tmp_path: Path) -> AsyncIterator[Ours]:
    """A server, what it was asked, and its certificate."""
    chain, key = certificate(tmp_path, "here")
    app = App(H2Limits())
    server = HttpServer(HttpLimits())
    await server.open(lambda: Front(server, app), bound(), tls=Certificates(chain, key, http2=True).context)
    yield server, app, chain
    await server.drain(0.0)


def trusting(chain: Path, *protocols: str) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=chain)
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


async def talk(server: HttpServer, context: ssl.SSLContext, data: bytes, most: int = 2**20) -> tuple[str | None, bytes]:
    """What the handshake has chosen, and the first bytes of the answer, up to its end."""
    reader, writer = await asyncio.open_connection("localhost", server.port, ssl=context)
    chosen = writer.get_extra_info("ssl_object").selected_alpn_protocol()
    writer.write(data)
    got = b""
    while len(got) < most and (piece := await reader.read(most - len(got))):
        got += piece
    writer.transport.abort()
    return chosen, got


async def test_the_handshake_chooses_between_both_versions(ours: Ours) -> None:
    server, app, chain = ours
    for offered in ((), ("http/1.1",), ("http/0.9", "http/1.1")):
        chosen, got = await talk(server, trusting(chain, *offered), GET, len(HTTP1_ANSWER))
        assert (chosen or "http/1.1") == "http/1.1" and got == HTTP1_ANSWER
    for offered in (("h2",), ("http/1.1", "h2")):  # the server's order counts
        _, client = await server.loop.create_connection(
            lambda: Library(client=True), "localhost", server.port, ssl=trusting(chain, *offered)
        )
        stream_id = client.begin(b"/echo")
        client.send(stream_id, b"over TLS", [(b"x-end", b"1")])
        await until(lambda: stream_id in client.ended)  # noqa: B023
        assert client.bodies[stream_id] == b"over TLS"
        client.transport.close()
    assert len(app.connections) == 2


async def test_settings_are_sent_before_the_client_has_sent_anything(ours: Ours) -> None:
    server, _, chain = ours
    _, got = await talk(server, trusting(chain, "h2"), b"", 9)
    assert got[3] == SETTINGS


async def test_other_than_what_the_handshake_chose_is_refused(ours: Ours) -> None:
    server, app, chain = ours
    _, got = await talk(server, trusting(chain, "h2"), GET)
    last = frames_of(got)[-1]
    assert last.kind == GOAWAY and int.from_bytes(last.payload[4:8], "big") == PROTOCOL_ERROR
    for offered in ((), ("http/1.1",)):
        _, got = await talk(server, trusting(chain, *offered), PREFACE)
        assert got.startswith(b"HTTP/1.1 400 ")
    assert app.calls == []


async def test_a_listener_that_does_not_take_http2_does_not_offer_it(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "plain")
    app = App(H2Limits())
    server = HttpServer(HttpLimits())
    await server.open(lambda: Front(server, app), bound(), tls=Certificates(chain, key).context)
    chosen, got = await talk(server, trusting(chain, "h2", "http/1.1"), GET, len(HTTP1_ANSWER))
    assert chosen == "http/1.1" and got == HTTP1_ANSWER
    await server.drain(0.0)


# Judges that were not written here -----------------------------------------------------------------------------------


async def test_curl_negotiates_each_version(ours: Ours) -> None:
    server, _, chain = ours
    url = f"https://localhost:{server.port}/echo"
    common = ("curl", "--silent", "--show-error", "--max-time", "240", "--noproxy", "*", "--cacert", str(chain))
    written = ("--write-out", " %{http_version} %{http_code}")
    for option in ((), ("--http2",)):  # over TLS curl offers both by itself
        assert await run(*common, *option, *written, "--data", "hello", url) == "hello 2 200"
    assert await run(*common, "--http1.1", *written, url) == "h1 1.1 200"
    assert await run(*common, "--no-alpn", *written, url) == "h1 1.1 200"


async def test_h2load_finds_every_answer_over_tls(ours: Ours) -> None:
    server, app, _ = ours
    out = await run("h2load", "-n", "100", "-c", "4", "-m", "10", f"https://localhost:{server.port}/echo")
    assert "100 succeeded, 0 failed, 0 errored, 0 timeout" in out
    assert re.search("Application protocol: h2", out) and len(app.connections) == 4
