"""What is lost when cold starts meet faults: `python benchmarks/faults.py cold`.

    [--cold 1000] [--rounds 100] [--calls 50] [--round-s 180] [--json FILE]

Two gateways in processes of their own that share a Redis, a stand-in for KEDA that follows the pool's stream and keeps
its replica, and `oriel inference` as the only server. In a round the server is stopped because the pool goes to zero.
In the same moment, or up to 0.7 s later, calls of two tiers come to both gateways, and the gateway that has KEDA's
stream is restarted. The server that is started for the calls is killed while it starts, and started again. Rounds are
repeated until `--cold` calls were held for a start.

    held          calls that waited for a start, by their Server-Timing; the server answered the others before it ended
    lost          answers that were not 200 (promised: none)
    crashed       whether the first server of the start was killed
    answered s    from the calls until the last answer; 2 s of it is KEDA's wait before it opens a stream again

A round that takes longer than `--round-s` ends the command with exit status 1, and with what it was waiting for.

The gateway that is restarted refuses what it still holds after 20 s: on a machine on which two starts take longer than
that, those calls count as lost.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.processes import state_environment
from onnx import TensorProto, helper, save_model
from tests.conformance.redis_server import PASSWORD, redis_server
from tests.gateway.process import Process, gateway_process
from tests.gateway.stack import BRONZE, GOLD, documents

from gateway_bench.pushes import Stream
from oriel_cli.up.units import free_ports

POLL_S = 0.02
CRASH_S = 0.1
APART_S, SPREAD = 0.1, 8
DEADLINE_S = 110.0
ANSWER_S = DEADLINE_S + 20.0  # a call that has no answer by then will never have one
LOOK_S = 3.0
GOOD = "200"
_COMMAND = "import sys; from oriel_cli.main import main; sys.exit(main())"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


@dataclass(frozen=True, slots=True)
class Round:
    held: int
    lost: int
    crashed: bool
    answered_s: float
    statuses: dict[str, int]


@dataclass(frozen=True, slots=True)
class Member:
    """A gateway. end: stops it and waits for its end."""

    process: Process
    scaler_port: int
    end: AsyncExitStack


class Stuck(Exception):
    """A round took too long."""


def write_model(root: Path) -> None:
    """Write the model `digits`, which adds its input to itself."""
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ("n", 4)) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", tensors[:1], tensors[1:])
    (root / "digits/1").mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    save_model(model, str(root / "digits/1/model.onnx"))


def files(port: int) -> dict[str, bytes]:
    """Documents of one pool that scales between none and one server."""
    scaling = "[pools.p.scaling]\nminimum = 0\nmaximum = 1\nstart_ms = 10000\nkeep_alive_ms = 1000\nhold_ms = 120000\n"
    text = documents([port], pool="", extra=scaling, max_queue=4000)["all.toml"].decode()
    lines = [line for line in text.split("\n") if not line.startswith(("endpoints", "grpc_endpoints"))]
    pool = f'[pools.p]\nprobe = "/v2/health/ready"\ndiscover = "dns:127.0.0.1:{port}"'
    return {"all.toml": "\n".join(lines).replace("[pools.p]", pool, 1).encode()}


class Server:
    """The pool's only server, as a Deployment with 0 or 1 replicas runs it: one that dies is started again.

    kill_next: kill the server that is started next, while it starts. crashes, starts: how many there were.
    """

    def __init__(self, root: Path, port: int, metrics_port: int) -> None:
        self._root, self._port, self._metrics_port = root, port, metrics_port
        self._process: asyncio.subprocess.Process | None = None
        self.kill_next = False
        self.crashes = self.starts = 0

    async def _start(self) -> asyncio.subprocess.Process:
        self.starts += 1
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _COMMAND, "inference", "--model-repository", str(self._root)),
            *("--http-port", str(self._port), "--metrics-port", str(self._metrics_port), "--allow-grpc", "false"),
            stderr=asyncio.subprocess.DEVNULL,
            env={**os.environ, **state_environment()},
        )
        return self._process

    async def run(self, wanted: asyncio.Event) -> None:
        """Keep a server while one is wanted; never returns."""
        while True:
            await wanted.wait()
            process = await self._start()
            if self.kill_next:
                await asyncio.sleep(CRASH_S)
                self.kill_next = False
                self.crashes += 1
                with suppress(ProcessLookupError):  # it has ended by itself
                    process.kill()
            await process.wait()

    def stop(self, how: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, as the kubelet does."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(how)

    def __str__(self) -> str:
        process = self._process
        if process is None or process.returncode is not None:
            return f"not running, {self.starts} starts"
        return f"process {process.pid}, {self.starts} starts, {self.crashes} of them killed"


async def call(port: int, key: str) -> tuple[str, bool]:
    """Make a call over a connection of its own.

    Returns its status, with the reason of a refusal or why there is none, and whether it was held for a start.
    """
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                head = f"POST /v2/models/digits/infer HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\n"
                head += f"x-request-timeout-ms: {DEADLINE_S * 1e3:.0f}\r\n"
                writer.write(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
                answer = await reader.readuntil(b"\r\n\r\n")
                length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
                body = await reader.readexactly(length)
            finally:
                writer.close()
    except TimeoutError:
        return f"no answer in {ANSWER_S:.0f} s", False
    except ConnectionRefusedError:
        return "refused to connect", False
    except (OSError, asyncio.IncompleteReadError) as error:
        return f"closed without an answer: {type(error).__name__}", False
    status = answer.split()[1].decode()
    return status if status == GOOD else f"{status} {json.loads(body).get('reason')}", b"gateway-cold-start" in answer


class Scene:
    """Two gateways and the server of their pool.

    start: starts a gateway. phase: what the round waits for, since `since_s`.
    """

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Member]], server: Server) -> None:
        self._start = start
        self._server = server
        self._stream: Stream | None = None
        self._waiting: list[asyncio.Task[tuple[str, bool]]] = []
        self.wanted = asyncio.Event()
        self.members: list[Member] = []
        self.phase, self.since_s = "", 0.0

    def _enter(self, phase: str) -> None:
        self.phase, self.since_s = phase, time.monotonic()

    async def round(self, calls: int, gone_s: float) -> Round:
        """Begin with a server that is ready and idle, and KEDA's stream at the second gateway.

        gone_s: how long before the calls the server is stopped.
        """
        one, other = self.members
        stream = self._stream = Stream("p", [other.scaler_port, one.scaler_port])
        self._waiting = []
        async with asyncio.TaskGroup() as tasks:
            following = tasks.create_task(stream.follow())
            self.wanted.set()
            self._enter("a server that answers through both gateways")
            for member in self.members:
                while (await call(member.process.port, GOLD))[0] != GOOD:
                    await asyncio.sleep(POLL_S)
            self._enter("KEDA's stream")
            await stream.opened.wait()
            self.wanted.clear()
            self._server.kill_next, crashes = True, self._server.crashes
            began_s = time.monotonic()
            self._server.stop()
            await asyncio.sleep(gone_s)
            keys, ports = [GOLD, BRONZE], [member.process.port for member in self.members]
            self._waiting = [tasks.create_task(call(ports[n % 2], keys[n // 2 % 2])) for n in range(calls)]
            await asyncio.sleep(POLL_S)
            stream.ports.pop(0)  # KEDA's next stream comes to the first gateway
            os.kill(other.process.pid, signal.SIGTERM)
            restarted = tasks.create_task(self._start())
            self._enter("`true` on KEDA's stream")
            while not stream.heard or stream.heard[-1] < began_s:
                if all(each.done() for each in self._waiting):
                    break  # the server that was about to stop has answered them
                await asyncio.sleep(POLL_S)
            self.wanted.set()
            self._enter("the answers")
            answers = await asyncio.gather(*self._waiting)
            ended_s = time.monotonic()
            following.cancel()
            self._server.kill_next = False
            self._enter("the end of the gateway that was stopped")
            await other.end.aclose()
            self._enter("the new gateway")
            self.members[1] = await restarted
        return Round(
            held=sum(held for _, held in answers),
            lost=sum(status != GOOD for status, _ in answers),
            crashed=self._server.crashes > crashes,
            answered_s=ended_s - began_s,
            statuses=dict(Counter(status for status, _ in answers)),
        )

    async def close(self) -> None:
        """Stop the gateways and wait for their end."""
        for member in self.members:
            await member.end.aclose()

    def kill(self) -> None:
        """End everything at once."""
        self._server.stop(signal.SIGKILL)
        for member in self.members:
            with suppress(ProcessLookupError):
                os.kill(member.process.pid, signal.SIGKILL)

    async def described(self) -> str:
        """Return what the round waits for, and what can be seen of every process."""
        waited_s = time.monotonic() - self.since_s
        lines = [f"it waits for {self.phase}, for {waited_s:.0f} s"]
        lines.append(f"server: {self._server}, {'' if self.wanted.is_set() else 'not '}wanted")
        done = Counter(
            each.result()[0] if each.done() and not each.cancelled() else "no answer yet" for each in self._waiting
        )
        lines.append(f"calls: {dict(done)}")
        if self._stream is not None:
            heard = f"{time.monotonic() - self._stream.heard[-1]:.0f} s ago" if self._stream.heard else "never"
            lines.append(f"KEDA: last `true` {heard}; it asks ports {self._stream.ports}")
        for member in self.members:
            shown = await asyncio.to_thread(queues, member.process.admin_port)
            lines.append(f"gateway {member.process.pid}, scaler on {member.scaler_port}: {shown}")
        return "\n  ".join(lines)


def queues(admin_port: int) -> str:
    """Return what a gateway shows of its pools, or why it does not."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/queues", timeout=LOOK_S) as answer:
            return bytes(answer.read(4000)).decode()
    except OSError as error:
        return f"does not answer: {error}"


