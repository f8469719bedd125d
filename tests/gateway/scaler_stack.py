"""A gateway with an external scaler and a stand-in for KEDA that asks it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import monotonic

from oriel_gateway.admin.external_scaler import PINGS_S, STREAM_S, ExternalScaler
from oriel_gateway.core import Gateway
from oriel_wire.process.process import listen

from ..waiting import until
from .keda import Keda, keda
from .scaled import scaled
from .stack import gateway

WAITING = "x-request-timeout-ms: 200000\r\n"  # a deadline after any start on a busy machine


class Scaled:
    """A gateway whose pool `p` has no server until the test assigns one."""

    def __init__(self, port: int, core: Gateway, scaler: ExternalScaler, scaler_port: int, operator: Keda) -> None:
        self.port, self.core, self.operator = port, core, operator
        self.scaler, self.scaler_port = scaler, scaler_port

    def plan(self) -> None:
        self.core.scaled.plans["p"].update(monotonic())

    def listeners(self) -> int:
        return len(self.core.scaled.plans["p"].listeners)


@asynccontextmanager
async def stack(
    server: int,
    *,
    more: str = "",
    stream_s: tuple[float, float] = STREAM_S,
    pings_s: tuple[float, float] = PINGS_S,
) -> AsyncIterator[Scaled]:
    """more: further documents, which come before those of pool `p`."""
    files = {name: more.encode() + text for name, text in scaled(server).items()}
    async with gateway(files) as (port, core):
        await until(lambda: core.pools["p"].endpoints.looked_up)
        core.pools["p"].endpoints.assign([])  # like a discovery that finds no address
        scaler = ExternalScaler(core.scaled, stream_s=stream_s, pings_s=pings_s)
        try:
            scaler_port = await scaler.open(listen("127.0.0.1", 0, "gateway scaler"))
            async with keda(scaler_port) as operator:
                yield Scaled(port, core, scaler, scaler_port, operator)
        finally:
            await scaler.close()
