"""Questions between two processes over a stream socket: many at a time, each answered on its own.

A question is a frame with its number, a name and arguments; its answer is a frame with the number and the value. The
answering side may also send a notice, a value with the number 0. Values are what msgspec writes as MessagePack.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from itertools import count
from typing import Any

import msgspec

from oriel_wire.process.messages import MessageStream, frame

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Asking:
    """The end that asks.

    noticed: called with the value of a notice. lost: called once when the other process is gone.
    """

    def __init__(self, noticed: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._noticed = noticed
        self._when_lost = lost
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._stream = MessageStream(max_body_bytes=0, on_frame=self._received, on_lost=self._lost)

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket. Raises OSError."""
        await self._stream.open(sock)

    async def ask(self, name: str, *arguments: Any) -> Any:
        """Return the answer. Raises ConnectionError if the other process is gone."""
        if not self._stream.is_open:
            raise ConnectionResetError("the other process is gone")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._stream.send(frame(_encode((number, name, arguments))))
        try:
            return await answer
        finally:
            del self._waiting[number]

    def _received(self, head: memoryview, _: memoryview) -> None:
        number, value = _decode(head)
        if not number:
            self._noticed(value)
        elif (answer := self._waiting.get(number)) is not None and not answer.done():
            answer.set_result(value)

    def _lost(self, _: str) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the other process is gone"))
        self._when_lost()


class Answering:
    """The end that answers. answer: called with name and arguments. ended: set when the other process is gone."""

    def __init__(self, answer: Callable[[str, list[Any]], Awaitable[Any]]) -> None:
        self._answer = answer
        self._tasks: set[asyncio.Task[None]] = set()
        self._stream = MessageStream(max_body_bytes=0, on_frame=self._received, on_lost=self._lost)
        self.ended = asyncio.Event()

    async def open(self, sock: socket.socket) -> None:
        """Take over a connected socket. Raises OSError."""
        await self._stream.open(sock)

    def notify(self, value: Any = None) -> None:
        """Send a notice."""
        self._stream.send(frame(_encode((0, value))))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a task until it is done or the other process is gone."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _received(self, head: memoryview, _: memoryview) -> None:
        self.run(self._reply(*_decode(head)))

    async def _reply(self, number: int, name: str, arguments: list[Any]) -> None:
        self._stream.send(frame(_encode((number, await self._answer(name, arguments)))))

    def _lost(self, _: str) -> None:
        for task in self._tasks:
            task.cancel()
        self.ended.set()