async def rounds(args: argparse.Namespace) -> list[Round]:
    """Repeat rounds until enough calls were held. Raises Stuck."""
    found: list[Round] = []
    with tempfile.TemporaryDirectory() as folder:
        async with redis_server() as redis, AsyncExitStack() as stack:
            root = Path(folder, "models")
            write_model(root)
            port, metrics_port = free_ports("127.0.0.1", 2)
            server = Server(root, port, metrics_port)

            async def start() -> Member:
                (scaler_port,) = free_ports("127.0.0.1", 1)
                end = AsyncExitStack()
                words = ("--scaler-port", str(scaler_port), "--limiter", redis.url)
                process = await end.enter_async_context(gateway_process(Path(folder), files(port), *words))
                return Member(process, scaler_port, end)

            scene = Scene(start, server)
            stack.push_async_callback(scene.close)
            for _ in range(2):
                scene.members.append(await start())
            keeping = asyncio.create_task(server.run(scene.wanted))
            stack.callback(server.stop)
            stack.callback(keeping.cancel)
            while len(found) < args.rounds and sum(each.held for each in found) < args.cold:
                turn = asyncio.create_task(scene.round(args.calls, len(found) % SPREAD * APART_S))
                await asyncio.wait((turn, keeping), timeout=args.round_s, return_when=asyncio.FIRST_COMPLETED)
                if not turn.done():
                    why = f": {keeping.exception()!r}" if keeping.done() else f" after {args.round_s:.0f} s"
                    text = f"round {len(found) + 1} has not ended{why}\n  {await scene.described()}"
                    scene.kill()
                    turn.cancel()
                    await asyncio.wait((turn,), timeout=args.round_s)
                    raise Stuck(text)
                found.append(turn.result())
                print(f"{len(found)}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cold", type=int, default=1000, help="calls that have to be held for a start (1000)")
    parser.add_argument("--rounds", type=int, default=100, help="at most (100)")
    parser.add_argument("--calls", type=int, default=50, help="of a round (50)")
    parser.add_argument("--round-s", type=float, default=180.0, help="that one round may take (180)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateways
    os.environ["ORIEL_LIMITER_PASSWORD"] = PASSWORD
    began_s = time.monotonic()
    try:
        found = asyncio.run(rounds(args))
    except Stuck as stuck:
        print(stuck)
        sys.exit(1)
    took = [each.answered_s for each in found]
    lost, held = sum(each.lost for each in found), sum(each.held for each in found)
    print(
        f"{args.calls * len(found)} calls in {len(found)} rounds, {held} of them held for a start: {lost} lost; "
        f"{sum(each.crashed for each in found)} servers killed while they started, {len(found)} gateways restarted; "
        f"all answered after {statistics.median(took):.1f} s (median), {max(took):.1f} s (longest); "
        f"{time.monotonic() - began_s:.0f} s in all, load average {os.getloadavg()[0]:.1f}"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    sys.exit(int(lost > 0 or held < args.cold))
