"""A scripted Kubernetes API server for EndpointSlices: lists, watches in chunked JSON lines, and what goes wrong."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oriel_wire.engine.endpoint_slices import ApiServer

TOKEN = "first-token"


def endpoint(host: str, *, ready: bool | None = True, terminating: bool = False, pod: str = "") -> dict[str, Any]:
    conditions: dict[str, bool] = {} if ready is None else {"ready": ready, "serving": ready}
    if terminating:
        conditions["terminating"] = True
    more = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [host], "conditions": conditions, "nodeName": "n", **more}


def piece(name: str, *endpoints: dict[str, Any], kind: str = "IPv4") -> dict[str, Any]:
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "models"},
        "addressType": kind,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000}],
    }


def event(kind: str, version: str, found: dict[str, Any]) -> bytes:
    found = {**found, "metadata": {**found.get("metadata", {}), "resourceVersion": version}}
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class KubernetesApi:
    """The slices of one service.

    asked: for each request its path and query, with the token.
    lists, watches: how many there were. watching: watches that are open.
    refuse: the status that answers the next requests, by "list" or "watch".
    deaf: watches that are opened from now on get nothing, as over a half-open connection.
    """

    def __init__(self) -> None:
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 100
        self.token = TOKEN
        self.asked: list[tuple[str, dict[str, list[str]]]] = []
        self.lists = self.watches = 0
        self.refuse: dict[str, int] = {}
        self.deaf = False
        self.watching: set[asyncio.StreamWriter] = set()
        self._history: list[tuple[int, bytes]] = []
        self._open: set[asyncio.StreamWriter] = set()

    def put(self, found: dict[str, Any]) -> None:
        """Add or change a slice, and announce it."""
        name = found["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.slices[name] = found
        self._announce(kind, found)

    def delete(self, name: str) -> None:
        self._announce("DELETED", self.slices.pop(name))

    def missed(self, found: dict[str, Any]) -> None:
        """Change a slice without announcing it."""
        self.version += 1
        self.slices[found["metadata"]["name"]] = found

    def _announce(self, kind: str, found: dict[str, Any]) -> None:
        self.version += 1
        self._history.append((self.version, event(kind, str(self.version), found)))
        self.send(self._history[-1][1])

    def send(self, data: bytes) -> None:
        """Send these bytes as one chunk on every watch."""
        for writer in self.watching:
            writer.write(chunk(data))

    def end_watches(self) -> None:
        """End all watches as their time would."""
        for writer in list(self.watching):
            self.watching.discard(writer)
            writer.write(b"0\r\n\r\n")

    def abort(self) -> None:
        """Cut all connections."""
        for writer in list(self._open):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                self._answer((await reader.readuntil(b"\r\n\r\n")).decode("ascii"), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._open.discard(writer)
            self.watching.discard(writer)
            writer.close()

    def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.split(" ", 2)[1])
        query = parse_qs(url.query)
        token = next(line[22:] for line in head.split("\r\n") if line.lower().startswith("authorization: bearer "))
        self.asked.append((url.path, {**query, "token": [token]}))
        kind = "watch" if "watch" in query else "list"
        status = self.refuse.get(kind) or (200 if token == self.token else 401)
        if kind == "watch":
            self.watches += 1
        else:
            self.lists += 1
        if status != 200:
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status)
        elif kind == "list":
            found = {"metadata": {"resourceVersion": str(self.version)}, "items": list(self.slices.values())}
            body = json.dumps(found).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            if not self.deaf:
                self.watching.add(writer)
                since = int(query["resourceVersion"][0])
                writer.writelines(chunk(line) for version, line in self._history if version > since)


@asynccontextmanager
async def kubernetes(folder: Path, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[KubernetesApi, ApiServer]]:
    """Yield a running API server, and where a pod finds it; `folder` becomes the pod's service account."""
    (folder / "token").write_text(TOKEN + "\n")
    (folder / "namespace").write_text("models")
    api = KubernetesApi()
    server = await asyncio.start_server(api.serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield api, ApiServer(f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}", folder)
    finally:
        server.close()
        api.abort()


def hosts(found: Sequence[Any] | None) -> list[str]:
    return [each.host for each in found or ()]
