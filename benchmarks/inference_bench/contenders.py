"""Starts each contender on one model. Everyone runs the same ONNX file on as many threads."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.environments import compiled_python, python_of
from harness.processes import PEERS, free_port, free_ports, inference_command

from inference_bench.models import Model

__all__ = ["CONTENDERS", "Contender", "oriel", "repository", "triton"]

FILES = PEERS / "inference"
KINDS = {"FP32": "TYPE_FP32", "INT64": "TYPE_INT64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """grpc_port: 0 if it has none. path: of an inference over HTTP. binary: whether that takes binary tensors."""

    command: Sequence[str]
    http_port: int = 0
    grpc_port: int = 0
    path: str = ""
    binary: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def repository(folder: Path, model: Model, file: Path, backend: str, threads: int) -> Path:
    """A Triton model repository with this model."""
    version = folder / model.name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(
        f'name: "{model.name}"\nbackend: "{backend}"\nmax_batch_size: {model.max_batch}\n'
        f'input [ {{ name: "x" data_type: {KINDS[model.datatype]} dims: {list(model.dims)} }} ]\n'
        f'output [ {{ name: "y" data_type: TYPE_FP32 dims: {list(model.outputs)} }} ]\n'
        f"dynamic_batching {{ }}\ninstance_group [ {{ count: 1 kind: KIND_CPU }} ]\n"
        f'parameters {{ key: "intra_op_thread_count" value: {{ string_value: "{threads}" }} }}\n'
    )
    shutil.copy(file, version / "model.onnx")
    if backend == "python":
        shutil.copy(FILES / "triton_model.py", version / "model.py")
    return folder


def oriel(folder: Path, model: Model, file: Path, threads: int) -> Contender:
    models = repository(folder / "oriel", model, file, "onnxruntime", threads)
    http_port, grpc_port = free_ports(2)
    command = inference_command(models, http_port, grpc_port=grpc_port)
    path = f"/v2/models/{model.name}/infer"
    return Contender(command=command, http_port=http_port, grpc_port=grpc_port, path=path, binary=True)


def compiled(folder: Path, model: Model, file: Path, threads: int) -> Contender:
    """The same server from the wheel of `make compiled`."""
    made = oriel(folder, model, file, threads)
    return replace(made, command=[str(compiled_python()), *made.command[1:]])


def triton(folder: Path, model: Model, file: Path, threads: int) -> Contender:
    """The server binary inside the nvidia-pytriton wheel, with its Python backend and dynamic batching."""
    python = python_of("triton-python")
    (site,) = (python.parents[1] / "lib").glob("python3.*/site-packages")
    server = site / "pytriton" / "tritonserver"
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy(server / "python_backend_stubs" / version / stub.name, stub)
    models = repository(folder / "triton", model, file, "python", threads)
    http_port, grpc_port = free_ports(2)
    command = [str(server / "bin" / "tritonserver"), "--model-repository", str(models), "--allow-metrics=false"]
    command += ["--backend-directory", str(server / "backends"), "--exit-timeout-secs", "3"]
    command += ["--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    environment = {
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{Path(sys.base_prefix) / 'lib'}",
        "PYTHONPATH": str(site),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    return Contender(
        command=command,
        environment=environment,
        http_port=http_port,
        grpc_port=grpc_port,
        path=f"/v2/models/{model.name}/infer",
        binary=True,
    )


def mlserver(folder: Path, model: Model, file: Path, threads: int) -> Contender:
    """A custom runtime in the server's own process; adaptive batching where a batch is worth waiting for."""
    python = python_of("mlserver")
    home = folder / "mlserver"
    home.mkdir()
    shutil.copy(FILES / "mlserver_model.py", home)
    http_port, grpc_port = free_ports(2)
    settings = {"host": "127.0.0.1", "http_port": http_port, "grpc_port": grpc_port, "metrics_port": free_port()}
    settings |= {"parallel_workers": 0, "debug": False, "grpc_max_message_length": 64 << 20}
    (home / "settings.json").write_text(json.dumps(settings))
    one = {"name": model.name, "implementation": "mlserver_model.Model"}
    one |= {"parameters": {"uri": str(file), "extra": {"threads": threads}}}
    if model.name == "encoder":
        one |= {"max_batch_size": model.max_batch, "max_batch_time": 0.005}
    (home / "model-settings.json").write_text(json.dumps(one))
    # Started through its interpreter: the script's first line would name where the environment was made.
    command = [str(python), str(python.parent / "mlserver"), "start", str(home)]
    path = f"/v2/models/{model.name}/infer"
    environment = {"PYTHONPATH": str(home)}
    return Contender(command=command, environment=environment, http_port=http_port, grpc_port=grpc_port, path=path)


def echo(folder: Path, model: Model, file: Path, threads: int) -> Contender:
    """Start grpc.aio with a ModelInfer that does nothing: the cost of grpc.aio itself."""
    port = free_port()
    return Contender(command=[sys.executable, str(FILES / "grpc_echo.py"), str(port)], grpc_port=port)


CONTENDERS: dict[str, Callable[[Path, Model, Path, int], Contender]] = {
    "oriel": oriel,
    "oriel compiled": compiled,
    "triton-python": triton,
    "mlserver": mlserver,
    "grpc.aio echo": echo,
}
