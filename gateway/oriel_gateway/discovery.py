"""Where the endpoints of a pool are: the `Discovery` seam, from the document and from DNS, and its double.

Only documents name upstreams: no header, body or redirect can. What a lookup found stays true until the next one that
succeeds, so that a name server's failure takes nothing away.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

__all__ = ["Address", "Discovery", "DiscoveryFailed", "DnsDiscovery", "ScriptedDiscovery", "StaticDiscovery"]

Address = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]

DNS_EVERY_S = 5.0
DNS_TIMEOUT_S = 5.0
MAX_ADDRESSES = 4096


class DiscoveryFailed(Exception):
    """A lookup gave no answer; the text says why. The previous answer stands."""


class Discovery(Protocol):
    """Looks endpoints up. every_s: seconds until the next lookup is worth while, 0.0 = the answer never changes."""

    every_s: float

    async def lookup(self) -> tuple[Address, ...]:
        """All addresses now, each once, sorted, at most MAX_ADDRESSES. Raises DiscoveryFailed; bounded in time.

        Cancelling it leaves nothing behind.
        """


class StaticDiscovery:
    """The addresses a document lists."""

    every_s = 0.0

    def __init__(self, addresses: Sequence[Address]) -> None:
        self._addresses = tuple(sorted(set(addresses)))[:MAX_ADDRESSES]

    async def lookup(self) -> tuple[Address, ...]:
        return self._addresses


async def _getaddrinfo(host: str, port: int) -> Sequence[tuple[Any, ...]]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


class DnsDiscovery:
    """Every address a name has (A and AAAA), as a headless Kubernetes service publishes its pods.

    resolve: as `loop.getaddrinfo`, which does not tell times to live: the name is looked up every `every_s`.
    """

    def __init__(self, host: str, port: int, *, every_s: float = DNS_EVERY_S, resolve: Resolve = _getaddrinfo) -> None:
        self.every_s = every_s
        self._host = host
        self._port = port
        self._resolve = resolve

    async def lookup(self) -> tuple[Address, ...]:
        try:
            async with asyncio.timeout(DNS_TIMEOUT_S):
                found = await self._resolve(self._host, self._port)
        except TimeoutError as error:
            raise DiscoveryFailed(f"{self._host} was not resolved within {DNS_TIMEOUT_S:g} s") from error
        except (OSError, UnicodeError) as error:
            raise DiscoveryFailed(f"{self._host} is not resolved: {error}") from error
        addresses = sorted({(str(entry[4][0]), self._port) for entry in found})
        if not addresses:
            raise DiscoveryFailed(f"{self._host} has no addresses")
        return tuple(addresses[:MAX_ADDRESSES])


class ScriptedDiscovery:
    """The double: answers with `addresses`, or raises `error` while that is set."""

    def __init__(self, addresses: Sequence[Address] = (), *, every_s: float = 0.01) -> None:
        self.addresses = tuple(addresses)
        self.error: DiscoveryFailed | None = None
        self.every_s = every_s
        self.lookups = 0

    async def lookup(self) -> tuple[Address, ...]:
        self.lookups += 1
        if self.error is not None:
            raise self.error
        return tuple(sorted(set(self.addresses)))[:MAX_ADDRESSES]
