"""The pods of a Kubernetes service, from a watch of its EndpointSlices: known as soon as the cluster knows them.

`SliceTable` holds the rules, without I/O. `EndpointSlices` lists the slices of one service and then watches them
(https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes): the API server sends one
JSON object per line, also bookmarks, which only carry the newest version. If it does not keep the changes since our
version any more (code 410), the slices are listed again.

Addresses that were found stay valid while the API server cannot be asked. Everything that comes from it is bounded in
size.
"""

import asyncio
import functools
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import random
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import msgspec

from oriel_wire.discovery.discovery import MAX_ADDRESSES, Address, DiscoveryFailed

if TYPE_CHECKING:
    import httpx

_log = logging.getLogger(__name__)

KUBERNETES: Final = "kubernetes:"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_S: Final = 60  # the API server ends each watch after so long, so that a connection without a peer is found out
LATE: Final = 1.2  # times that, after which an answer that has not ended is given up
CONNECT_S: Final = 5.0
FIRST_S: Final = 5.0
WAIT_S: Final = 1.0  # after the first failure; twice as long after each further one
LONGEST_WAIT_S: Final = 30.0
MAX_LIST_BYTES: Final = 32 * 1024 * 1024
MAX_LINE_BYTES: Final = 4 * 1024 * 1024  # etcd keeps no object above 1.5 MiB
MAX_TOKEN_BYTES: Final = 64 * 1024
MAX_SLICES: Final = 1024
_GONE: Final = 410
# A host that vanished is found out within half a minute.
_KEEPALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
_SERVICE: Final = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?", re.ASCII)


def is_service(name: str) -> bool:
    """Return whether `name` is SERVICE or SERVICE.NAMESPACE, of names that Kubernetes allows."""
    return _SERVICE.fullmatch(name) is not None


class Listed(NamedTuple):
    """One address of a service. ready: True if Kubernetes says so. pod: the UID of the pod; "" if there is none."""

    host: str
    ready: bool
    pod: str


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct):
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Target | None = None


