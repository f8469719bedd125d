"""A scripted Kubernetes API server for EndpointSlices: lists, watches in chunked JSON lines, and what goes wrong."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from oriel_wire.discovery.endpoint_slices import ApiServer

TOKEN = "first-token"
SERVICE = "kubernetes.io/service-name"


def endpoint(host: str, *, ready: bool | None = True, terminating: bool = False, pod: str = "") -> dict[str, Any]:
    conditions: dict[str, bool] = {} if ready is None else {"ready": ready, "serving": ready}
    if terminating:
        conditions["terminating"] = True
    more = {"targetRef": {"kind": "Pod", "uid": pod}} if pod else {}
    return {"addresses": [host], "conditions": conditions, "nodeName": "n", **more}


def piece(name: str, *endpoints: dict[str, Any], kind: str = "IPv4", service: str = "") -> dict[str, Any]:
    """A slice. service: whose; without it, it is in the answer for every service."""
    labels = {"labels": {SERVICE: service}} if service else {}
    return {
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "models", **labels},
        "addressType": kind,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000}],
    }


def event(kind: str, version: str, found: dict[str, Any]) -> bytes:
    found = {**found, "metadata": {**found.get("metadata", {}), "resourceVersion": version}}
    return json.dumps({"type": kind, "object": found}).encode() + b"\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def concerns(found: dict[str, Any], service: str) -> bool:
    """Whether a slice is in the answer for this service."""
    return bool(found["metadata"].get("labels", {}).get(SERVICE, service) == service)


class KubernetesApi:
    """The slices of a namespace.

    asked: for each request its path and query, with the token.
    lists, watches: how many there were. watching: watches that are open, with the service of each.
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
        self.watching: dict[asyncio.StreamWriter, str] = {}
        self._history: list[tuple[int, dict[str, Any], bytes]] = []
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
        line = event(kind, str(self.version), found)
        self._history.append((self.version, found, line))
        for writer, service in self.watching.items():
            if concerns(found, service):
                writer.write(chunk(line))

    def send(self, data: bytes) -> None:
        """Send these bytes as one chunk on every watch."""
        for writer in self.watching:
            writer.write(chunk(data))

    def end_watches(self) -> None:
        """End all watches as their time would."""
        for writer in list(self.watching):
            self.watching.pop(writer, None)
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
            self.watching.pop(writer, None)
            writer.close()

    def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        url = urlsplit(head.split(" ", 2)[1])
        query = parse_qs(url.query)
        token = next(line[22:] for line in head.split("\r\n") if line.lower().startswith("authorization: bearer "))
        self.asked.append((url.path, {**query, "token": [token]}))
        kind = "watch" if "watch" in query else "list"
        service = query["labelSelector"][0].partition("=")[2]
        status = self.refuse.get(kind) or (200 if token == self.token else 401)
        if kind == "watch":
            self.watches += 1
        else:
            self.lists += 1
        if status != 200:
            writer.write(b"HTTP/1.1 %d No\r\ncontent-length: 0\r\n\r\n" % status)
        elif kind == "list":
            items = [each for each in self.slices.values() if concerns(each, service)]
            found = {"metadata": {"resourceVersion": str(self.version)}, "items": items}
            body = json.dumps(found).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            if not self.deaf:
                self.watching[writer] = service
                since = int(query["resourceVersion"][0])
                lines = [line for version, found, line in self._history if version > since and concerns(found, service)]
                writer.writelines(map(chunk, lines))


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
