"""Plans of calls, played on the bare engine or over HTTP on a server.

A plan is {"since": seconds, "until": seconds or null, "streams": [{"at": seconds, "header": a line or "", "calls":
[[ids of the prompt, tokens of the answer], ...]}, ...]}. A stream sends its first call `at`, and each one that follows
when the last one has ended. What comes before `since` is not counted, and what still runs at `until` is given up.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.processes import PEERS

__all__ = ["Call", "Plan", "Played", "Target", "bare", "generate_stream", "over_http", "prompt"]

Plan = dict[str, Any]
GIVEN_UP = "given up"


@dataclass(slots=True)
class Call:
    """One call. sent, ended: seconds since the plan began.

    arrivals: the same of each event with tokens, and their number.
    reason: the words with which it ended early, "" if it did not.
    """

    stream: int
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    reason: str = GIVEN_UP

    @property
    def tokens(self) -> int:
        """Return the number of tokens that came."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_s(self) -> float:
        """Return the seconds from sending to the first token."""
        return self.arrivals[0][0] - self.sent

    @property
    def token_s(self) -> float:
        """Return the mean seconds from one token to the next."""
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / max(1, self.tokens - 1)


@dataclass(slots=True)
class Played:
    """The calls of a plan. since, until: the seconds that count. cpu_s: of the server, meanwhile."""

    since: float
    until: float
    cpu_s: float
    calls: list[Call]

    def tokens(self, streams: range, since: float = 0.0, until: float = 1e9) -> int:
        """Return the tokens that came for these streams in the seconds that count, or in a part of them."""
        since, until = max(since, self.since), min(until, self.until)
        mine = [call for call in self.calls if call.stream in streams]
        return sum(count for call in mine for at, count in call.arrivals if since <= at < until)


def prompt(chance: random.Random, tokens: int) -> list[int]:
    """Ids of ordinary tokens, which no cache has seen before."""
    return [chance.randrange(1000, 40000) for _ in range(tokens)]


@contextmanager
def bare(
    model: Path, *options: int, python: str = sys.executable, program: str = "bare.py"
) -> Iterator[Callable[[Plan], Played]]:
    """An engine in a process of its own. program: below `peers/language`. options: of the program, after the model."""
    command = [python, str(PEERS / "language" / program), str(model), *map(str, options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None and process.stdout is not None
        told, said = process.stdin, process.stdout

        def play(plan: Plan) -> Played:
            told.write(json.dumps(plan) + "\n")
            found = json.loads(said.readline())
            calls = [Call(stream, sent, came, "") for stream, sent, came in found["calls"]]
            return Played(plan["since"], found["seconds"], found["cpu_s"], calls)

        if said.readline() != "ready\n":
            sys.exit(f"{program} did not load the model")
        yield play
        told.close()


@dataclass(frozen=True, slots=True)
class Target:
    """A server that streams. body: makes a request of the ids of a prompt and the tokens of its answer. count: the
    tokens of an event. cpu_s: the CPU seconds of its processes so far.
    """

    port: int
    path: str
    body: Callable[[Sequence[int], int], dict[str, Any]]
    count: Callable[[bytes], int]
    cpu_s: Callable[[], float]


def generate_stream(port: int, cpu_s: Callable[[], float]) -> Target:
    """The model `chat` of an inference server, or of a gateway before it."""

    def body(ids: Sequence[int], tokens: int) -> dict[str, Any]:
        sampling = json.dumps({"max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        return {"input_ids": ids, "stream": True, "sampling_parameters": sampling}

    def count(event: bytes) -> int:
        ids = json.loads(event).get("output_ids", [])
        return len(ids) if isinstance(ids, list) else 1

    return Target(port, "/v2/models/chat/generate_stream", body, count, cpu_s)


async def _ask(target: Target, content: bytes, header: str, call: Call, began: float) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    head = [f"POST {target.path} HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    head += [f"content-length: {len(content)}", *[header] * bool(header), "\r\n"]
    writer.write("\r\n".join(head).encode() + content)
    try:
        answer, error = await reader.readuntil(b"\r\n\r\n"), ""
        while b" 200 " in answer[:15]:
            event = (await reader.readuntil(b"\n\n")).partition(b"data: ")[2]
            if event.startswith(b"{") and (count := target.count(event)):
                call.arrivals.append((time.monotonic() - began, count))
            if b'"error"' in event:
                error = event.decode()
        call.reason = (answer + await reader.read(600)).decode(errors="replace")
    except asyncio.IncompleteReadError as end:
        call.reason = error or "" if b"\r\n0\r\n" in end.partial else f"closed after {end.partial!r}"
    except OSError as broken:
        call.reason = repr(broken)
    finally:
        writer.close()


async def _stream(target: Target, number: int, stream: dict[str, Any], began: float, calls: list[Call]) -> None:
    await asyncio.sleep(max(0.0, began + stream["at"] - time.monotonic()))
    for ids, tokens in stream["calls"]:
        calls.append(Call(number, time.monotonic() - began))
        content = json.dumps(target.body(ids, tokens)).encode()
        await _ask(target, content, stream["header"], calls[-1], began)


def over_http(target: Target, plan: Plan) -> Played:
    """Play a plan on a server."""

    async def played() -> Played:
        began, calls, streams = time.monotonic(), list[Call](), enumerate(plan["streams"])
        tasks = [asyncio.create_task(_stream(target, number, each, began, calls)) for number, each in streams]
        await asyncio.sleep(plan["since"])
        since, before = time.monotonic() - began, target.cpu_s()
        await asyncio.wait(tasks, timeout=plan["until"] and plan["until"] - since)
        until, used = time.monotonic() - began, target.cpu_s() - before
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return Played(since, until, used, calls)

    return asyncio.run(played())
