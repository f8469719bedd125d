"""Counts the calls that are lost when cold starts meet faults: `python benchmarks/faults.py cold`.

    [--rounds 20] [--calls 50] [--json FILE]

Two gateways in processes of their own that share a Redis, a stand-in for KEDA that follows the pool's stream and keeps
its replica, and `oriel inference` as the only server. In a round the server is stopped because the pool goes to zero.
In the same moment, or up to 0.7 s later, calls of two tiers come to both gateways, and the gateway that has KEDA's
stream is restarted. The server that is started for the calls is killed while it starts, and started again.

    lost          answers that were not 200 (promised: none)
    started       rounds in which the calls needed a start; in the others the server answered them before it ended
    answered s    from the calls until the last answer; 2 s of it is KEDA's wait before it opens a stream again

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
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from onnx import TensorProto, helper, save_model
from tests.conformance.redis_server import PASSWORD, redis_server
from tests.gateway.process import Process, gateway_process
from tests.gateway.stack import BRONZE, GOLD, documents

from gateway_bench.pushes import Stream
from oriel_cli.units import free_ports

POLL_S = 0.02
CRASH_S = 0.1
APART_S, SPREAD = 0.1, 8
GOOD = "200"
_COMMAND = "import sys; from oriel_cli.main import main; sys.exit(main())"
BODY = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()


@dataclass(frozen=True, slots=True)
class Round:
    lost: int
    started: bool
    answered_s: float
    statuses: dict[str, int]


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
    """The pool's only server, as a Deployment with 0 or 1 replicas runs it: one that dies is started again."""

    def __init__(self, root: Path, port: int, metrics_port: int) -> None:
        self._root, self._port, self._metrics_port = root, port, metrics_port
        self._process: asyncio.subprocess.Process | None = None
        self.kill_next = False

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-c", _COMMAND, "inference", "--model-repository", str(self._root)),
            *("--http-port", str(self._port), "--metrics-port", str(self._metrics_port), "--allow-grpc", "false"),
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def run(self, wanted: asyncio.Event) -> None:
        """Keep a server while one is wanted; never returns."""
        while True:
            await wanted.wait()
            await self._start()
            assert self._process is not None
            if self.kill_next:
                await asyncio.sleep(CRASH_S)
                self.kill_next = False
                self._process.kill()
            await self._process.wait()

    def stop(self) -> None:
        """Ask it to end, as the kubelet does."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()


async def call(port: int, key: str) -> str:
    """Return the status of one call over a connection of its own, with the reason of a refusal; "" if none came."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v2/models/digits/infer HTTP/1.1\r\nhost: a\r\nx-api-key: {key}\r\n"
        head += "x-request-timeout-ms: 110000\r\n"
        writer.write(f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY)
        answer = await reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().partition(b"content-length: ")[2].split()[0])
        body = await reader.readexactly(length)
        writer.close()
    except (OSError, asyncio.IncompleteReadError):
        return ""
    status = answer.split()[1].decode()
    return status if status == GOOD else f"{status} {json.loads(body).get('reason')}"


async def rounds(count: int, calls: int) -> list[Round]:
    with tempfile.TemporaryDirectory() as folder:
        async with redis_server() as redis, AsyncExitStack() as stack:
            root = Path(folder, "models")
            write_model(root)
            port, metrics_port = free_ports("127.0.0.1", 2)
            server, wanted = Server(root, port, metrics_port), asyncio.Event()
            keeping = asyncio.create_task(server.run(wanted))
            stack.callback(keeping.cancel)
            stack.callback(server.stop)

            async def start() -> tuple[Process, AsyncExitStack, int]:
                (scaler,) = free_ports("127.0.0.1", 1)
                own = AsyncExitStack()
                words = ("--scaler-port", str(scaler), "--limiter", redis.url)
                return await own.enter_async_context(gateway_process(Path(folder), files(port), *words)), own, scaler

            members = [await start(), await start()]
            found = []
            for number in range(count):
                found.append(await one_round(members, start, server, wanted, calls, number % SPREAD * APART_S))
                print(f"{len(found)}: {found[-1]}", file=sys.stderr, flush=True)
            for _, own, _ in members:
                await own.aclose()
            wanted.clear()
            server.stop()
            return found


async def one_round(members: list, start, server: Server, wanted: asyncio.Event, calls: int, gone_s: float) -> Round:  # type: ignore[no-untyped-def,type-arg]
    """Begin with a server that is ready and idle, and KEDA's stream at the second gateway.

    gone_s: how long before the calls the server is stopped.
    """
    stream = Stream("p", [members[1][2], members[0][2]])
    following = asyncio.create_task(stream.follow())
    wanted.set()
    while await call(members[0][0].port, GOLD) != GOOD or await call(members[1][0].port, GOLD) != GOOD:
        await asyncio.sleep(POLL_S)
    await stream.opened.wait()
    wanted.clear()
    server.kill_next = True
    began_s = time.monotonic()
    server.stop()
    await asyncio.sleep(gone_s)
    keys = [GOLD, BRONZE]
    waiting = [asyncio.create_task(call(members[n % 2][0].port, keys[n // 2 % 2])) for n in range(calls)]
    await asyncio.sleep(POLL_S)
    stream.ports.pop(0)  # KEDA's next stream comes to the other gateway
    os.kill(members[1][0].pid, signal.SIGTERM)
    restarted = asyncio.create_task(start())
    while not stream.heard or stream.heard[-1] < began_s:
        if all(each.done() for each in waiting):
            break  # the server that was about to stop has answered them
        await asyncio.sleep(POLL_S)
    wanted.set()
    began = not all(each.done() for each in waiting)
    statuses = await asyncio.gather(*waiting)
    ended_s = time.monotonic()
    following.cancel()
    server.kill_next = False
    await members[1][1].aclose()
    members[1] = await restarted
    return Round(
        started=began,
        lost=sum(status != GOOD for status in statuses),
        answered_s=ended_s - began_s,
        statuses=dict(Counter(statuses)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ["OTEL_TRACES_SAMPLER_ARG"] = "0"  # of the gateways
    os.environ["ORIEL_LIMITER_PASSWORD"] = PASSWORD
    found = asyncio.run(rounds(args.rounds, args.calls))
    took = [each.answered_s for each in found]
    lost = sum(each.lost for each in found)
    print(
        f"{args.rounds * args.calls} calls in {args.rounds} rounds, {sum(each.started for each in found)} "
        f"of them with a start: {lost} lost; all answered after "
        f"{statistics.median(took):.1f} s (median), {max(took):.1f} s (longest); load average {os.getloadavg()[0]:.1f}"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in found], indent=1))
    sys.exit(int(lost > 0))
