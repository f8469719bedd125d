"""The inference servers as a logic server is told of them: their addresses are looked up, their clients made."""

from collections.abc import Sequence

from oriel_logic.discovery import Address, Watch, discovery_of
from oriel_logic.endpoints import Client, Endpoints
from oriel_logic.inference import InferenceServers
from oriel_logic.model_streams import StreamClient, StreamServers
from oriel_wire.engine.client import HttpClient

__all__ = ["Upstreams"]

MAX_CONNECTIONS = 256  # to one inference server: it cannot batch what waits here


class Upstreams:
    """http, grpc: addresses or names of inference servers; a name stands for all addresses it has, now and later."""

    def __init__(self, http: Sequence[Address], grpc: Sequence[Address] = ()) -> None:
        endpoints: Endpoints[Client] = Endpoints(http_client)
        streams: Endpoints[StreamClient] = Endpoints(StreamClient)
        self.servers = InferenceServers(endpoints, StreamServers(streams))
        self._watches = (
            Watch([discovery_of(each) for each in http], endpoints.replace),
            Watch([discovery_of(each) for each in grpc], streams.replace),
        )

    async def start(self) -> None:
        """Look all names up once, then again and again. A name that is not found yet is no error: calls say so."""
        for watch in self._watches:
            await watch.start()

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()
        await self.servers.close()


def http_client(address: Address) -> HttpClient:
    return HttpClient(host=address[0], port=address[1], max_connections=MAX_CONNECTIONS)
