"""A gateway whose upstream answers when the test says so."""

import asyncio

from oriel_gateway.core import Gateway

from .stack import Seen

INFER = "/v2/models/digits/infer"


class Gate:
    """Answers one request for each time that the test releases `go`.

    order: the header `x-tag` of each request, in the order in which they arrived.
    """

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = asyncio.Semaphore(0)

    async def __call__(self, seen: Seen) -> bytes:
        self.order.append(seen.get("x-tag") or "")
        await self.go.acquire()
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nx-oriel-cost: dev=7;cpu=0;class=h100\r\n\r\n"


def idle(core: Gateway) -> bool:
    gate = core.pools["p"]
    return (
        gate.admission.inflight == 0
        and len(gate.admission.queue) == 0
        and all(e.outstanding == 0 for e in gate.endpoints)
        and len(core.clock) == 0
    )
