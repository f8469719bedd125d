"""Tokens made for nobody, and a killed engine: `python benchmarks/language.py ends --model FILE.gguf [--out FOLDER]`.

    left        20 streams, one after the other, whose client closes its connection when the 20th token has come
    expired     20 streams, one after the other, that may last for 700 ms
    killed      50 streams that all run (`oriel.max_running` is 64); `kill -9` of the engine's process when each has had
                three tokens; then a new call, again and again until it is answered

Further tokens are those that the inference server counts (`oriel_language_tokens_total`, kind `generated`, which its
engine has made) less those that the client had when it left or when the stream said that its time was over.

The engine's process is asked too, by the CPU time that it used after that moment, in steps of the same stream: it may
have made a token that the server dropped.

Targets: at most one further token a stream; each of the 50 streams ends with a reason within a second of the kill; the
next call is answered after the restart.
"""

import asyncio
import json
import os
import random
import re
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from harness.pages import Verdict, table
from harness.processes import cpu_s, free_ports, inference_command, serving, status_of, tree

from language_bench.page import Part, options
from language_bench.plans import prompt

CONFIGURATION = 'parameters: { key: "oriel.max_running" value: { string_value: "64" } }\n'
STREAMS, LEAVE, CALLS = 50, 20, 20


class Stream:
    """One stream of the server: the moments of its tokens, its last event, and when it ended."""

    def __init__(self, port: int, tokens: int, header: str = "x-bench: none", leave: int = 0) -> None:
        self.port, self.leave = port, leave
        sampling = json.dumps({"max_tokens": tokens, "temperature": 0, "ignore_eos": True})
        asked = {"input_ids": prompt(random.Random(), 32), "stream": True, "sampling_parameters": sampling}
        body = json.dumps(asked).encode()
        head = f"POST /v2/models/chat/generate_stream HTTP/1.1\r\nhost: x\r\n{header}\r\ncontent-length: {len(body)}"
        self.request = f"{head}\r\nconnection: close\r\n\r\n".encode() + body
        self.tokens, self.last, self.ended = 0, "", 0.0

    async def run(self) -> None:
        """Read until the end, or until the client leaves."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(self.request)
        try:
            self.last = (await reader.readuntil(b"\r\n\r\n")).decode()
            while not self.leave or self.tokens < self.leave:
                event = (await reader.readuntil(b"\n\n")).partition(b"data: ")[2]
                ids = json.loads(event).get("output_ids", []) if event else []
                self.tokens += len(ids) if isinstance(ids, list) else 1
                self.last = event.decode() or self.last
        except (asyncio.IncompleteReadError, OSError) as end:
            self.last += repr(getattr(end, "partial", end))
        self.ended = time.monotonic()
        writer.transport.abort()


def scrape(port: int) -> tuple[int, int]:
    """Tokens made so far, and calls that run."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    made = re.search(r'oriel_language_tokens_total{[^}]*kind="generated"} (\d+)', text)
    running = sum(int(float(n)) for n in re.findall(r'oriel_language_calls{[^}]*state="running"} (\S+)', text))
    return int(made[1]) if made else 0, running


def engine_of(pid: int) -> int:
    """The process of the engine below a server."""
    found = [each for each in tree(pid) if "language" in Path(f"/proc/{each}/cmdline").read_text()]
    print([Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ") for each in found])
    return found[-1]


async def further(ports: Sequence[int], engine: int, *words: object) -> tuple[list[int], list[float]]:
    """Tokens made after the end of each of CALLS streams, and steps by the engine's CPU time."""
    found, steps = [], []
    for _ in range(CALLS):
        before, _ = scrape(ports[1])
        stream = Stream(ports[0], *words)  # type: ignore[arg-type]
        used = cpu_s(engine)
        await stream.run()
        at_end = cpu_s(engine)
        made = -1
        while True:
            await asyncio.sleep(0.3)
            now, running = scrape(ports[1])
            if not running and now == made:
                break
            made = now
        found.append(made - before - stream.tokens)
        steps.append((cpu_s(engine) - at_end) / ((at_end - used) / max(1, stream.tokens)))
        print(found[-1], f"{steps[-1]:.1f}", stream.tokens, stream.last[-200:].strip())
    return found, steps


async def killed(ports: Sequence[int], engine: int) -> tuple[list[float], float, list[str]]:
    """Seconds from the kill to the end of each stream, those to the next answer, and the streams' last words."""
    streams = [Stream(ports[0], 2000) for _ in range(STREAMS)]
    tasks = [asyncio.create_task(each.run()) for each in streams]
    while min(each.tokens for each in streams) < 3:
        await asyncio.sleep(0.01)
    began = time.monotonic()
    os.kill(engine, signal.SIGKILL)
    await asyncio.gather(*tasks)
    while True:
        call = Stream(ports[0], 3)
        await call.run()
        if call.tokens == 3:
            break
        await asyncio.sleep(0.05)
    ends = [each.ended - began for each in streams]
    return ends, call.ended - began, sorted({each.last[-300:] for each in streams})


def main() -> None:
    args = options(__doc__).parse_args()
    part, rows = Part("ends", __doc__, args.out), []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "models", "chat", "1")
        place.mkdir(parents=True)
        (place / "model.gguf").write_bytes(args.model.read_bytes())
        (place.parent / "config.pbtxt").write_text(CONFIGURATION)
        http, grpc, metrics = free_ports(3)
        command = inference_command(Path(folder, "models"), http, grpc_port=grpc)
        command[command.index("--metrics-port") + 1] = str(metrics)
        with serving(command, lambda: status_of(f"http://127.0.0.1:{http}/v2/health/ready") == 200) as pid:
            asyncio.run(Stream(http, 50).run())
            engine = engine_of(pid)
            for name, words in (
                ("left", (2000, "x-bench: none", LEAVE)),
                ("expired", (2000, "x-oriel-stream: token=0;max=700")),
            ):
                found, steps = asyncio.run(further((http, metrics), engine, *words))
                rows.append(
                    (
                        name,
                        str(len(found)),
                        f"{sum(found)}",
                        f"{max(found)}",
                        f"{statistics.median(steps):.1f}, {max(steps):.1f}",
                    )
                )
                target = f"{name}: further tokens of a stream <= 1"
                part.verdicts.append(Verdict(target=target, found=f"at most {max(found)}", met=max(found) <= 1))
            ends, answered, said = asyncio.run(killed((http, metrics), engine))
            print(said)
            part.verdicts.append(
                Verdict(target="killed: every stream ended within 1 s", found=f"{max(ends):.2f} s", met=max(ends) <= 1)
            )
            part.verdicts.append(
                Verdict(target="killed: next call answered", found=f"after {answered:.1f} s", met=True)
            )
            rows.append(("killed", str(STREAMS), "-", "-", "-"))
    part.finish(
        table(
            (
                "case",
                "streams",
                "further tokens in all",
                "most of one stream",
                "engine's CPU after it, in steps: median, most",
            ),
            rows,
        )
    )
