"""A stand-in for an inference engine, written from what vLLM, SGLang and TensorRT-LLM document.

It serves `/v1/chat/completions` and its metrics. A sequence waits until one of `seats` is free: by arrival, or by
`priority` and then arrival. Each step gives every running sequence a token. A prompt costs a step for every
`step_bytes` that are not in its prefix cache. A stream's head is sent at once, long before its first token, and a
sequence whose client has closed the connection is aborted.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from .openai_answers import json_answer
from .stack import Seen

METRICS = {
    "vllm": ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"),
    "sglang": ("sglang:num_queue_reqs", "sglang:num_running_reqs", "sglang:token_usage"),
    "trtllm": ("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
}
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BLOCK = 64


class Sequence:
    """One request inside the engine."""

    def __init__(self, number: int, body: bytes) -> None:
        self.number = number
        self.raw = body
        self.body: dict[str, Any] = json.loads(body)
        self.text = json.dumps(self.body.get("messages", ""))
        self.left = int(self.body.get("max_tokens", 4))
        self.prefill = 0
        self.cached = 0
        self.tokens: asyncio.Queue[int] = asyncio.Queue()

    @property
    def usage(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.text) // 4, "completion_tokens": int(self.body.get("max_tokens", 4))}


class Engine:
    """order: returns what a waiting sequence is sorted by."""

    def __init__(
        self, kind: str = "vllm", *, seats: int = 2, by_priority: bool = False, step_bytes: int = 1024
    ) -> None:
        self.kind, self.seats, self.by_priority, self.step_bytes = kind, seats, by_priority, step_bytes
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.seen: list[Sequence] = []
        self.heads: list[Seen] = []
        self.aborted: list[Sequence] = []
        self.cache: dict[str, None] = {}
        self.asked = self.cached = self.scraped = 0
        self.metrics = True
        self.port = 0
        self._numbers = count()
        self._tasks: set[asyncio.Task[Any]] = set()

    def step(self) -> None:
        """Let waiting sequences begin and every running one go on."""
        sign = {"vllm": 1, "trtllm": -1, "sglang": -1}[self.kind]
        if self.by_priority:
            self.waiting.sort(key=lambda each: (sign * each.body.get("priority", 0), each.number))
        while self.waiting and len(self.running) < self.seats:
            begins = self.waiting.pop(0)
            blocks = [begins.text[:end] for end in range(BLOCK, len(begins.text) + 1, BLOCK)]
            begins.cached = BLOCK * sum(block in self.cache for block in blocks)
            for block in blocks:
                self.cache.pop(block, None)
                self.cache[block] = None
            begins.prefill = (len(begins.text) - begins.cached) // self.step_bytes
            self.asked += len(begins.text)
            self.cached += begins.cached
            self.running.append(begins)
        for each in [*self.running]:
            if each.prefill:
                each.prefill -= 1
                continue
            each.left -= 1
            each.tokens.put_nowait(each.left)
            if not each.left:
                self.running.remove(each)

    def forget(self, most: int) -> None:
        """Keep the `most` latest blocks of the prefix cache."""
        while len(self.cache) > most:
            del self.cache[next(iter(self.cache))]

    def scrape(self) -> bytes:
        waiting, running, cache = METRICS[self.kind]
        text = (
            f'# TYPE {waiting} gauge\n{waiting}{{model="m"}} {len(self.waiting)}.0\n{running}{{model="m"}} '
            f'{len(self.running)}.0\n{cache}{{model="m"}} 0.25\n'
        )
        self.scraped += 1
        return f"HTTP/1.1 200 OK\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                seen = Seen(await reader.readuntil(b"\r\n\r\n"), b"")
                body = await reader.readexactly(int(seen.get("content-length") or 0))
                if seen.head.startswith("GET") or not body:
                    known = self.metrics and "/metrics" in seen.head
                    writer.write(self.scrape() if known else b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")
                    continue
                self.heads.append(seen)
                sequence = Sequence(next(self._numbers), body)
                self.seen.append(sequence)
                self.waiting.append(sequence)
                if not await self._answer(sequence, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, of: Sequence, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        streams = of.body.get("stream", False)
        if streams:
            writer.write(HEAD)
        leaving = asyncio.ensure_future(reader.read(1))
        while True:
            token = asyncio.ensure_future(of.tokens.get())
            await asyncio.wait((token, leaving), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                token.cancel()
                self.aborted.append(of)
                for those in (self.waiting, self.running):
                    if of in those:
                        those.remove(of)
                return False
            if streams:
                writer.write(_event({"choices": [{"delta": {"content": "x"}}]}))
            if not token.result():
                break
        if streams:
            if (of.body.get("stream_options") or {}).get("include_usage"):
                writer.write(_event({"choices": [], "usage": of.usage}))
            writer.write(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        else:
            writer.write(json_answer({"choices": [{"message": {"content": "x"}}], "usage": of.usage}))
        first = await leaving
        reader._buffer[:0] = first  # type: ignore[attr-defined]  # put back what the departure check took
        return bool(first)

    async def close(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(content: dict[str, Any]) -> bytes:
    return _chunk(f"data: {json.dumps(content)}\n\n".encode())


@asynccontextmanager
async def engine(kind: str = "vllm", **options: Any) -> AsyncIterator[Engine]:
    made = Engine(kind, **options)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        await made.close()
