"""Whether the cause of a late call is the place that held it up: `python benchmarks/faults.py causes`.

    [--calls 100] [--delay-ms 150] [--place PLACE ...]

A gateway, a logic server with one worker whose service calls a model, and an inference server, and a relay between the
first two. Each place in turn holds one call up for `--delay-ms`, twice the target: the client sends its body late;
another call has the only permit, the only worker or the only instance of the model; the relay refuses connections, or
keeps a request or the body of an answer; the service or the model takes its time. Then the gateway is asked for its
decision about the call. Ends with exit status 1 if the cause is another place in more than one call of a hundred in any
place, or if the places of a call differ from its whole time by more than a hundredth.

The limiter is left out: it needs a store that several gateways share (`tests/gateway/test_objectives.py` has it).
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from harness.processes import accepts, free_ports, gateway, inference, serving, status_of

from oriel_policies.promise.objectives import LEARN_EVERY
from oriel_wire.engine.client import HttpClient

SERVICE = '''
import asyncio
import time

import numpy as np

from oriel_logic import service


def work(seconds):
    time.sleep(seconds)


@service
async def delayed(request, models, ctx):
    """Takes its time where the body says."""
    asked = request.json()
    await ctx.run(work, asked.get("work_s", 0.0))
    await asyncio.sleep(asked.get("own_s", 0.0))
    await models.infer("nap", {"seconds": np.array([asked.get("model_s", 0.0)], np.float32)})
    return asked
'''
MODEL = """
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            seconds = pb_utils.get_input_tensor_by_name(request, "seconds").as_numpy()
            time.sleep(float(seconds[0]))
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("slept", seconds)]))
        return answers
