"""Answers every chat completion with a stream of tokens in OpenAI's form, `max_tokens` in all.

Every 50 ms each stream gets its next token, as from an engine that decodes all of them in one step.

tokens.py PORT
"""

import asyncio
import json
import sys

import uvloop

EVERY_S = 0.05
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(delta: dict[str, str], finish: str | None) -> bytes:
    """One chunk with one event of a chat completion."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    document = {"id": "chatcmpl-7f3a9c", "object": "chat.completion.chunk", "created": 1796000000, "model": "chat"}
    text = b"data: " + json.dumps(document | {"choices": [choice]}).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(text), text)


TOKEN = event({"content": " token"}, None)
END = event({}, "stop") + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class Connection(asyncio.Protocol):
    """One kept connection: a call, its stream, the next call."""

    read, left = b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.read += data
        head, end, body = self.read.partition(b"\r\n\r\n")
        if not end or len(body) < 2 or not body.rstrip(b"\r\n0").endswith(b"}"):
            return
        self.left = int(self.read.partition(b'"max_tokens":')[2].split(b",")[0].strip(b" }\r\n"))
        self.read = b""
        self.transport.write(HEAD)  # type: ignore[attr-defined]
        STREAMS.add(self)

    def token(self) -> None:
        self.left -= 1
        self.transport.write(TOKEN if self.left else TOKEN + END)  # type: ignore[attr-defined]
        if not self.left:
            STREAMS.discard(self)

    def connection_lost(self, exc: Exception | None) -> None:
        STREAMS.discard(self)


STREAMS: set[Connection] = set()


async def main() -> None:
    loop = asyncio.get_running_loop()
    await loop.create_server(Connection, "127.0.0.1", int(sys.argv[1]), backlog=1024)
    at = loop.time()
    while True:
        for stream in list(STREAMS):
            stream.token()
        at += EVERY_S
        await asyncio.sleep(max(0.0, at - loop.time()))


uvloop.run(main())
