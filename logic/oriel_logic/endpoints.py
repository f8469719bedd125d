"""Which inference server gets the next call: the one with the fewest calls under way, in turn between equals."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from oriel_wire.engine.client import HttpResponse

__all__ = ["Endpoint", "Endpoints", "Client"]

DOWN_S = 1.0


class Client(Protocol):
    """What is needed of `oriel_wire.engine.client.HttpClient`."""

    async def request(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]] | str,
        body: bytes | Sequence[bytes | memoryview] = b"",
        *,
        deadline: float,
    ) -> HttpResponse: ...

    async def close(self) -> None: ...


class Endpoint:
    """One inference server. `outstanding` counts calls under way, also those that wait for a connection."""

    __slots__ = ("address", "client", "down_until", "outstanding")

    def __init__(self, address: str, client: Client) -> None:
        self.address = address
        self.client = client
        self.outstanding = 0
        self.down_until = 0.0


class Endpoints:
    """All of them. One that could not be reached is passed over for a second while others are there."""

    def __init__(self, endpoints: Sequence[Endpoint], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = list(endpoints)
        self._clock = clock
        self._turn = 0

    def __len__(self) -> int:
        return len(self._endpoints)

    def pick(self, tried: Sequence[Endpoint] = ()) -> Endpoint | None:
        """The best one not in `tried`; None when all were tried."""
        count = len(self._endpoints)
        if count == 1:
            return None if tried else self._endpoints[0]
        now = self._clock()
        self._turn = (self._turn + 1) % max(1, count)
        best: Endpoint | None = None
        for offset in range(count):
            each = self._endpoints[(self._turn + offset) % count]
            if each not in tried and (best is None or self._load(each, now) < self._load(best, now)):
                best = each
        return best

    def mark_down(self, endpoint: Endpoint) -> None:
        endpoint.down_until = self._clock() + DOWN_S

    async def close(self) -> None:
        for each in self._endpoints:
            await each.client.close()

    @staticmethod
    def _load(endpoint: Endpoint, now: float) -> tuple[bool, int]:
        return endpoint.down_until > now, endpoint.outstanding