class _Metadata(msgspec.Struct, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Metadata
    address_type: str = ""
    endpoints: list[_Endpoint] | None = None


class _List(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _ListAgain(Exception):
    """The API server does not keep the changes since our version."""


class _BadAnswer(Exception):
    """An answer that cannot be used; the text says why."""


class SliceTable:
    """The slices of one service. version: the version of the newest change that is in it."""

    def __init__(self) -> None:
        self._slices: dict[str, tuple[Listed, ...]] = {}
        self.version = ""

    def replace(self, answer: bytes) -> None:
        """Take over the answer to a list request. Raises msgspec.DecodeError, then nothing has changed."""
        found = msgspec.json.decode(answer, type=_List)
        self._slices = {each.metadata.name: tuple(_listed(each)) for each in (found.items or ())[:MAX_SLICES]}
        self.version = found.metadata.resource_version

    def apply(self, line: bytes) -> bool:
        """Take over one line of a watch. Returns whether a slice changed.

        Raises msgspec.DecodeError, `_ListAgain`, or `_BadAnswer` for an error of the API server; then nothing has
        changed. Events of types that are not known are ignored.
        """
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == _GONE:
                raise _ListAgain
            raise _BadAnswer(f"the watch ended with code {status.code}: {status.message[:200]}")
        if event.type not in ("ADDED", "MODIFIED", "DELETED", "BOOKMARK"):
            return False
        piece = msgspec.json.decode(event.object, type=_Slice)
        before = self._slices.get(piece.metadata.name)
        after = None if event.type in ("DELETED", "BOOKMARK") else tuple(_listed(piece))
        self.version = piece.metadata.resource_version or self.version
        if event.type == "BOOKMARK" or before == after:
            return False
        if after is None:
            del self._slices[piece.metadata.name]
        elif before is not None or len(self._slices) < MAX_SLICES:
            self._slices[piece.metadata.name] = after
        return True

    def found(self) -> tuple[Listed, ...]:
        """Return the union of the slices: each address once, sorted, at most MAX_ADDRESSES.

        While a pod moves between slices both may list it: it is ready if one of them says so.
        """
        union: dict[str, Listed] = {}
        for listed in self._slices.values():
            for each in listed:
                known = union.get(each.host)
                if known is None or (each.ready and not known.ready):
                    union[each.host] = each
        return tuple(sorted(union.values()))[:MAX_ADDRESSES]


def _listed(piece: _Slice) -> Iterator[Listed]:
    """Yield what a slice lists, without endpoints that are terminating: they get nothing new."""
    if piece.address_type not in ("IPv4", "IPv6"):
        return
    for endpoint in piece.endpoints or ():
        conditions = endpoint.conditions or _Conditions()
        if conditions.terminating or not endpoint.addresses:
            continue
        host = endpoint.addresses[0]  # Kubernetes treats several as interchangeable
        try:
            ipaddress.ip_address(host)
        except ValueError:
            continue
        ready = conditions.ready is not False  # absent means ready
        yield Listed(host, ready, endpoint.target_ref.uid if endpoint.target_ref is not None else "")


class LineBuffer:
    """Cuts a stream into lines without keeping more than one that is incomplete."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that end in `piece`, without empty ones.

        Raises _BadAnswer if a line grows beyond MAX_LINE_BYTES.
        """
        *whole, last = piece.split(b"\n")
        if whole:
            whole[0] = b"".join((*self._parts, whole[0]))
            self._parts, self._size = [], 0
        self._parts.append(last)
        self._size += len(last)
        if max(self._size, *map(len, whole), 0) > MAX_LINE_BYTES:
            raise _BadAnswer(f"a line of the watch is longer than {MAX_LINE_BYTES} bytes")
        return [line for line in whole if line]


@dataclass(frozen=True, slots=True)
class ApiServer:
    """Address of the Kubernetes API. account: the folder with `token`, `ca.crt` and `namespace`; they may change."""

    url: str
    account: Path = ACCOUNT

    @classmethod
    def of_pod(cls, environment: Mapping[str, str] = os.environ) -> "ApiServer":
        """Return the API server of the cluster that this process runs in. Raises DiscoveryFailed outside of a pod."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise DiscoveryFailed("KUBERNETES_SERVICE_HOST is not set: kubernetes: addresses are for pods of a cluster")
        return cls(f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}")

    def read(self, name: str) -> str:
        """Return the content of a file of the service account. Raises DiscoveryFailed."""
        try:
            with (self.account / name).open("rb") as file:
                text = file.read(MAX_TOKEN_BYTES).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise DiscoveryFailed(f"{self.account / name} cannot be read: is the pod's token mounted?") from error
        if not text or not text.isprintable():
            raise DiscoveryFailed(f"{self.account / name} is empty or damaged")
        return text

    def tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context for the API server's certificate; False over plain HTTP. Raises DiscoveryFailed."""
        if self.url.startswith("http://"):  # a proxy on this host, such as `kubectl proxy`
            return False
        try:
            return ssl.create_default_context(cafile=self.account / "ca.crt")
        except (OSError, ssl.SSLError) as error:
            raise DiscoveryFailed(f"{self.account / 'ca.crt'} cannot be read") from error


class EndpointSlices:
    """Watches one Kubernetes service while `run` runs. As a `Discovery` it lists the service's ready pods.

    service: SERVICE or SERVICE.NAMESPACE, by default in the namespace of this pod.
    port: the pods' port, for `lookup`.
    changed: called on the loop whenever `found` has changed.
    watch_s: seconds after which the API server ends a watch, and another one begins.
    found: the pods that are not terminating; None until they have been listed once.
    failure: why the API server cannot be asked at present; "" if it can.
    """

    every_s = FIRST_S

    def __init__(
        self,
        service: str,
        port: int = 0,
        *,
        changed: Callable[[], None] = lambda: None,
        api: Callable[[], ApiServer] = ApiServer.of_pod,
        watch_s: float = WATCH_S,
        wait_s: float = WAIT_S,
    ) -> None:
        self.found: tuple[Listed, ...] | None = None
        self.failure = ""
        self._service = service
        self._port = port
        self._changed = changed
        self._api = api
        self._watch_s = watch_s
        self._wait_s = wait_s
        self._table = SliceTable()
        self._failures = 0
        self._news = asyncio.Event()

    async def lookup(self) -> tuple[Address, ...]:
        """Return the addresses of the ready pods as they are known now; waits for the first answer only.

        Raises DiscoveryFailed if the API server has not answered yet.
        """
        try:
            async with asyncio.timeout(FIRST_S):
                while self.found is None and not self.failure:
                    await self.wait_for_news()
        except TimeoutError:
            pass
        if self.found is None:
            reason = self.failure or f"no answer within {FIRST_S:g} s"
            raise DiscoveryFailed(f"the pods of service {self._service} are not known: {reason}"[:500])
        return tuple((each.host, self._port) for each in self.found if each.ready)

    async def wait_for_news(self) -> None:
        """Wait until `found` or `failure` changes."""
        await self._news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def run(self) -> NoReturn:
        """List and watch until cancelled. Failures are logged once each, and tried again ever more slowly."""
        import httpx  # only here: it is large, and most processes look names up in DNS or have a fixed list

        while True:
            try:
                async with self._client() as client:
                    await self._list(client)
                    while True:
                        await self._watch(client)
            except _ListAgain:
                self._failures += 1  # the first time at once
                if self._failures == 1:
                    continue
            except TimeoutError:
                self._failed(f"an answer did not end within {LATE * self._watch_s:g} s")
            except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, OSError) as error:
                self._failed(f"{type(error).__name__}: {error}")
            except (_BadAnswer, DiscoveryFailed) as error:
                self._failed(str(error))
            except Exception as error:  # without this task the pool would never change again
                _log.exception("following the EndpointSlices of %s failed unexpectedly", self._service)
                self._failed(f"{type(error).__name__}: {error}")
            longest_s = min(LONGEST_WAIT_S, self._wait_s * 2.0 ** min(16, max(0, self._failures - 1)))
            await asyncio.sleep(longest_s * (0.5 + 0.5 * random()))

    def _failed(self, failure: str) -> None:
        self._failures += 1
        failure = failure[:300]
        if failure != self.failure:
            stays = "" if self.found is None else "; the last known addresses stay in use"
            _log.warning("EndpointSlices of %s: %s%s", self._service, failure, stays)
        self.failure = failure
        self._tell()

    def _found(self) -> None:
        found = self._table.found()
        recovered, self.failure = bool(self.failure), ""
        if recovered:
            _log.info("EndpointSlices of %s are followed again", self._service)
        if found != self.found:
            self.found = found
            self._tell()
            self._changed()
        elif recovered:
            self._tell()

    @asynccontextmanager
    async def _client(self) -> "AsyncIterator[Callable[..., Any]]":
        """Yield a function that asks for the slices of the service, over one connection."""
        import httpx

        api = self._api()
        name, _, namespace = self._service.partition(".")
        namespace = namespace or await asyncio.to_thread(api.read, "namespace")
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        transport = httpx.AsyncHTTPTransport(
            verify=await asyncio.to_thread(api.tls), trust_env=False, socket_options=_KEEPALIVE
        )
        timeout = httpx.Timeout(CONNECT_S, read=None)
        async with httpx.AsyncClient(base_url=api.url, transport=transport, timeout=timeout) as client:
            yield functools.partial(self._ask, client, api, path, f"kubernetes.io/service-name={name}")

    async def _ask(
        self, client: "httpx.AsyncClient", api: ApiServer, path: str, selector: str, **more: str
    ) -> "httpx.Response":
        token = await asyncio.to_thread(api.read, "token")  # each time: the kubelet replaces it
        headers = {"authorization": f"Bearer {token}", "accept": "application/json", "accept-encoding": "identity"}
        request = client.build_request("GET", path, params={"labelSelector": selector, **more}, headers=headers)
        response = await client.send(request, stream=True)
        if response.status_code == 200:
            return response
        await response.aclose()
        if response.status_code == _GONE:
            raise _ListAgain
        hint = {
            401: ": it does not know the token",
            403: ": the service account needs a Role with get, list and watch of endpointslices",
        }.get(response.status_code, "")
        raise _BadAnswer(f"the Kubernetes API answers {response.status_code}{hint}")

    async def _list(self, ask: Callable[..., Any]) -> None:
        async with asyncio.timeout(LATE * self._watch_s):
            response = await ask()
            try:
                answer = bytearray()
                async for data in response.aiter_raw():
                    answer += data
                    if len(answer) > MAX_LIST_BYTES:
                        raise _BadAnswer(f"the list of EndpointSlices is larger than {MAX_LIST_BYTES} bytes")
            finally:
                await response.aclose()
        self._table.replace(bytes(answer))
        self._found()

    async def _watch(self, ask: Callable[..., Any]) -> None:
        """Follow changes until the API server ends the watch. The time is bounded as a whole: a peer that is gone says
        nothing, and one that sends byte after byte says nothing either.
        """
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        heard = False
        lines = LineBuffer()
        async with asyncio.timeout(LATE * self._watch_s):
            response = await ask(
                watch="1",
                allowWatchBookmarks="true",
                resourceVersion=self._table.version,
                timeoutSeconds=str(max(1, round(self._watch_s))),
            )
            try:
                async for piece in response.aiter_raw():
                    changed = False
                    for line in lines.feed(piece):
                        changed = self._table.apply(line) or changed
                        heard = True
                        self._failures = 0
                    if changed:
                        self._found()
            finally:
                await response.aclose()
        if not heard and loop.time() - began_s < min(1.0, self._watch_s):
            raise _BadAnswer("the Kubernetes API ends the watch at once")
        self._failures = 0
