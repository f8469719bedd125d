"""Object stores on this machine: moto's server (S3), Google's emulator and Azurite, and a network that misbehaves.

The client under test speaks each store's own protocol. Tests write objects by plain HTTP, because a client library
would refuse some of their names.
"""

import asyncio
import base64
import hashlib
import hmac
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx
import pytest
from botocore.loaders import JSONFileLoader, Loader
from npm_packages import installed
from object_servers import tool
from tests.waiting import wait_until

from oriel_gateway.documents.source import store_location
from oriel_gateway.documents.stored import LIMITS, StoredDocuments
from oriel_wire.objects.client import ClientLimits, ObjectClient, location_of
from oriel_wire.objects.opening import open_client

if TYPE_CHECKING:
    from ..conftest import Run

ROOT = Path(__file__).resolve().parents[2]
BUCKET = "repository"
PAGE = 50  # objects in one page of a listing; few, so that a test sees several
# Azurite's one account and its published key.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VARIABLES = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"),
    *("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_KEY"),
)


@cache
def _load_once(path: str) -> Any:
    return _load_file(JSONFileLoader(), path)


@cache
def _list_once(kind: str) -> Any:
    return _list_services(Loader(), kind)


# Each client of S3 would otherwise parse the same megabytes of JSON and list the same hundreds of folders again.
# These take most of the time of a test with a stub.
_load_file, _list_services = JSONFileLoader.load_file, Loader.list_available_services
JSONFileLoader.load_file = lambda self, path: _load_once(path)
Loader.list_available_services = lambda self, type_name: _list_once(type_name)

# Runs a server in the background for as long as another process lives, however that one ends.
GUARD = """
import os, select, subprocess, sys
if os.fork():
    os._exit(0)
wanted = os.pidfd_open(int(sys.argv[1]))
server = subprocess.Popen(sys.argv[2:])
select.select([wanted, os.pidfd_open(server.pid)], [], [])
server.kill()
print("ended:", server.wait(), flush=True)
"""

# moto closes the file of an object that is replaced while another thread still answers for it, which then answers 500.
MOTO = """
from moto.s3.models import FakeKey
from moto.server import main
FakeKey.dispose = lambda self, garbage=False: None
main()
"""


