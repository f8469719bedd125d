"""R30: everything that a busy gateway process wrote is searched for every secret that it was given.

The same process shows that keys come and go, and that bad documents change nothing, while it serves.
"""

import asyncio
import json
import os
import signal
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from oriel_cli.up.units import free_ports

from ..waiting import until
from .gate import INFER
from .grpc_stack import infer
from .stack import Client, Upstream, digest, documents, upstream
from .tokens import issuer_table, jwk, key_set, token

pytestmark = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="looks at the process in /proc")
GOLD, REVOKED, WRONG = "oriel_gold-secret-1", "oriel_revoked-secret-2", "oriel_wrong-secret-3"
PASTED, QUERY, PROXY = "oriel_pasted-secret-4", "oriel_query-secret-5", "oriel_proxy-secret-6"


@contextmanager
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Yield an OTLP collector that keeps what it receives, decompressed; it also answers GET as an issuer of tokens."""
    got: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            got.append(zlib.decompress(data, 31) if self.headers.get("content-encoding") == "gzip" else data)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            keys = key_set(jwk("ES256"))
            self.send_response(200)
            self.send_header("content-length", str(len(keys)))
            self.end_headers()
            self.wfile.write(keys)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Running:
    """A gateway process: its ports, and all that it wrote once it has ended."""

    def __init__(self, process: asyncio.subprocess.Process, http: int, grpc: int, admin: int) -> None:
        self.process = process
        self.http, self.grpc, self.admin = http, grpc, admin
        self.wrote = b""


@asynccontextmanager
async def running(folder: Path, **environment: str) -> AsyncIterator[Running]:
    http, grpc, admin = free_ports("127.0.0.1", 3)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "oriel_cli.main", "gateway", "--policies", str(folder)),
        *("--http-port", str(http), "--grpc-port", str(grpc), "--admin-port", str(admin)),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    it = Running(process, http, grpc, admin)
    assert process.stdout is not None
    try:
        while b"serving" not in it.wrote:
            line = await process.stdout.readline()
            assert line, it.wrote
            it.wrote += line
        yield it
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        it.wrote += (await process.communicate())[0]


def written(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / f".{name}").write_bytes(data)
        os.replace(folder / f".{name}", folder / name)


async def test_nothing_a_busy_gateway_writes_holds_a_secret(tmp_path: Path) -> None:
    async with upstream() as up:
        with collector() as (endpoint, spans):
            await search(up, tmp_path, endpoint, spans)


async def search(up: Upstream, tmp_path: Path, endpoint: str, spans: list[bytes]) -> None:
    extra = f'[tenants.r]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest(REVOKED)}", name = "old" }}]\n'
    text = documents([up.port], extra=extra + issuer_table(f"{endpoint}/keys"))["all.toml"]
    text = text.replace(digest("key-gold").encode(), digest(GOLD).encode())
    written(tmp_path, {"all.toml": text})
    good, bad = token(), token(number=1)
    secrets = [GOLD, REVOKED, WRONG, PASTED, QUERY, PROXY, good, bad]
    answers: list[bytes] = []
    settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "ORIEL_LOG_LEVEL": "DEBUG"}
    settings |= {"OTEL_EXPORTER_OTLP_COMPRESSION": "none", "OTEL_TRACES_SAMPLER_ARG": "1"}
    async with running(tmp_path, **settings) as it:
        answers += await busy(it, good, bad)
        await revoke(it, tmp_path, text)
        answers += await bad_documents(it, tmp_path, text)
        command = Path(f"/proc/{it.process.pid}/cmdline").read_bytes()
    assert it.process.returncode == 0, it.wrote
    assert b"oriel-gateway" in b"".join(spans), "no span came, so nothing is proven"
    assert b"not usable" in it.wrote, "no log line came, so nothing is proven"
    everything = b"\n".join([it.wrote, command, *spans, *answers])
    assert [secret for secret in secrets if secret.encode() in everything] == []
    upstreams = "".join(seen.head for seen in up.seen)
    # The query is the client's own message to the upstream; its credentials are not.
    assert [secret for secret in secrets if secret in upstreams] == [QUERY]


async def busy(it: Running, good: str, bad: str) -> list[bytes]:
    """Make calls of every kind, served and refused; returns all answers."""
    answers: list[bytes] = []
    async with Client(it.http) as client:

        async def keys_are_here() -> bool:
            return (await client.ask(INFER, key=good)).status != 503

        await until(keys_are_here)
        for key in (GOLD, REVOKED, good, GOLD, GOLD, GOLD):
            reply = await client.ask(f"{INFER}?api_key={QUERY}", key=key, headers=f"proxy-authorization: {PROXY}\r\n")
            assert reply.status == 200, reply.body
        # The key of `bad` may be a new one: its issuer is asked first.
        for key, status in ((WRONG, 401), (bad, 503), (f"{GOLD} {GOLD}", 401), ("x" * 5000 + GOLD, 401)):
            reply = await client.ask(INFER, key=key)
            assert reply.status == status
            answers.append(str(reply.headers).encode() + reply.body)
        for path, headers in (
            (f"/v2/models/{GOLD}x/ready/{GOLD}", ""),
            (INFER, f"x-api-key: {GOLD}\r\n"),
            (INFER, "x-request-timeout-ms: no\r\n"),
        ):
            reply = await client.ask(path, key=GOLD, headers=headers)
            assert reply.status in (400, 404)
            answers.append(str(reply.headers).encode() + reply.body)
    async with Client(it.http) as client:
        client.writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key : {GOLD}\r\n\r\n".encode())
        answers.append(await client.reader.read())
    for key in (GOLD, good, WRONG, bad):  # the upstream speaks no gRPC, so all four calls end in an error
        with pytest.raises(InferenceServerException) as caught:
            await infer(f"127.0.0.1:{it.grpc}", "digits", key, extra={"x-request-timeout-ms": "500"})
        answers.append(str(caught.value).encode())
    return answers


async def revoke(it: Running, folder: Path, text: bytes) -> None:
    """Take one of two keys out of the documents, while both are used on open connections."""
    async with Client(it.http) as stays, Client(it.http) as goes:
        for _ in range(3):
            assert (await goes.ask(INFER, key=REVOKED)).status == 200
        written(folder, {"all.toml": text.replace(digest(REVOKED).encode(), digest("its successor").encode())})

        async def revoked() -> bool:
            assert (await stays.ask(INFER, key=GOLD)).status == 200
            return (await goes.ask(INFER, key=REVOKED)).status != 200

        await until(revoked)
        assert (await goes.ask(INFER, key="its successor")).status == 200


async def bad_documents(it: Running, folder: Path, text: bytes) -> list[bytes]:
    """Load documents with a key in the wrong place, one after the other; returns what the admin port reports."""
    answers: list[bytes] = []
    wrong = [
        f"[tenants.x]\ntier = 'gold'\nkeys = [{{ sha256 = '{PASTED}' }}]\n",
        f"[tenants.x]\ntier = 'gold'\nkeys = ['{PASTED}']\n",
        f"[tenants.x]\ntier = 'gold'\nkeys = [{{ sha256 = '{PASTED}\n",
        f"[tenants.x]\ntier = 'gold'\nweight = '{PASTED}'\n",
    ]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{it.admin}", trust_env=False, timeout=60) as admin:
        for number, document in enumerate(wrong, 1):
            written(folder, {"wrong.toml": document.encode()})
            it.process.send_signal(signal.SIGHUP)

            async def refused(number: int = number) -> Any:
                found = (await admin.get("/policies")).json()
                return found if found["refused"] >= number else None

            report = await until(refused)
            assert report["mistakes"] and report["mistakes"][0]["file"] == "wrong.toml"
            answers.append(json.dumps(report).encode())
        async with Client(it.http) as client:
            assert (await client.ask(INFER, key=GOLD)).status == 200
        asked = ("/metrics", "/queues", "/policies", "/health/ready", "/health/live", f"/{GOLD}")
        answers += [(await admin.get(path, headers={"x-api-key": GOLD})).content for path in asked]
    return answers
