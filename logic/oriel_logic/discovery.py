"""Where the inference servers are: the `Discovery` seam, from settings and from DNS, its double, and who asks it.

Only settings name servers: nothing in a request can. What a lookup found stays true until the next one that succeeds,
so that a name server's failure takes nothing away.
"""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

__all__ = [
    "Address",
    "Discovery",
    "DiscoveryFailed",
    "DnsDiscovery",
    "ScriptedDiscovery",
    "StaticDiscovery",
    "Watch",
    "discovery_of",
]

_log = logging.getLogger(__name__)
Address = tuple[str, int]
Resolve = Callable[[str, int], Awaitable[Sequence[tuple[Any, ...]]]]

DNS_EVERY_S = 5.0
DNS_TIMEOUT_S = 5.0
MAX_ADDRESSES = 1024


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
    """The addresses that were given."""

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


def discovery_of(address: Address) -> Discovery:
    """IP addresses and `localhost` are taken as they are; any other name stands for all addresses that it has."""
    host, port = address
    if host == "localhost":
        return StaticDiscovery([address])
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return DnsDiscovery(host, port)
    return StaticDiscovery([address])


class Watch:
    """Asks several discoveries again and again, and tells `found` what they say together.

    found: called on the loop with all addresses, each once, whenever they changed.
    """

    def __init__(self, discoveries: Sequence[Discovery], found: Callable[[Sequence[Address]], None]) -> None:
        self._discoveries = list(discoveries)
        self._found = found
        self._answers: dict[int, tuple[Address, ...]] = {}
        self._told: tuple[Address, ...] = ()
        self._failing: set[int] = set()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Look everything up once, then keep looking. A lookup that fails is logged, not raised."""
        await asyncio.gather(*(self._look(index) for index in range(len(self._discoveries))))
        self._tasks = [
            asyncio.create_task(self._keep(index), name="inference servers lookup")
            for index, each in enumerate(self._discoveries)
            if each.every_s
        ]

    async def close(self) -> None:
        """Stop looking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, index: int) -> None:
        while True:
            await asyncio.sleep(self._discoveries[index].every_s)
            await self._look(index)

    async def _look(self, index: int) -> None:
        try:
            self._answers[index] = await self._discoveries[index].lookup()
        except DiscoveryFailed as error:
            if index not in self._failing:
                self._failing.add(index)
                _log.warning("inference servers: %s; what was found before stays in use", error)
            return
        if index in self._failing:
            self._failing.discard(index)
            _log.info("inference servers: looked up again")
        together = tuple(dict.fromkeys(address for each in sorted(self._answers) for address in self._answers[each]))
        if together != self._told:
            self._told = together
            self._found(together)
