"""A server that answers every request with 1 KB, as cheaply as Python can: it is not what is measured."""

import asyncio
import sys

import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 1024\r\n\r\n" + b"y" * 1024


class Server(asyncio.Protocol):
    def __init__(self) -> None:
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        while (stop := self.buffer.find(b"\r\n\r\n")) >= 0:
            head = self.buffer[:stop].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.buffer) < stop + 4 + size:
                return
            self.buffer = self.buffer[stop + 4 + size :]
            self.transport.write(ANSWER)  # type: ignore[attr-defined]


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    await server.serve_forever()


uvloop.run(main())
