"""A gateway with cached, split, single-flight and shadowed routes in front of scripted upstreams."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.core import Gateway

from .stack import GOLD, Client, Reply, Seen, Upstream, digest, gateway, upstream

INFER = "/v2/models/digits/infer"

OTHER, BRONZE, OPERATOR = "key-other", "key-bronze", "key-operator"


def ok(body: bytes = b"ok", fields: str = "", status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\n{fields}content-length: {len(body)}\r\n\r\n".encode() + body


def answering(data: bytes) -> Callable[[Seen], Awaitable[bytes]]:
    async def answer(seen: Seen) -> bytes:
        return data

    return answer


class Held:
    """Answers one request for each time that the test releases `go`."""

    def __init__(self, data: bytes = ok()) -> None:
        self.data = data
        self.go = asyncio.Semaphore(0)

    async def __call__(self, seen: Seen) -> bytes:
        await self.go.acquire()
        return self.data


@dataclass
class House:
    port: int
    core: Gateway
    ups: list[Upstream]

    def members(self) -> int:
        """Return how many callers wait for an answer to an equal call."""
        return sum(len(flight.members) for flight in self.core.routing.flights.values())

    def idle(self) -> bool:
        return (
            all(
                gate.admission.inflight == 0 and not len(gate.admission.queue) and not gate.held_bytes
                for gate in self.core.pools.values()
            )
            and all(e.outstanding == 0 for gate in self.core.pools.values() for e in gate.endpoints)
            and not len(self.core.clock)
            and not self.core.routing.flights
            and not self.core.routing.detached
            and not self.core.routing.shadows
        )


@asynccontextmanager
async def house(routes: str, *, pools: int = 2, inflight: int = 8, per_pool: int = 1) -> AsyncIterator[House]:
    """A gateway with the pools p0, p1 and so on, which have `per_pool` servers each."""
    async with AsyncExitStack() as stack:
        ups = [await stack.enter_async_context(upstream()) for _ in range(pools * per_pool)]
        text = """
[tiers.gold]
band = 0
target_ms = 2000
[tiers.bronze]
band = 2
target_ms = 2000
"""
        for number in range(pools):
            own = ", ".join(f'"127.0.0.1:{up.port}"' for up in ups[number * per_pool : (number + 1) * per_pool])
            text += f"[pools.p{number}]\nendpoints = [{own}]\nmax_inflight = {inflight}\nlearn_concurrency = false\n"
            text += 'probe = ""\n'
        for name, tier, key in (("g", "gold", GOLD), ("o", "gold", OTHER), ("b", "bronze", BRONZE)):
            models = "digits" if name == "b" else "*"
            text += f'[tenants.{name}]\ntier = "{tier}"\nmodels = ["{models}"]\nservices = ["*"]\n'
            text += f'keys = [{{ sha256 = "{digest(key)}" }}]\n'
        text += '[tenants.op]\ntier = "gold"\nmodels = ["*"]\nservices = ["*"]\nscopes = ["operator"]\n'
        text += f'keys = [{{ sha256 = "{digest(OPERATOR)}" }}]\n'
        port, core = await stack.enter_async_context(gateway({"all.toml": (text + routes).encode()}))
        yield House(port, core, ups)


def metric(core: Gateway, name: str) -> dict[tuple[str, ...], float]:
    for family in GatewayCollector(core).collect():
        for sample in family.samples:
            if sample.name == name:
                return {tuple(s.labels.values()): s.value for s in family.samples}
    return {}


CACHED = '[[routes]]\nmodel = "*"\nname = "d"\npool = "p0"\ndeterministic = true\ncache_s = 60.0\n'

FLOWN = '[[routes]]\nmodel = "*"\nname = "d"\npool = "p0"\ndeterministic = true\n'

SHADOWED = '[[routes]]\nmodel = "*"\nname = "s"\npool = "p0"\nshadow = { pool = "p1" }\n'


def copies(core: Gateway) -> dict[str, float]:
    return {labels[2]: count for labels, count in metric(core, "oriel_gateway_shadow_copies_total").items()}


async def ask(port: int, target: str = INFER, body: bytes = b"x", **more: str | None) -> Reply:
    """Make one call on a connection of its own."""
    async with Client(port) as client:
        return await client.ask(target, body, **more)
