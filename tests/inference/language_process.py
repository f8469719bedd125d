"""A decoder with the double of an engine in a real process, whose reports a test waits for."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from oriel_inference.backends.python.launch import Launch, PythonLimits
from oriel_inference.language.decoder import Decoder
from oriel_inference.language.engine import Options, Sampling
from oriel_inference.language.messages import Load, Progress, StepReport

LIMITS = PythonLimits(start_s=60.0, backoff_s=0.05)


class Watched:
    """A decoder and what it has reported.

    news: the progress of each sequence, joined. ends: the reasons of `on_end`.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.reports: list[StepReport] = []
        self.news: dict[int, Progress] = {}
        self.ends: list[str] = []
        self.starts = 0
        self._changed = asyncio.Event()
        decoder.on_step, decoder.on_end, decoder.on_ready = self._step, self._end, self._ready

    def _step(self, report: StepReport) -> None:
        self.reports.append(report)
        for each in report.progress:
            known = self.news.setdefault(each.number, Progress(each.number))
            known.ids += each.ids
            known.logprobs += each.logprobs
            known.finish, known.refused = each.finish, each.refused
            if each.prompt_tokens:
                known.prompt_tokens, known.cached_tokens, known.prompt = (
                    each.prompt_tokens,
                    each.cached_tokens,
                    each.prompt,
                )
        self._changed.set()

    def _end(self, reason: str) -> None:
        self.ends.append(reason)
        self._changed.set()

    def _ready(self) -> None:
        self.starts += 1
        self._changed.set()

    async def changed(self) -> None:
        """Wait for the next event."""
        self._changed.clear()
        async with asyncio.timeout(60):
            await self._changed.wait()

    async def finished(self, number: int) -> Progress:
        """Wait until a sequence has ended or was refused."""
        while number not in self.news or not (self.news[number].finish or self.news[number].refused):
            await self.changed()
        return self.news[number]

    async def tokens(self, number: int, count: int) -> Sequence[int]:
        """Wait until a sequence has `count` tokens."""
        while number not in self.news or len(self.news[number].ids) < count:
            await self.changed()
        return self.news[number].ids

    async def answer(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> Progress:
        """Add a sequence and wait for its end."""
        self.decoder.add(number, prompt, sampling)
        return await self.finished(number)


@asynccontextmanager
async def decoding(
    folder: Path, *, engine: str = "double", stall_s: float = 60.0, content: bytes = b"", **options: object
) -> AsyncIterator[Watched]:
    """Give a decoder that has started. content: the model file. options: see `Options`."""
    path = folder / "model.double"
    path.write_bytes(content)
    launch = Launch(
        file=str(path), model="m", version="1", config="", args={}, decoupled=True, threads=1, inputs=(), outputs=()
    )
    load = Load(engine, str(path), Options(**options))  # type: ignore[arg-type]
    decoder = Decoder(launch, load, LIMITS, stall_s=stall_s)
    watched = Watched(decoder)
    await decoder.start()
    try:
        yield watched
    finally:
        await decoder.close()
