"""The inference servers that the settings name: looks their addresses up again and again, and makes their clients."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial

from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.inference import InferenceServers
from oriel_logic.client.model_streams import StreamServers, stream_client
from oriel_wire.discovery.discovery import Address, Discovery, DiscoveryFailed, discovery_of
from oriel_wire.discovery.endpoint_slices import KUBERNETES, EndpointSlices
from oriel_wire.engine.client import HttpClient

_log = logging.getLogger(__name__)

MAX_CONNECTIONS = 256  # connections to one inference server, which cannot batch calls that wait here
MAX_GATEWAY_CONNECTIONS = 4096  # connections to one gateway, which neither counts nor orders calls that wait here


class Upstreams:
    """http, grpc: addresses or names of inference servers; a name stands for all its addresses, now and later.
    `kubernetes:SERVICE[.NAMESPACE]` as a name stands for the ready pods of that service.
    through_gateway: the addresses are those of gateways, which are called by the ticket of each request.
    """

    def __init__(self, http: Sequence[Address], grpc: Sequence[Address] = (), *, through_gateway: bool = False) -> None:
        endpoints: Endpoints[HttpClient] = Endpoints(
            partial(http_client, max_connections=MAX_GATEWAY_CONNECTIONS) if through_gateway else http_client
        )
        streams = Endpoints(stream_client)
        self.servers = InferenceServers(
            endpoints, StreamServers(streams, through_gateway=through_gateway), through_gateway=through_gateway
        )
        self.bind = self.servers.bind
        self._watches = (
            AddressWatch([_discovery(each) for each in http], endpoints.replace),
            AddressWatch([_discovery(each) for each in grpc], streams.replace),
        )

    async def start(self) -> None:
        """Look all names up once, then again and again. A name that is not found yet fails calls, not the start."""
        for watch in self._watches:
            await watch.start()

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()
        await self.servers.close()


def _discovery(address: Address) -> Discovery:
    host, port = address
    if host.startswith(KUBERNETES):
        return EndpointSlices(host.removeprefix(KUBERNETES), port)
    return discovery_of(address)


def http_client(address: Address, max_connections: int = MAX_CONNECTIONS) -> HttpClient:
    return HttpClient(host=address[0], port=address[1], max_connections=max_connections)


class AddressWatch:
    """Looks several discoveries up again and again, and reports the union of their addresses.

    found: called on the event loop with all addresses, each once, whenever they changed.
    """

    def __init__(self, discoveries: Sequence[Discovery], found: Callable[[Sequence[Address]], None]) -> None:
        self._discoveries = list(discoveries)
        self._found = found
        self._answers: dict[int, tuple[Address, ...]] = {}
        self._reported: tuple[Address, ...] = ()
        self._failing: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look all of them up once, then keep polling. A lookup that fails is logged, not raised."""
        self._tasks = [
            asyncio.create_task(each.run(), name="inference servers watch")
            for each in self._discoveries
            if isinstance(each, EndpointSlices)
        ]
        await asyncio.gather(*(self._lookup(index) for index in range(len(self._discoveries))))
        self._tasks += [
            asyncio.create_task(self._poll(index), name="inference servers lookup")
            for index, each in enumerate(self._discoveries)
            if each.every_s
        ]

    async def close(self) -> None:
        """Stop polling."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _poll(self, index: int) -> None:
        discovery = self._discoveries[index]
        while isinstance(discovery, EndpointSlices):
            await self._lookup(index)
            await discovery.wait_for_news()
        while True:
            await asyncio.sleep(discovery.every_s)
            await self._lookup(index)

    async def _lookup(self, index: int) -> None:
        try:
            self._answers[index] = await self._discoveries[index].lookup()
        except DiscoveryFailed as error:
            if index not in self._failing:
                self._failing.add(index)
                _log.warning("inference servers: %s; the previous addresses stay in use", error)
            return
        if index in self._failing:
            self._failing.discard(index)
            _log.info("inference servers: the lookup succeeds again")
        together = tuple(dict.fromkeys(address for each in sorted(self._answers) for address in self._answers[each]))
        if together != self._reported:
            self._reported = together
            self._found(together)
