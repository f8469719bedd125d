"""Chooses the inference server of the next call: the one with the fewest calls under way, in turn between equals.

One that could not be reached is passed over while others are there: for a second, then for longer and longer. When that
time is over one call tries it, and the others wait for what comes of that. One that said it has not the model is asked
for that model a second later at the earliest: it answers at once, and would draw all calls to itself.

A call that no server has run, because they restart, tries all of them again until its deadline. A server that lacks a
model is asked for it by one of the calls that wait each second. No call waits for servers of which none has ever
answered: their addresses may be wrong.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, Generic, TypeVar

from oriel_wire.discovery.discovery import Address
from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.grpc_client import GrpcClient

DOWN_S = 1.0
DOWN_MAX_S = 5.0
TRIAL_S = 3.0  # longer than a connection may take to be made
LACKS_S = 1.0
MAX_LACKING = 64
PAUSE_S = 0.05
PAUSE_MAX_S = 0.5


C = TypeVar("C", bound=HttpClient | GrpcClient)


class Endpoint(Generic[C]):
    """One inference server. outstanding: calls under way, also those that wait for a connection. failures: failed
    attempts to reach it in a row. is_tried: True while a call tries it after failures. lacks: model it reported as
    missing -> time until which that is believed."""

    __slots__ = ("address", "client", "down_until", "failures", "is_tried", "lacks", "outstanding")

    def __init__(self, address: Address, client: C) -> None:
        self.address = address
        self.client = client
        self.outstanding = 0
        self.failures = 0
        self.down_until = 0.0
        self.is_tried = False
        self.lacks: dict[str, float] = {}


class Endpoints(Generic[C]):
    """The servers that a client may call. Each has a client of its own.

    connect: makes the client of an address. have_answered: True once a server has answered a call.
    Single writer: the loop.
    """

    def __init__(self, connect: Callable[[Address], C], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._connect = connect
        self._clock = clock
        self._endpoints: list[Endpoint[C]] = []
        self._leaving: list[Endpoint[C]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._turn = 0
        self.have_answered = False

    def __len__(self) -> int:
        return len(self._endpoints)

    def replace(self, addresses: Iterable[Address]) -> None:
        """Adopt a new list of servers. The state of those that stay is kept; calls under way are not touched."""
        known = {each.address: each for each in self._endpoints}
        self._endpoints = [
            known.pop(each) if each in known else Endpoint(each, self._connect(each)) for each in addresses
        ]
        self._leaving.extend(known.values())
        for each in [one for one in self._leaving if not one.outstanding]:
            self._leaving.remove(each)
            task = asyncio.get_running_loop().create_task(each.client.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def pick(self, tried: Sequence[Endpoint[C]] = (), model: str = "") -> Endpoint[C] | None:
        """The best one for `model` that is not in `tried`; None when all were tried."""
        endpoints = self._endpoints
        count = len(endpoints)
        if count == 1:
            return None if tried else endpoints[0]
        now = self._clock()
        self._turn = (self._turn + 1) % max(1, count)
        best: Endpoint[C] | None = None
        for offset in range(count):
            each = endpoints[(self._turn + offset) % count]
            if each not in tried and (best is None or load(each, model, now) < load(best, model, now)):
                best = each
        if best is not None and best.failures:
            best.is_tried = True
            best.down_until = max(best.down_until, now + TRIAL_S)
        return best

    def attempts(self, model: str, until: float) -> "Attempts[C]":
        """Return the endpoints to try for one call. until: the time at which it is given up, 0 to try each once."""
        return Attempts(self, model, until if self.have_answered else 0.0, self._clock)

    def mark_down(self, endpoint: Endpoint[C]) -> None:
        """Note that the server could not be reached. Calls that find out together count once."""
        now = self._clock()
        if endpoint.down_until > now and not endpoint.is_tried:
            return
        endpoint.is_tried = False
        endpoint.down_until = now + min(DOWN_S * 2.0**endpoint.failures, DOWN_MAX_S)
        endpoint.failures = min(endpoint.failures + 1, 16)

    def mark_lacking(self, endpoint: Endpoint[C], model: str) -> None:
        """Note that the server does not have this model, or not now."""
        if len(endpoint.lacks) >= MAX_LACKING:
            endpoint.lacks.clear()
        endpoint.lacks[model] = self._clock() + LACKS_S

    def mark_up(self, endpoint: Endpoint[C]) -> None:
        """Note that the server was reached."""
        endpoint.failures = 0
        endpoint.down_until = 0.0
        endpoint.is_tried = False

    async def close(self) -> None:
        for each in (*self._endpoints, *self._leaving):
            await each.client.close()
        await asyncio.gather(*self._closing)


class Attempts(Generic[C]):
    """The endpoints to try for one call, the best one first, each once; all again after a pause if one asks for it."""

    __slots__ = ("_after_s", "_clock", "_endpoints", "_has_waited", "_model", "_pause_s", "_tried", "_until")

    def __init__(self, endpoints: Endpoints[C], model: str, until: float, clock: Callable[[], float]) -> None:
        self._endpoints = endpoints
        self._model = model
        self._until = until
        self._clock = clock
        self._pause_s = PAUSE_S
        self._tried: list[Endpoint[C]] = []
        self._has_waited = False
        self._after_s = 0.0  # unless one is found, the pods of a service are all away

    def try_again(self, after_s: float = 0.0) -> None:
        """Note that an endpoint has not run the call, and may run it later. after_s: seconds that it asks to wait."""
        self._after_s = min(self._after_s, after_s)

    def __aiter__(self) -> "Attempts[C]":
        return self

    async def __anext__(self) -> Endpoint[C]:
        while (endpoint := self._pick()) is None:
            pause_s = max(self._pause_s, self._after_s)
            if self._clock() + pause_s >= self._until:
                raise StopAsyncIteration
            await asyncio.sleep(pause_s)
            self._pause_s, self._after_s = min(2 * self._pause_s, PAUSE_MAX_S), 0.0
            self._has_waited = True
            self._tried.clear()
        if not self._tried:
            self._after_s = inf
        self._tried.append(endpoint)
        return endpoint

    def _pick(self) -> Endpoint[C] | None:
        """Return the endpoint to try next. A call that has waited leaves one alone that lacked the model just now."""
        while (endpoint := self._endpoints.pick(self._tried, self._model)) is not None and self._has_waited:
            if endpoint.lacks.get(self._model, 0.0) <= self._clock():
                break
            self._tried.append(endpoint)
        return endpoint


def load(endpoint: Endpoint[Any], model: str, now: float) -> tuple[bool, int]:
    """The order of servers: whether it is of no use now, then calls under way."""
    useless = endpoint.down_until > now or (bool(endpoint.lacks) and endpoint.lacks.get(model, 0.0) > now)
    return useless, endpoint.outstanding
