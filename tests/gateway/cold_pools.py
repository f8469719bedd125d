"""Pools that scale and have no server yet, and the gateway in front of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.core import Gateway
from oriel_gateway.pools.health import Watch
from oriel_wire.discovery.discovery import Address

from ..waiting import until
from .stack import documents, gateway


class Names:
    """A name lookup: the test sets the addresses that the pool's name resolves to."""

    every_s = 0.005

    def __init__(self) -> None:
        self.found: tuple[Address, ...] = ()

    async def lookup(self) -> tuple[Address, ...]:
        return self.found


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    made = Names()
    monkeypatch.setattr(Watch, "discover", staticmethod(lambda address: made))
    return made


def cold(scaling: str, *, tier: str = "target_ms = 2000", pool: str = "", max_inflight: int = 8) -> dict[str, bytes]:
    """Documents of one pool that scales, over HTTP and gRPC."""
    probe = pool if "probe" in pool else f'probe = ""\n{pool}'
    extra = f"[pools.p.scaling]\nminimum = 0\nmaximum = 9\n{scaling}\n"
    text = documents([1], pool=probe, extra=extra, max_inflight=max_inflight)["all.toml"].decode()
    lines = [line for line in text.split("\n") if not line.startswith(("endpoints", "grpc_endpoints"))]
    names = '[pools.p]\ndiscover = "dns:pods:1"\ngrpc_discover = "dns:pods:1"'
    text = "\n".join(lines).replace("[pools.p]", names, 1).replace("target_ms = 2000", tier)
    return {"all.toml": text.encode()}


@asynccontextmanager
async def empty(files: dict[str, bytes]) -> AsyncIterator[tuple[int, Gateway]]:
    """A gateway that has looked the pool's name up and found no address."""
    async with gateway(files) as (port, core):
        gate = core.pools["p"]
        await until(lambda: gate.endpoints.looked_up and gate.grpc.looked_up)
        yield port, core


def watched(core: Gateway) -> GatewayCall:
    return next(item for item in core.clock if isinstance(item, GatewayCall))


def parked(core: Gateway) -> int:
    return core.pools["p"].endpoints.parked + core.pools["p"].grpc.parked
