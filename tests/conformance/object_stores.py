"""Real object stores on this machine: moto's server (S3), Google's emulator, Azurite. And a network that misbehaves.

Each speaks its own protocol to the client under test; what a test puts there goes by plain HTTP, with any name.
"""

import asyncio
import base64
import fcntl
import hashlib
import hmac
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from object_servers import tool

from oriel_gateway.documents.source import store_location
from oriel_gateway.documents.stored import LIMITS, StoredDocuments
from oriel_wire.objects.client import ClientLimits, ObjectClient, location_of
from oriel_wire.objects.opening import open_client

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "repository"
# Azurite's one account and its published key.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VARIABLES = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"),
    *("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY"),
)


class ObjectServer:
    """One server. url: of everything in `BUCKET`. environment: what a client needs to find it, at `port` of a proxy."""

    kind = ""
    url = ""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[str] | None = None
        self._http = httpx.Client(trust_env=False, timeout=30.0)

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self, port: int) -> dict[str, str]:
        raise NotImplementedError

    def address(self, key: str) -> str:
        raise NotImplementedError

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """Query and headers that a request with the right to write carries."""
        return {}, {}

    def start(self) -> None:
        """Raises the test's skip where the server is not installed. Again after `kill`: with nothing in it."""
        command = self.command()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self._process.stdout is not None
        said = ""
        for line in self._process.stdout:
            said += line
            if found := re.search(r"(?:listening on |http://127\.0\.0\.1:)([0-9]+)", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError(f"{command[0]} did not start: {said[-500:]}")
        self._said = ThreadPoolExecutor(1)
        self._said.submit(self._process.stdout.read)  # or it stops when the pipe is full
        self._request("PUT", self.address(""), params=self.bucket_query())

    def bucket_query(self) -> dict[str, str]:
        return {}

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._said.shutdown()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def close(self) -> None:
        self._http.close()

    def put(self, key: str, data: bytes) -> None:
        self._request("PUT", self.address(key), content=data)

    def put_many(self, objects: dict[str, bytes]) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(self.put, objects, objects.values()))

    def remove(self, key: str) -> None:
        self._request("DELETE", self.address(key))

    def _request(self, method: str, url: str, *, content: bytes = b"", params: dict[str, str] | None = None) -> None:
        query, headers = self.sign()
        answer = self._http.request(method, url, content=content, headers=headers, params={**query, **(params or {})})
        assert answer.status_code < 300, (method, url, answer.status_code, answer.text[:300])


class Moto(ObjectServer):
    kind = "s3"
    url = f"s3://{BUCKET}"

    def command(self) -> list[str]:
        return [tool("python"), "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]

    def environment(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "of-a-test",
            "AWS_SECRET_ACCESS_KEY": "s3cret-of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{BUCKET}" + (f"/{quote(key, safe='/')}" if key else "")

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """moto looks whether there is a signature, not at it."""
        scope = "of-a-test/20260101/us-east-1/s3/aws4_request"
        return {}, {"authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"}


class Google(ObjectServer):
    kind = "gs"
    url = f"gs://{BUCKET}"

    def command(self) -> list[str]:
        return [tool("python"), str(ROOT / "tests/conformance/gcs_server.py")]

    def environment(self, port: int) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{port}"}

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{BUCKET}" + (f"/{quote(key, safe='')}" if key else "")


class Azurite(ObjectServer):
    kind = "az"
    url = f"az://{ACCOUNT}/{BUCKET}"

    def command(self) -> list[str]:
        flags = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        return [*azurite(), *flags]

    def environment(self, port: int) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        return {"AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}/{BUCKET}" + (f"/{quote(key, safe='')}" if key else "")

    def bucket_query(self) -> dict[str, str]:
        return {"restype": "container"}

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """An account SAS: Azure's "Create an account SAS", version 2021-08-06."""
        fields = {"sp": "rwdlac", "ss": "b", "srt": "sco", "se": "2099-01-01T00:00:00Z", "sv": "2021-08-06"}
        lines = [ACCOUNT, fields["sp"], fields["ss"], fields["srt"], "", fields["se"], "", "", fields["sv"], "", ""]
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        return {**fields, "sig": base64.b64encode(digest).decode()}, {"x-ms-blob-type": "BlockBlob"}


SERVERS = {"s3": Moto, "gs": Google, "az": Azurite}


def azurite() -> list[str]:
    """The command of Azurite, installed from the lock beside this file if it is not there. Skips where it cannot be."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("no node or npm on PATH: Azurite cannot run")
    lock = ROOT / "tests/conformance/azurite/package-lock.json"
    folder = ROOT / "build" / f"azurite-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}"
    program = folder / "node_modules/azurite/dist/src/blob/main.js"
    if not program.exists() and (said := _install_azurite(npm, folder)):
        pytest.skip(f"Azurite cannot be installed from the npm registry: {said}")
    return [node, str(program)]


@cache
def _install_azurite(npm: str, folder: Path) -> str:
    """Why it cannot be; "" if it is there now. Made beside and moved in whole, by one test process at a time."""
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.exists():
            return ""
        beside = folder.with_suffix(".new")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        for name in ("package.json", "package-lock.json"):
            shutil.copy(ROOT / "tests/conformance/azurite" / name, beside)
        flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=0"]
        try:
            subprocess.run([npm, "ci", *flags], cwd=beside, capture_output=True, timeout=200, check=True)
        except subprocess.CalledProcessError as error:
            return error.stderr.decode(errors="replace").strip().partition("\n")[0] or "npm ci failed"
        except (OSError, subprocess.TimeoutExpired) as error:
            return type(error).__name__
        beside.rename(folder)
        return ""


@contextmanager
def object_server(kind: str) -> Iterator[ObjectServer]:
    server: ObjectServer = SERVERS[kind]()
    server.start()
    try:
        yield server
    finally:
        server.kill()
        server.close()


def point_to(monkeypatch: pytest.MonkeyPatch, server: ObjectServer, port: int | None = None) -> None:
    """Let clients made from now on find `server`, or what listens at `port` in its place."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment(port or server.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Stub:
    """A server of one answer: `head` and `body`, then silence until the client goes. asked, left: set when it did."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Stub":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.asked.set()
            writer.write(self._answer)
            await reader.read()  # until the client closes
            self.left.set()
        except (OSError, asyncio.IncompleteReadError):
            self.left.set()
        finally:
            writer.transport.abort()


def client_of(url: str, limits: ClientLimits | None = None) -> tuple[ObjectClient, str]:
    """A client for the bucket of `url`, and the prefix of its keys."""
    location = location_of(url)
    return open_client(location, limits), location.prefix


def documents_at(url: str) -> StoredDocuments:
    """The policy documents at `url`, as a gateway reads them."""
    location = store_location(url)
    return StoredDocuments(location, open_client(location, LIMITS))
