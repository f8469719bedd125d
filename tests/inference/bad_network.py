"""A TCP proxy between a client and a server on this machine that misbehaves as the test says."""

import asyncio


class BadNetwork:
    """The proxy.

    mode: "good"; "dead" (connections end at once); "silent" (nothing comes back); "errors" (503 for everything); "slow"
    (64 bytes at a time); "spoils" (bytes of an answer after the first `small` are altered); "cuts" (an answer ends
    after `small` bytes). asked: the requests that began while the mode was not "good".
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.mode = "good"
        self.small = 16_384
        self.asked = 0
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> "BadNetwork":
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self) -> None:
        """Close every connection, idle ones too; a client first retries on its idle connections, which break when they
        are used.
        """
        for each in self._open:
            each.transport.abort()

    def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to = None
        self._open.add(writer)
        try:
            back, to = await asyncio.open_connection("127.0.0.1", self._target)
            answered = [0]  # bytes since the last request
            async with asyncio.TaskGroup() as group:
                group.create_task(self._up(reader, to, writer, answered))
                group.create_task(self._down(back, writer, answered))
        except* (OSError, RuntimeError):  # uvloop: a connection that was dropped meanwhile
            pass
        finally:
            self._open.discard(writer)
            for each in (writer, to):
                if each is not None:
                    each.transport.abort()

    async def _up(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, back: asyncio.StreamWriter, answered: list[int]
    ) -> None:
        while data := await reader.read(1 << 16):
            answered[0] = 0
            if data.startswith((b"GET ", b"HEAD ")) and self.mode != "good":
                self.asked += 1
            if self.mode == "dead":
                break
            if self.mode == "errors":
                back.write(b"HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                await back.drain()
                break
            if self.mode == "silent":
                await asyncio.Event().wait()
            to.write(data)
            await to.drain()
        raise ConnectionError

    async def _down(self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, answered: list[int]) -> None:
        while data := await back.read(self.small):
            answered[0] += len(data)
            if answered[0] > self.small and self.mode == "cuts":
                break
            if answered[0] > self.small and self.mode == "spoils":
                data = bytes(each ^ 1 for each in data)
            step = 64 if self.mode == "slow" else len(data)
            for start in range(0, len(data), step):
                writer.write(data[start : start + step])
                await writer.drain()
        raise ConnectionError
