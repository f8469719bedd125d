"""The link between a worker and its parent: the ledger that the parent keeps, and a place to wait for other workers."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from oriel_gateway.limits.ledger import Ledger, LedgerLost, Presence, Question
from oriel_policies.bounds.ledger import Answer, Ask
from oriel_wire.process.questions import Answering, Asking

# Without an answer for so long a worker admits its share: the parent is on the same machine, so it must be stuck.
LINK_BUDGET_S: Final = 5.0
MEET_S: Final = 1.0  # the longest wait for the other workers before documents come into force
MEET: Final = "meet"


class WorkerLink:
    """The worker's end, which is also a `Ledger`. Without its parent a worker stops."""

    def __init__(self) -> None:
        self._edge = asyncio.Event()
        self._parent = Asking(self._edge.set, lambda: os.kill(os.getpid(), signal.SIGTERM))

    @classmethod
    async def connected(cls, descriptor: int) -> "WorkerLink":
        """Return the link over the socket of this descriptor."""
        link = cls()
        await link._parent.open(socket.socket(fileno=descriptor))
        return link

    async def meet(self) -> None:
        """Wait until all workers do, at most for `MEET_S`."""
        await self._ask(MEET)

    async def ask(self, questions: Sequence[Question]) -> list[list[Answer] | None]:
        return msgspec.convert(await self._ask("ask", questions), list[list[Answer] | None])

    async def hello(self, share: float) -> Presence:
        return Presence(*await self._ask("hello", share))

    async def exchange(self, records: bytes, *, edge: bool = False) -> dict[str, tuple[bytes, float]]:
        found = await self._ask("exchange", records, edge)
        return {holder: (data, age_s) for holder, (data, age_s) in found.items()}

    async def edges(self) -> AsyncGenerator[None]:
        self._edge.set()
        while True:
            await self._edge.wait()
            self._edge.clear()
            yield

    async def add_use(
        self, month: str, number: int, sums: Mapping[str, int], after: str, since_s: int
    ) -> tuple[dict[str, int], str]:
        found, place = await self._ask("add_use", month, number, sums, after, since_s)
        return found, place

    async def close(self) -> None:
        """Leave the link open: it ends with the process, which its parent waits for."""

    async def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return await self._parent.ask(name, *arguments)
        except ConnectionError as error:
            raise LedgerLost("the parent of this worker has ended") from error


async def parent_link(sock: socket.socket, seat: Ledger, meeting: asyncio.Barrier) -> Answering:
    """Return the parent's end of the link to a worker over `sock`.

    seat: the ledger as the worker sees it. meeting: where it waits for the others.
    """

    async def answer(name: str, arguments: list[Any]) -> Any:
        if name == "ask":
            return await seat.ask(msgspec.convert(arguments[0], list[tuple[str, list[Ask]]]))
        if name == "exchange":
            return await seat.exchange(arguments[0], edge=arguments[1])
        if name != MEET:
            return await (seat.hello if name == "hello" else seat.add_use)(*arguments)
        with suppress(TimeoutError):  # a worker is starting, or its documents are of another moment
            async with asyncio.timeout(MEET_S):
                await meeting.wait()
        return None

    async def notify() -> None:
        async for _ in seat.edges():
            link.notify()

    link = Answering(answer)
    await link.open(sock)
    link.run(notify())
    return link
