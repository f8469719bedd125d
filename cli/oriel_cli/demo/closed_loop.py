"""Runs a small closed-loop load: a number of callers, each with one request under way, until the time is over."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError

ANSWER_WITHIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """The one request that is sent over and over."""

    target: str
    headers: Sequence[tuple[str, str]]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Figures:
    """The result of a load. latencies_s: seconds of each answer with status 200; others: status or error name ->
    count.
    """

    elapsed_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)

    @property
    def per_second(self) -> float:
        """Good answers per second."""
        return len(self.latencies_s) / self.elapsed_s if self.elapsed_s else 0.0

    def percentile_s(self, share: float) -> float:
        """The latency that `share` (0..1) of the good answers stayed within; 0 without answers."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def add(self, more: "Figures") -> None:
        self.elapsed_s += more.elapsed_s
        self.latencies_s += more.latencies_s
        for name, count in more.others.items():
            self.others[name] = self.others.get(name, 0) + count

    def as_document(self) -> Mapping[str, object]:
        return {
            "requests_per_s": round(self.per_second, 1),
            "p50_ms": round(self.percentile_s(0.5) * 1e3, 3),
            "p99_ms": round(self.percentile_s(0.99) * 1e3, 3),
            "answers": len(self.latencies_s),
            "others": self.others,
        }


async def drive(client: HttpClient, shot: Shot, *, callers: int, duration_s: float, think_s: float = 0.0) -> Figures:
    """Send `shot` from `callers` callers at once for `duration_s`; wait for every request that was begun.

    think_s: mean seconds that a caller waits before each request, exponentially distributed.
    """
    figures = Figures()
    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            chance = Random(number)
            group.create_task(_caller(client, shot, began + duration_s, figures, chance, think_s))
    figures.elapsed_s = time.monotonic() - began
    return figures


async def _caller(
    client: HttpClient, shot: Shot, until: float, figures: Figures, chance: Random, think_s: float
) -> None:
    while (now := time.monotonic()) < until:
        if think_s:
            pause_s = chance.expovariate(1.0 / think_s)
            await asyncio.sleep(min(until - now, pause_s))
            if now + pause_s >= until:  # a sleep may end a little early, and would let one more request go
                break
            now = time.monotonic()
        try:
            answer = await client.request("POST", shot.target, shot.headers, shot.body, deadline=now + ANSWER_WITHIN_S)
            failure = "" if answer.status == 200 else str(answer.status)
        except UpstreamError as error:
            failure = type(error).__name__
        if failure:
            figures.others[failure] = figures.others.get(failure, 0) + 1
            # A refusal costs next to nothing: without a pause a failing server would be hammered.
            await asyncio.sleep(0.01)
        else:
            figures.latencies_s.append(time.monotonic() - now)