class ObjectServer:
    """A server with one bucket. `environment` returns the variables that lead a client to the server, or to a proxy at
    `port`.
    """

    kind = ""

    def __init__(self, bucket: str = BUCKET, port: int = 0) -> None:
        self.bucket = bucket
        self.port = port
        self._http = httpx.Client(trust_env=False, timeout=60.0)

    @property
    def url(self) -> str:
        """The URL of everything in `bucket`."""
        return f"{self.kind}://{self.bucket}"

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self, port: int) -> dict[str, str]:
        raise NotImplementedError

    def address(self, key: str) -> str:
        raise NotImplementedError

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the query and the headers of a request that may write."""
        return {}, {}

    def start(self, log: Path, pid: int) -> None:
        """Start the server, which ends with the process `pid`. log: receives what the server prints.

        Skips the test if the server is not installed.
        """
        command = self.command()
        with log.open("wb") as output:
            guard = [sys.executable, "-S", "-c", GUARD, str(pid), *command]
            subprocess.run(guard, stdout=output, stderr=output, start_new_session=True, check=True)

        def printed_port() -> str | None:
            text = log.read_text()
            if "ended: " in text:
                raise RuntimeError(f"{command[0]} did not start: {text[-500:]}")
            found = re.search(r"(?:listening on |http://127\.0\.0\.1:)([0-9]+)\D", text)
            return found and found[1]

        self.port = int(wait_until(printed_port))

    def make_bucket(self) -> None:
        self._request("PUT", self.address(""), params=self.bucket_query())

    def bucket_query(self) -> dict[str, str]:
        return {}

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

    def command(self) -> list[str]:
        # AWS's managed policies are left out by default.
        variables = ["env", "MOTO_IAM_LOAD_MANAGED_POLICIES=true"]
        return [*variables, tool("python"), "-u", "-c", MOTO, "-H", "127.0.0.1", "-p", "0"]

    def environment(self, port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ACCESS_KEY_ID": "of-a-test",
            "AWS_SECRET_ACCESS_KEY": "s3cret-of-a-test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{self.bucket}" + (f"/{quote(key, safe='/')}" if key else "")

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """moto checks that there is a signature, but not what it says."""
        scope = "of-a-test/20260101/us-east-1/s3/aws4_request"
        return {}, {"authorization": f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"}


class Google(ObjectServer):
    kind = "gs"

    def command(self) -> list[str]:
        return [tool("python"), str(ROOT / "tests/conformance/gcs_server.py")]

    def environment(self, port: int) -> dict[str, str]:
        return {"STORAGE_EMULATOR_HOST": f"127.0.0.1:{port}"}

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{self.bucket}" + (f"/{quote(key, safe='')}" if key else "")


class Azurite(ObjectServer):
    kind = "az"

    @property
    def url(self) -> str:
        return f"az://{ACCOUNT}/{self.bucket}"

    def command(self) -> list[str]:
        node, program = azurite()
        # No flag sets how many objects a page of a listing has.
        code = f"require('{program}/utils/constants').DEFAULT_LIST_BLOBS_MAX_RESULTS = {PAGE};"
        code += f"require('{program}/main')"
        flags = ["--blobPort", "0", "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
        return [node, "-e", code, "--", "azurite", *flags]

    def environment(self, port: int) -> dict[str, str]:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        return {"AZURE_STORAGE_ENDPOINT": endpoint, "AZURE_STORAGE_ACCOUNT_KEY": ACCOUNT_KEY}

    def address(self, key: str) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}/{self.bucket}" + (f"/{quote(key, safe='')}" if key else "")

    def bucket_query(self) -> dict[str, str]:
        return {"restype": "container"}

    def sign(self) -> tuple[dict[str, str], dict[str, str]]:
        """Sign with an account SAS, see "Create an account SAS" in Azure's reference, version 2021-08-06."""
        fields = {"sp": "rwdlac", "ss": "b", "srt": "sco", "se": "2099-01-01T00:00:00Z", "sv": "2021-08-06"}
        lines = [ACCOUNT, fields["sp"], fields["ss"], fields["srt"], "", fields["se"], "", "", fields["sv"], "", ""]
        digest = hmac.new(base64.b64decode(ACCOUNT_KEY), "\n".join(lines).encode(), hashlib.sha256).digest()
        return {**fields, "sig": base64.b64encode(digest).decode()}, {"x-ms-blob-type": "BlockBlob"}


SERVERS = {"s3": Moto, "gs": Google, "az": Azurite}


def azurite() -> tuple[str, Path]:
    """Return Node and the folder of Azurite's blob service, which is installed from the lock beside this file if
    needed.

    Skips the test if it cannot be installed.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on PATH: Azurite cannot run")
    return node, installed(ROOT / "tests/conformance/azurite/package-lock.json") / "azurite/dist/src/blob"


@contextmanager
def object_server(kind: str, run: "Run") -> Iterator[ObjectServer]:
    """Yield the server of this kind that the whole test run shares, with a new bucket."""

    def start() -> int:
        server: ObjectServer = SERVERS[kind]()
        server.start(run.folder / f"{kind}.log", run.pid)
        server.close()
        return server.port

    server: ObjectServer = SERVERS[kind](f"{BUCKET}-{secrets.token_hex(4)}", run.once(f"store-{kind}", start))
    try:
        server.make_bucket()
        yield server
    finally:
        server.close()


def point_to(monkeypatch: pytest.MonkeyPatch, server: ObjectServer, port: int | None = None) -> None:
    """Make clients that are created from now on use `server`, or what listens at `port` instead of it."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environment(port or server.port).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Stub:
    """A server that sends one answer (`head`, `body`) and then nothing more.

    asked: set when a client has sent a request. left: set when a client has closed its connection.
    """

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
    """Return a client for the bucket of `url`, and the prefix of its keys."""
    location = location_of(url)
    return open_client(location, limits), location.prefix


def documents_at(url: str) -> StoredDocuments:
    """Return the policy documents at `url`, read as a gateway reads them."""
    location = store_location(url)
    return StoredDocuments(location, open_client(location, LIMITS))
