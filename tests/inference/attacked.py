"""An inference server in a process of its own that tests attack; they watch its memory, and whether it dies."""

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np

from oriel_wire.v2.proto import v2_pb2

from . import models
from .attacks import INFER, X

# Catches a hang; a second per answer is not asserted but was measured: benchmarks/results/2026-11-21-promises.md.
ANSWER_S = 60.0


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    http: httpx.Client
    channel: grpc.Channel
    grpc_port: int
    baseline: int = 0

    def fresh(self) -> None:
        """Forget the peak of the previous attack."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    def grown_mib(self) -> int:
        """Return how far the server's memory peaked above what it was after the start, in MiB."""
        return (self.peak_bytes() - self.baseline) >> 20

    def kept_mib(self) -> int:
        """Return how much more memory the server has now than after its start, in MiB."""
        return (self._bytes("VmRSS") - self.baseline) >> 20

    def large_mappings(self) -> list[str]:
        """Return the mappings that hold 4 MiB or more of private memory: what holds memory, if there is too much."""
        found, name = [], ""
        for line in Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            if line.startswith("Private_Dirty:"):
                kib = int(line.split()[1])
                if kib >= 4096:
                    found.append(f"{name}: {kib >> 10} MiB")
            elif re.match("[0-9a-f]+-", line):
                fields = line.split()
                name = f"{fields[0]} {' '.join(fields[5:])}"
        return found

    def peak_bytes(self) -> int:
        return self._bytes("VmHWM")

    def _bytes(self, name: str) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split(f"{name}:")[1].split()[0]) * 1024

    def canary(self) -> None:
        assert self.process.poll() is None, "the server died"
        assert self.http.post(INFER, json={"inputs": [X]}).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        request = v2_pb2.ModelInferRequest(model_name="double")
        request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
        request.raw_input_contents.append(np.arange(4, dtype="<f4").tobytes())
        answer = v2_pb2.ModelInferResponse.FromString(self.call("ModelInfer", request.SerializeToString()))
        assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [0, 2, 4, 6]

    def call(self, method: str, data: bytes) -> bytes:
        """Make a gRPC call with raw bytes. Raises grpc.RpcError."""
        answer: bytes = self.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=ANSWER_S)
        return answer


@contextlib.contextmanager
def attacked(root: Path) -> Iterator[Server]:
    """Start a server on models that are written into `root`."""
    models.put(root, "double", models.double(), models.DOUBLE)
    models.put(root, "pair", models.two_inputs(), None)
    models.put(root, "echo", models.echo(), None)
    entry = '{ name: "%s" data_type: TYPE_FP32 dims: [ -1, -1 ] }'
    config = f"input [ {entry % 'a'}, {entry % 'b'} ] output [ {entry % 'sum'} ]"
    models.put(root, "free", models.two_inputs(), config)
    words = ["--http-port=0", "--grpc-port=0", "--allow-metrics=false", "--log-info=true", "--log-error=false"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "oriel_cli.main", "inference", "--model-repository", str(root), *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    ready = None
    while ready is None:
        line = process.stderr.readline()
        assert line, "the server did not start"
        ready = re.search(r" ready: HTTP (\d+), gRPC (\d+)", line)
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with (
        process,
        httpx.Client(base_url=f"http://127.0.0.1:{ready[1]}", trust_env=False, timeout=ANSWER_S) as client,
        grpc.insecure_channel(f"127.0.0.1:{ready[2]}", options=options) as channel,
    ):
        running = Server(process, client, channel, int(ready[2]))
        try:
            for _ in range(3):
                running.canary()
            running.baseline = running.peak_bytes()
            yield running
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0
