"""The link between a worker and its parent: the ledger that the parent keeps, and what workers tell each other."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
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
SERVES: Final = "serves"
ROLLED_BACK: Final = "rolled back"
_MOST_ROLLED_BACK: Final = 1000  # canaries that the parent remembers


class WorkerLink:
    """The worker's end, which is also a `Ledger`. Without its parent a worker stops."""

    def __init__(self) -> None:
        self._edge = asyncio.Event()
        self._rolled_back: dict[str, bytes] = {}
        self._take_over: Callable[[str, bytes], None] = self._rolled_back.__setitem__
        self._sharing: set[asyncio.Task[Any]] = set()
        self._parent = Asking(self._noticed, lambda: os.kill(os.getpid(), signal.SIGTERM))

    @classmethod
    async def connected(cls, descriptor: int) -> "WorkerLink":
        """Return the link over the socket of this descriptor."""
        link = cls()
        await link._parent.open(socket.socket(fileno=descriptor))
        return link

    async def meet(self) -> None:
        """Wait until all workers do, at most for `MEET_S`."""
        await self._ask(MEET)

    async def serves(self) -> None:
        """Say that this worker serves: from now on it is started again when it dies."""
        await self._ask(SERVES)

    def follow(self, take_over: Callable[[str, bytes], None]) -> None:
        """Call `take_over` for each canary that another worker has rolled back or will roll back."""
        self._take_over = take_over
        for digest, record in self._rolled_back.items():
            take_over(digest, record)

    def share(self, digest: str, record: bytes) -> None:
        """Tell the other workers, also those that start later, of a canary. record: b"" if its route has changed."""
        task = asyncio.get_running_loop().create_task(self._ask(ROLLED_BACK, digest, record))
        self._sharing.add(task)
        task.add_done_callback(self._shared)

    def _shared(self, task: "asyncio.Task[Any]") -> None:
        self._sharing.discard(task)
        if not task.cancelled():
            task.exception()  # without its parent this worker stops

    def _noticed(self, value: Any) -> None:
        if value is None:
            self._edge.set()
        else:
            self._take_over(*value)

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


class Together:
    """The parent's side of what workers tell each other.

    count: the number of workers. started: set once all of them serve.
    """

    def __init__(self, count: int) -> None:
        self.meeting = asyncio.Barrier(count)
        self.started = False
        self._count = count
        self._serving: set[str] = set()
        self._rolled_back: dict[str, bytes] = {}
        self._links: dict[str, Answering] = {}

    def join(self, holder: str, link: Answering) -> None:
        """Tell a worker from now on of the canaries that are rolled back, beginning with earlier ones."""
        self._links[holder] = link
        for each in self._rolled_back.items():
            link.notify(each)

    def serve(self, holder: str) -> None:
        """Note that a worker serves."""
        self._serving.add(holder)
        self.started = self.started or len(self._serving) == self._count

    def forget(self, holder: str) -> bool:
        """Forget a worker that has ended; returns whether it has served."""
        self._links.pop(holder, None)
        served = holder in self._serving
        self._serving.discard(holder)
        return served

    def roll_back(self, by: str, digest: str, record: bytes) -> None:
        """Tell the other workers of a canary. record: b"" to forget it, as each worker does by itself."""
        self._rolled_back.pop(digest, None)
        if record:
            self._rolled_back[digest] = record
            if len(self._rolled_back) > _MOST_ROLLED_BACK:
                del self._rolled_back[next(iter(self._rolled_back))]
            for holder, link in self._links.items():
                if holder != by:
                    link.notify((digest, record))


async def parent_link(sock: socket.socket, seat: Ledger, holder: str, together: Together) -> Answering:
    """Return the parent's end of the link to a worker over `sock`.

    seat: the ledger as the worker sees it. holder: its name there. together: see there.
    """

    async def answer(name: str, arguments: list[Any]) -> Any:
        if name == "ask":
            return await seat.ask(msgspec.convert(arguments[0], list[tuple[str, list[Ask]]]))
        if name == "exchange":
            return await seat.exchange(arguments[0], edge=arguments[1])
        if name == ROLLED_BACK:
            return together.roll_back(holder, *arguments)
        if name == SERVES:
            return together.serve(holder)
        if name != MEET:
            return await (seat.hello if name == "hello" else seat.add_use)(*arguments)
        with suppress(TimeoutError):  # a worker is starting, or its documents are of another moment
            async with asyncio.timeout(MEET_S):
                await together.meeting.wait()
        return None

    async def notify() -> None:
        async for _ in seat.edges():
            link.notify()

    link = Answering(answer)
    await link.open(sock)
    together.join(holder, link)
    link.run(notify())
    return link
