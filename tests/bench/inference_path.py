"""CPU cost of the inference server's v2 HTTP path: server CPU-microseconds per request, by model and connections.

python tests/bench/inference_path.py [--repository DIR] [--model digits] [--seconds 4] [--connections 1 8 32]

Starts `oriel inference` as a process, drives it with raw sockets from this one and reads the server's CPU time from
/proc. Needs Linux.
"""

import argparse
import asyncio
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from oriel_wire.v2.http import encode_request
from oriel_wire.v2.messages import InferRequest, tensor

ROOT = Path(__file__).resolve().parents[2]


class Client(asyncio.Protocol):
    """Sends the same request again and again on one connection, counts the answers and their latencies."""

    def __init__(self, request: bytes, latencies: list[float]) -> None:
        self.request = request
        self.latencies = latencies
        self.running = True
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, body = self.buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(re.search(rb"content-length: (\d+)", head)[1])
        if len(body) < length:
            return
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(self.buffer[:600].decode())
        self.latencies.append(time.perf_counter() - self.sent)
        self.buffer = b""
        if self.running:
            self.send()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_for(port: int, model: str, rows: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}") as answer:
        metadata = msgspec.json.decode(answer.read())
    inputs = []
    for each in metadata["inputs"]:
        shape = [rows if axis == 0 else max(1, dim) for axis, dim in enumerate(each["shape"])]
        inputs.append(tensor(each["name"], np.random.default_rng(1).random(shape, dtype=np.float32)))
    parts, length = encode_request(InferRequest(model_name=model, inputs=inputs, binary_default=True))
    body = b"".join(parts)
    head = (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        f"inference-header-content-length: {length}\r\nx-oriel-timeout-ms: 30000\r\nx-oriel-priority: 1\r\n"
        "x-oriel-tenant: acme\r\nx-request-id: 0123456789abcdef\r\n"
        "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00\r\n\r\n"
    )
    return head.encode() + body


async def drive(port: int, pid: int, request: bytes, connections: int, seconds: float) -> str:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    clients = [Client(request, latencies) for _ in range(connections)]
    for client in clients:
        await loop.create_connection(lambda client=client: client, "127.0.0.1", port)
    await asyncio.sleep(1.0)
    latencies.clear()
    before, began = cpu_s(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    spent, elapsed = cpu_s(pid) - before, time.perf_counter() - began
    done = sorted(latencies)
    for client in clients:
        client.running = False
    await asyncio.sleep(0.2)
    for client in clients:
        client.transport.close()
    p50, p99 = done[len(done) // 2] * 1e3, done[len(done) * 99 // 100] * 1e3
    return (
        f"{connections:3d} connections: {spent / len(done) * 1e6:6.0f} CPU-us/request  {len(done) / elapsed:7.0f} req/s"
        f"  p50 {p50:6.2f} ms  p99 {p99:6.2f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repository", type=Path, default=ROOT / "examples/models")
    parser.add_argument("--model", default="digits")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("oriel")), "inference", "--model-repository", str(args.repository)]
    command += ["--http-port", str(port), "--grpc-port", "0", "--metrics-port", "0"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").close()
                break
            except OSError:
                time.sleep(0.1)
        request = request_for(port, args.model, args.rows)
        print(f"model {args.model}, {len(request)} bytes per request")
        for connections in args.connections:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                print(runner.run(drive(port, server.pid, request, connections, args.seconds)))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{args.model}/stats") as answer:
            stats = msgspec.json.decode(answer.read())["model_stats"][0]
        print("batches by rows:", {b["batch_size"]: b["compute_infer"]["count"] for b in stats["batch_stats"]})
    finally:
        server.terminate()
        server.wait(10)


if __name__ == "__main__":
    main()