"""
CONFIG = """
backend: "python"
input [ { name: "seconds" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "slept" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
PATH = "/v1/services/delayed"
LEARNED = 10  # calls from which the gateway learns what is usual
LEAD_S = 0.02  # so much earlier the other call comes
TRIES = 5
RIGHT = 0.99
APART = 0.01
PATIENCE_S = 600.0


def documents(folder: Path, relay: int, logic: int, target_ms: float) -> Path:
    """Write the policy documents: pool `wide` calls the relay, and `narrow` the logic server, one call at a time."""
    folder.mkdir()
    (folder / "bench.toml").write_text(
        f"""
[tiers.gold]
band = 0
target_ms = {target_ms:g}
give_up_ms = {PATIENCE_S * 1e3:g}
[tenants.bench]
tier = "gold"
services = ["*"]
keys = [{{ sha256 = "{sha256(b"bench").hexdigest()}" }}]
[pools.wide]
endpoints = ["127.0.0.1:{relay}"]
learn_concurrency = false
[pools.narrow]
endpoints = ["127.0.0.1:{logic}"]
max_inflight = 1
learn_concurrency = false
[[routes]]
name = "narrow"
service = "*"
headers = {{ x-pool = "narrow" }}
pool = "narrow"
[[routes]]
service = "*"
pool = "wide"
"""
    )
    return folder


class Relay:
    """Passes bytes on to a port of this machine, and can keep those of one request, or those of its answer's body.

    held: what the request has in its head. request_s, answer_s: for how long they are kept. sleep: how that passes.
    """

    def __init__(self, port: int, to: int, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.port = port
        self.held = b""
        self.request_s = self.answer_s = 0.0
        self._to = to
        self._sleep = sleep
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def up(self) -> None:
        """Accept connections."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    def down(self) -> None:
        """Refuse connections, and break those that there are."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def close(self) -> None:
        """Refuse connections, and wait until those that there were have ended."""
        self.down()
        while self._open:
            await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with suppress(OSError):
            await self._join(reader, writer, *await asyncio.open_connection("127.0.0.1", self._to))
        writer.close()
        self._open.discard(writer)

    async def _join(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answers: asyncio.StreamReader,
        requests: asyncio.StreamWriter,
    ) -> None:
        answer_s = 0.0

        async def there() -> None:
            nonlocal answer_s
            while data := await reader.read(65536):
                if self.held and self.held in data:
                    answer_s = self.answer_s
                    await self._sleep(self.request_s)
                requests.write(data)
            requests.close()

        async def back() -> None:
            nonlocal answer_s
            while data := await answers.read(65536):
                if answer_s:
                    head, blank, data = data.partition(b"\r\n\r\n")
                    writer.write(head + blank)
                    await self._sleep(answer_s)
                    answer_s = 0.0
                writer.write(data)
            writer.close()

        try:
            await asyncio.gather(there(), back())
        finally:
            requests.close()


class Stack:
    """The three servers. delay_s: for how long a place holds a call up."""

    def __init__(self, port: int, admin: int, relay: Relay, delay_s: float) -> None:
        self.relay = relay
        self.delay_s = delay_s
        self._port = port
        self._admin = HttpClient(host="127.0.0.1", port=admin)

    async def call(self, request_id: str, *, pool: str = "wide", pause_s: float = 0.0, **asked: float) -> None:
        """Call the service. pause_s: between the two parts of the body. asked: seconds, by what takes them."""
        body = json.dumps(asked).encode()
        head = (
            f"POST {PATH} HTTP/1.1\r\nhost: bench\r\nx-api-key: bench\r\nx-request-id: {request_id}\r\n"
            f"x-pool: {pool}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(head.encode() + body[:1])
        if pause_s:
            await asyncio.sleep(pause_s)
        writer.write(body[1:])
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        if not answer.startswith(b"HTTP/1.1 200"):
            sys.exit(f"a call was not answered: {answer[:300]!r}")

    async def behind(self, request_id: str, *, pool: str = "wide", **asked: float) -> None:
        """Make a call behind another one, which takes its time."""
        other = asyncio.ensure_future(self.call(f"{request_id}-other", pool=pool, **asked))
        await asyncio.sleep(LEAD_S)
        await self.call(request_id, pool=pool)
        await other

    async def decision(self, request_id: str) -> dict[str, Any]:
        """Return what the gateway says of a call."""
        answer = await self._admin.request(
            "GET", f"/decisions/{request_id}", (), deadline=time.monotonic() + PATIENCE_S
        )
        found: dict[str, Any] = json.loads(answer.body)["decisions"][0]
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._admin.close()
        await self.relay.close()

    async def warm_up(self) -> None:
        """Let the gateway learn what is usual."""
        for number in range(LEARNED * LEARN_EVERY):
            await self.call(f"usual-{number}", pool=("wide", "narrow")[number % 2])


async def without_an_endpoint(stack: Stack, request_id: str) -> None:
    stack.relay.down()
    held = asyncio.ensure_future(stack.call(request_id))
    await asyncio.sleep(stack.delay_s)
    await stack.relay.up()
    await held


async def on_the_way(stack: Stack, request_id: str, *, request_s: float = 0.0, answer_s: float = 0.0) -> None:
    relay = stack.relay
    relay.held, relay.request_s, relay.answer_s = request_id.encode(), request_s, answer_s
    await stack.call(request_id)
    relay.held = b""


# Place -> what holds a call with this id up there.
PLACES: dict[str, Callable[[Stack, str], Awaitable[None]]] = {
    "body": lambda stack, name: stack.call(name, pause_s=stack.delay_s),
    "queue": lambda stack, name: stack.behind(name, pool="narrow", own_s=stack.delay_s),
    "endpoint": without_an_endpoint,
    "network": lambda stack, name: on_the_way(stack, name, request_s=stack.delay_s),
    "logic_wait": lambda stack, name: stack.behind(name, work_s=stack.delay_s),
    "logic": lambda stack, name: stack.call(name, own_s=stack.delay_s),
    "model_wait": lambda stack, name: stack.behind(name, model_s=stack.delay_s),
    "model": lambda stack, name: stack.call(name, model_s=stack.delay_s),
    "answer": lambda stack, name: on_the_way(stack, name, answer_s=stack.delay_s),
}


@dataclass
class Found:
    """What was said of the calls that one place held up.

    named: the causes. apart: the largest difference of a call's places from its whole time, as a share. missed: calls
    that were not held up, because they came before the other one, and were repeated.
    """

    named: Counter[str] = field(default_factory=Counter)
    apart: float = 0.0
    missed: int = 0

    def add(self, decision: dict[str, Any]) -> None:
        """Count one call."""
        promise, total = decision["promise"], decision["stages_ms"]["total"]
        self.named[promise["cause"] or promise["result"]] += 1
        self.apart = max(self.apart, abs(sum(promise["places_ms"].values()) - total) / total)

    def right(self, place: str) -> float:
        """Return the share of calls whose cause is `place`."""
        return self.named[place] / max(1, self.named.total())


async def hold_up(stack: Stack, place: str, name: str, found: Found) -> None:
    """Hold one call up in a place, and count what is said of it."""
    for attempt in range(TRIES):
        request_id = f"{name}-{attempt}"
        began = time.monotonic()
        await PLACES[place](stack, request_id)
        if time.monotonic() - began >= stack.delay_s / 2.0:
            found.add(await stack.decision(request_id))
            return
        found.missed += 1


@contextmanager
def servers(root: Path, delay_s: float) -> Iterator[tuple[int, int, int, int]]:
    """Run the servers. Yields the ports of the gateway, of its admin, of the relay and of the logic server."""
    version = root / "models" / "nap" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(MODEL)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (root / "services").mkdir()
    (root / "services" / "delayed.py").write_text(SERVICE)
    relay, logic, logic_admin = free_ports(3)
    with ExitStack() as stack:
        _, models, _ = stack.enter_context(inference(root / "models"))
        command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(root / "services")]
        command += ["--inference", f"127.0.0.1:{models}", "--workers", "1", "--no-watch"]
        command += ["--http-port", str(logic), "--admin-port", str(logic_admin)]
        ready = f"http://127.0.0.1:{logic_admin}/health/ready"
        stack.enter_context(serving(command, lambda: accepts(logic) and status_of(ready) == 200, own_session=False))
        policies = documents(root / "policies", relay, logic, delay_s * 500.0)
        _, port, admin = stack.enter_context(gateway(policies))
        yield port, admin, relay, logic


@asynccontextmanager
async def opened(port: int, admin: int, relay: int, logic: int, delay_s: float) -> AsyncIterator[Stack]:
    """Begin to relay, and warm up."""
    between = Relay(relay, logic)
    await between.up()
    stack = Stack(port, admin, between, delay_s)
    try:
        await stack.warm_up()
        yield stack
    finally:
        await stack.close()


async def measure(ports: tuple[int, int, int, int], args: argparse.Namespace) -> dict[str, Found]:
    found = {place: Found() for place in args.place or PLACES}
    async with opened(*ports, args.delay_ms / 1e3) as stack:
        for number in range(args.calls):
            for place, of in found.items():
                await hold_up(stack, place, f"{place}-{number}", of)
    return found


def kept(found: dict[str, Found]) -> bool:
    """Return whether each cause is the place that it has to be, and the places of each call are its whole time."""
    return all(of.right(place) >= RIGHT and of.apart <= APART for place, of in found.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=100, help="in each place")
    parser.add_argument("--delay-ms", type=float, default=150.0)
    parser.add_argument("--place", choices=PLACES, action="append", help="only this one; may be repeated")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), args.delay_ms / 1e3) as ports:
        found = asyncio.run(measure(ports, args))
    print(f"{'place':12}{'calls':>7}{'right':>9}{'apart':>9}  other causes; calls that were not held up")
    for place, of in found.items():
        others = {cause: count for cause, count in of.named.items() if cause != place}
        row = f"{place:12}{of.named.total():7}{of.right(place):9.1%}{of.apart:9.3%}"
        print(f"{row}  {others or '-'}; {of.missed}")
    return 0 if kept(found) else 1


if __name__ == "__main__":
    sys.exit(main())
