"""A TCP proxy that reads nothing of what it passes on: what two sockets cost on this loop, before any HTTP.

tcp_floor.py PORT UPSTREAM_PORT [CERTIFICATE KEY]: with the latter it ends TLS.
"""

import asyncio
import ssl
import sys

import uvloop


class Side(asyncio.Protocol):
    """One socket of a pair. `other` is None until the upstream's is open."""

    def __init__(self) -> None:
        self.other: asyncio.Transport | None = None
        self.early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self.early.append(data)
        else:
            self.other.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()


class Client(Side):
    """Accepted: makes a connection of its own to the upstream."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.connecting = asyncio.get_running_loop().create_task(self.connect())

    async def connect(self) -> None:
        upstream, side = await asyncio.get_running_loop().create_connection(Side, "127.0.0.1", int(sys.argv[2]))
        side.other = self.transport  # type: ignore[assignment]
        self.other = upstream
        upstream.writelines(self.early)


async def main() -> None:
    tls = None
    if sys.argv[3:]:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(*sys.argv[3:])
    await asyncio.get_running_loop().create_server(Client, "127.0.0.1", int(sys.argv[1]), backlog=1024, ssl=tls)
    await asyncio.Event().wait()


uvloop.run(main())
