"""The servers that are measured: a gateway before one inference server, both of the same model."""

import http.client
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
from harness.processes import accepts, free_port, gateway, serving
from inference_bench.contenders import Contender, oriel, triton
from inference_bench.models import Model, save
from inference_bench.targets import http_target, is_listening
from onnx import TensorProto, helper, numpy_helper

__all__ = ["CONNECTIONS", "LAYERS", "MODEL", "SERVERS", "TENANTS", "Stack", "Tier", "started", "write_model"]

WIDTH = 256
CONNECTIONS = 12  # of the closed loop, and at the server behind the FIFO
SERVERS = {"oriel": oriel, "triton": triton}
TENANTS = {"gold": "gold", "silver": "silver", "bronze": "bronze", "quiet": "silver", "noisy": "silver"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    band: int
    target_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """url: of the model through the gateway; direct: at the server; controls: instead of the gateway."""

    url: str
    direct: str
    controls: Mapping[str, str]
    gateway_pid: int
    server_pid: int
    admin_port: int

    def permits(self) -> int:
        """The number of calls that the gateway lets into the pool at present."""
        connection = http.client.HTTPConnection("127.0.0.1", self.admin_port, timeout=10)
        connection.request("GET", "/queues")
        permits: int = json.loads(connection.getresponse().read())["p"]["permits"]
        connection.close()
        return permits


def _graph(layers: int) -> onnx.GraphProto:
    """Every row is spread over a fixed square matrix that goes through `layers` products: a row's work is its own."""
    rng = np.random.default_rng(5)
    weights = {"spread": rng.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(0.1)}
    nodes = [helper.make_node("Unsqueeze", ["x", "one"], ["wide"]), helper.make_node("Add", ["wide", "spread"], ["h0"])]
    for index in range(layers):
        weights[f"w{index}"] = rng.standard_normal((WIDTH, WIDTH), np.float32) * np.float32(WIDTH**-0.5)
        nodes.append(helper.make_node("MatMul", [f"h{index}", f"w{index}"], [f"m{index}"]))
        nodes.append(helper.make_node("Tanh", [f"m{index}"], [f"h{index + 1}"]))
    nodes.append(helper.make_node("ReduceMean", [f"h{layers}"], ["y"], axes=[1], keepdims=0))
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    tensors.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    return helper.make_graph(
        nodes,
        "work",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", WIDTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", WIDTH])],
        tensors,
    )


LAYERS = 60
MODEL = Model(name="work", datatype="FP32", dims=(WIDTH,), outputs=(WIDTH,), max_batch=4, graph=lambda: _graph(LAYERS))


def write_model(path: Path, layers: int) -> Path:
    """An ONNX file whose one row takes about as long as `layers` says."""
    return save(_graph(layers), path)


def _policies(folder: Path, port: int, tiers: dict[str, Tier]) -> Path:
    lines = []
    for name, tier in tiers.items():
        lines += [f"[tiers.{name}]", f"band = {tier.band}", f"target_ms = {tier.target_ms}"]
    for tenant, name in TENANTS.items():
        digest = sha256(f"bench-{tenant}".encode()).hexdigest()
        lines += [f"[tenants.{tenant}]", f'tier = "{name}"', f'models = ["*"]\nkeys = [{{ sha256 = "{digest}" }}]']
    lines += ["[pools.p]", f'endpoints = ["127.0.0.1:{port}"]', '[[routes]]\nmodel = "*"\npool = "p"']
    folder.mkdir()
    (folder / "bench.toml").write_text("\n".join(lines) + "\n")
    return folder


def haproxy_configuration(port: int, server_port: int, timeout_ms: int) -> str:
    """A FIFO: CONNECTIONS calls at the server, the others in order of arrival until they have waited `timeout_ms`."""
    lines = ["defaults", "  mode http", "  timeout connect 5s", "  timeout client 60s", "  timeout server 60s"]
    lines += [f"  timeout queue {timeout_ms}", "frontend clients", f"  bind 127.0.0.1:{port}", "  maxconn 8000"]
    lines += ["  default_backend servers", "backend servers", "  http-reuse always"]
    lines += [f"  server one 127.0.0.1:{server_port} maxconn {CONNECTIONS}"]
    return "\n".join(["global", "  maxconn 8000", *lines]) + "\n"


@contextmanager
def started(
    server: str, file: Path, folder: Path, tiers: dict[str, Tier], controls: Sequence[str], workers: int = 1
) -> Iterator[Stack]:
    """The server, a gateway of `workers` processes with its default bounds before it, and the controls."""
    contender: Contender = SERVERS[server](folder, MODEL, file, 1)
    direct = http_target(server, contender.http_port, contender.path, MODEL, binary=True)
    print(f"starting {server} ...", file=sys.stderr, flush=True)
    with ExitStack() as stack:
        server_pid = stack.enter_context(
            serving(contender.command, lambda: is_listening(direct), contender.environment)
        )
        policies = _policies(folder / "policies", contender.http_port, tiers)
        environment = {"OTEL_TRACES_SAMPLER_ARG": "0"}
        gateway_pid, port, admin_port = stack.enter_context(
            gateway(policies, "--workers", str(workers), environment=environment, own_session=True)
        )
        ports = {"direct": contender.http_port}
        if "fifo" in controls:
            ports["fifo"] = free_port()
            timeout_ms = 4 * max(tier.target_ms for tier in tiers.values())
            configuration = folder / "haproxy.cfg"
            configuration.write_text(haproxy_configuration(ports["fifo"], contender.http_port, timeout_ms))
            stack.enter_context(serving(["haproxy", "-db", "-f", str(configuration)], lambda: accepts(ports["fifo"])))
        yield Stack(
            url=f"http://127.0.0.1:{port}{contender.path}",
            direct=f"http://127.0.0.1:{contender.http_port}{contender.path}",
            controls={name: f"http://127.0.0.1:{ports[name]}{contender.path}" for name in controls},
            gateway_pid=gateway_pid,
            server_pid=server_pid,
            admin_port=admin_port,
        )
