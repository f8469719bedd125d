"""The addresses of upstream servers: the `Discovery` interface, a fixed list, DNS, and a double for tests.

Only policy documents and settings name upstreams: no header, body or redirect can. The result of a lookup stays valid
until the next lookup that succeeds, so that the failure of a name server removes no endpoint. That a name does not
exist is no failure: a headless Kubernetes service without ready pods has no name, and whoever gets the addresses of
its former pods must not be asked in their place.

The watch of a Kubernetes service, which has no delay, is in `oriel_wire.discovery.endpoint_slices`.
"""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

Address = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]

DNS_EVERY_S = 5.0
DNS_TIMEOUT_S = 5.0
MAX_ADDRESSES = 4096
_NO_SUCH_NAME = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class DiscoveryFailed(Exception):
    """A lookup gave no answer; the text is the reason. The previous answer stays valid."""


class Discovery(Protocol):
    """Looks endpoints up. every_s: seconds between lookups, 0.0 if the answer never changes."""

    every_s: float

    async def lookup(self) -> tuple[Address, ...]:
        """All current addresses, each once, sorted, at most MAX_ADDRESSES. Takes a bounded time.

        Raises DiscoveryFailed. A cancelled lookup leaves nothing behind.
        """


class StaticDiscovery:
    """A fixed list of addresses."""

    every_s = 0.0

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(sorted(set(addresses)))[:MAX_ADDRESSES]

    async def lookup(self) -> tuple[Address, ...]:
        return self._addresses


async def _getaddrinfo(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class DnsDiscovery:
    """Every address of a name (A and AAAA), as a headless Kubernetes service publishes its pods. None if there is no
    such name.

    resolve: called like `loop.getaddrinfo`, which returns no times to live; hence the fixed interval `every_s`.
    timeout_s: seconds allowed for one lookup.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        every_s: float = DNS_EVERY_S,
        timeout_s: float = DNS_TIMEOUT_S,
        resolve: Resolve = _getaddrinfo,
    ) -> None:
        self.every_s = every_s
        self._host = host
        self._port = port
        self._timeout_s = timeout_s
        self._resolve = resolve

    async def lookup(self) -> tuple[Address, ...]:
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._resolve(self._host, self._port)
        except TimeoutError as error:
            raise DiscoveryFailed(f"{self._host} was not resolved within {self._timeout_s:g} s") from error
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_NAME:
                return ()
            raise DiscoveryFailed(f"{self._host} cannot be resolved: {error}") from error
        except (OSError, UnicodeError) as error:
            raise DiscoveryFailed(f"{self._host} cannot be resolved: {error}") from error
        addresses = sorted({(str(entry[4][0]), self._port) for entry in found})
        if not addresses:
            raise DiscoveryFailed(f"{self._host} has no addresses")
        return tuple(addresses[:MAX_ADDRESSES])


def discovery_of(address: Address) -> Discovery:
    """A fixed address for an IP address or `localhost`; DNS for any other name, which stands for all its addresses."""
    host, port = address
    if host == "localhost":
        return StaticDiscovery([address])
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return DnsDiscovery(host, port)
    return StaticDiscovery([address])
