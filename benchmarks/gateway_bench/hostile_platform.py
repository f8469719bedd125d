"""The platform that `hostile.py` attacks: a gateway, an inference server and a logic server as processes."""

import http.client
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from harness.processes import accepts, free_ports, gateway_command, inference_command, serving, status_of
from tests.inference import models

__all__ = ["HOST", "MIB", "Rig", "platform", "small"]

HOST = "127.0.0.1"
MIB = 2**20
TENANTS = {  # their keys are their names
    "canary": 'tier = "silver"',
    "first": 'tier = "gold"',
    "quiet": 'tier = "bronze"',
    "crowd": 'tier = "bronze"',
    "small": 'tier = "bronze"\nlimit = { requests_per_s = 1, burst = 1, concurrency = 1 }',
    "small_gold": 'tier = "gold"\nlimit = { requests_per_s = 1, burst = 1, concurrency = 1 }',
}
DOCUMENTS = """
[tiers]
gold = {{ band = 0, target_ms = 500, give_up_ms = 5000 }}
silver = {{ band = 1, target_ms = 2000, give_up_ms = 8000 }}
bronze = {{ band = 2, target_ms = 10000, give_up_ms = 30000 }}
[pools.models]
endpoints = ["127.0.0.1:{http}"]
grpc_endpoints = ["127.0.0.1:{grpc}"]
[pools.narrow]
endpoints = ["127.0.0.1:{http}"]
max_inflight = 1
learn_concurrency = false
[pools.empty]
discover = "dns:127.0.0.1:{closed}"
scaling = {{ minimum = 0, maximum = 2, start_ms = 600000, hold_ms = 30000 }}
[pools.logic]
endpoints = ["127.0.0.1:{logic}"]
[[routes]]
service = "*"
pool = "logic"
[[routes]]
model = "empty"
pool = "empty"
[[routes]]
model = "slow"
pool = "narrow"
[[routes]]
model = "*"
pool = "models"
"""
CONFIG = """
name: "double" backend: "onnxruntime"
input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, -1 ] } ]
"""
SLOW = """
import time
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.015)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
SERVICES = """
import os
import sys
import time

from oriel_logic import service


@service
def well(request) -> str:
    return "well"


@service
def prints(request) -> str:
    for _ in range(5000):
        print("x" * 9999)
    return "printed"


@service
def forks(request) -> str:
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)
    return str(child)


@service
def breaks(request) -> str:
    sys.modules.clear()
    return "broken"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The platform: its ports, and its process ids by name.

    wrong: sentences about promises that an attack found broken.
    """

    http: int
    grpc: int
    pids: dict[str, int]
    wrong: list[str] = field(default_factory=list)

    def post(self, path: str, tenant: str, body: bytes = b"") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(HOST, self.http, timeout=60)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused at its head: the answer is there
                connection.request(
                    "POST", path, body, {"authorization": f"Bearer {tenant}", "content-type": "application/json"}
                )
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def want(self, true: bool, sentence: str) -> None:
        if not true:
            self.wrong.append(sentence)


def small(values: int = 1, name: str = "x") -> bytes:
    """A JSON request with so many values; its answer is binary."""
    start = b'{"outputs":[{"name":"y","parameters":{"binary_data":true}}],"inputs":[{"name":"%b","datatype":"FP32",'
    return (start + b'"shape":[1,%d],"data":[' + b"1.5," * (values - 1) + b"1.5]}]}") % (name.encode(), values)


@contextmanager
def platform() -> Iterator[Rig]:
    with tempfile.TemporaryDirectory() as root, ExitStack() as opened:
        folder = Path(root)
        (folder / "services").mkdir()
        models.put(folder / "models", "double", models.double(("n", "m")), CONFIG)
        slow = models.put(
            folder / "models", "slow", None, CONFIG.replace("double", "slow").replace("onnxruntime", "python")
        )
        (slow / "1" / "model.py").write_text(SLOW)
        (folder / "services" / "own.py").write_text(SERVICES)
        names = ("public", "grpc", "http", "model_grpc", "logic", "logic_admin", "closed")
        ports = dict(zip(names, free_ports(len(names)), strict=True))
        text = DOCUMENTS.format(**{**ports, "grpc": ports["model_grpc"]})
        for name, lines in TENANTS.items():
            allowed = '["*"]' if name != "small" else '["double"]'
            key = f'keys = [{{ sha256 = "{sha256(name.encode()).hexdigest()}" }}]'
            text += f'[tenants.{name}]\n{lines}\n{key}\nmodels = {allowed}\nservices = ["*"]\n'
        (folder / "policies").mkdir()
        (folder / "policies" / "all.toml").write_text(text)
        inference = inference_command(folder / "models", ports["http"], grpc_port=ports["model_grpc"])
        logic = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(folder / "services"), "--no-watch"]
        logic += ["--inference", f"{HOST}:{ports['http']}", "--inference-grpc", f"{HOST}:{ports['model_grpc']}"]
        logic += ["--http-port", str(ports["logic"]), "--admin-port", str(ports["logic_admin"]), "--workers", "2"]
        gateway = gateway_command(folder / "policies", ports["public"])
        gateway[gateway.index("--grpc-port") + 1] = str(ports["grpc"])
        pids = {}
        ready = f"http://{HOST}:{ports['http']}/v2/health/ready"
        pids["inference"] = opened.enter_context(serving(inference, lambda: status_of(ready) == 200))
        health = f"http://{HOST}:{ports['logic_admin']}/health/ready"
        pids["logic"] = opened.enter_context(serving(logic, lambda: status_of(health) == 200))
        pids["gateway"] = opened.enter_context(serving(gateway, lambda: accepts(ports["public"])))
        yield Rig(http=ports["public"], grpc=ports["grpc"], pids=pids)
