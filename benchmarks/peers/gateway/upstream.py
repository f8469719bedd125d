"""A server that answers every request with 1 KB, as cheaply as Python can: it is not what is measured.

upstream.py PORT [PORT ...]
"""

import asyncio
import sys

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n" + b"y" * 1024


class Server(asyncio.Protocol):
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parts.append(data)
        self.size += len(data)
        if self.size < self.wanted:
            return
        buffer = b"".join(self.parts)
        while (stop := buffer.find(b"\r\n\r\n")) >= 0:
            head = buffer[:stop].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self.wanted = stop + 4 + size
            if len(buffer) < self.wanted:
                break
            buffer = buffer[self.wanted :]
            self.wanted = 0
            self.transport.write(ANSWER)  # type: ignore[attr-defined]
        self.parts, self.size = [buffer] if buffer else [], len(buffer)


async def main() -> None:
    loop = asyncio.get_running_loop()
    for port in reversed(sys.argv[1:]):  # whoever waits for the first finds all of them
        await loop.create_server(Server, "127.0.0.1", int(port), backlog=1024)
    await asyncio.Event().wait()


uvloop.run(main())
