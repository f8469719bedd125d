"""A tiny model over v2 HTTP, served by Oriel and by others, side by side: CPU per request, rate, latency, memory.

    python tests/bench/inference_peers.py [--seconds 3] [--rounds 3] [--connections 1 64] [--only NAME ...] [--json]

The model is a 16 -> 32 -> 4 perceptron in ONNX, one row per request, JSON bodies; each contender runs it with ONNX
Runtime on one thread. They take turns, medians are compared, CPU is that of the contender's own processes from /proc.
Contenders: Oriel; Triton with its Python backend (the server binary inside the nvidia-pytriton wheel, dynamic batching
on); MLServer (custom runtime); LitServe (its own batching, /predict). A contender whose environment cannot be made is
left out and named. Needs `wrk` on PATH and Linux; environments of their own under build/, made on first use (some
hundred MB).
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gateway_hop import ROOT, cpu_s, free_port, running, tree

HERE = Path(__file__).parent / "peers" / "inference"
BODY = json.dumps(
    {"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [n / 16 for n in range(16)]}]}
)
CONFIG = """
name: "tiny"
backend: "{backend}"
max_batch_size: 64
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ 16 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ 4 ] }} ]
dynamic_batching {{ }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
"""
REQUIREMENTS = {
    "triton-python": ["nvidia-pytriton==0.7.0", "onnxruntime==1.23.2", "numpy<2"],
    "mlserver": ["mlserver==1.7.1", "onnxruntime==1.23.2"],
    "litserve": ["litserve==0.2.17", "onnxruntime==1.23.2"],
}


@dataclass(frozen=True, kw_only=True)
class Contender:
    """How to start one, and what to ask it."""

    command: list[str]
    environment: dict[str, str]
    path: str
    body: str


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment, made on first use."""
    folder = ROOT / "build" / f"bench-{name}"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making the environment of {name} ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *REQUIREMENTS[name]], check=True)
        (folder / "ready").touch()
    return python


def repository(folder: Path, backend: str, files: dict[str, Path]) -> Path:
    """A Triton model repository with the one model."""
    (folder / "tiny" / "1").mkdir(parents=True)
    (folder / "tiny" / "config.pbtxt").write_text(CONFIG.format(backend=backend))
    for name, source in files.items():
        shutil.copy(source, folder / "tiny" / "1" / name)
    return folder


def oriel(folder: Path, model: Path, port: int) -> Contender:
    models = repository(folder / "oriel", "onnxruntime", {"model.onnx": model})
    command = [sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(models)]
    command += ["--http-port", str(port), "--grpc-port", str(free_port()), "--metrics-port", str(free_port())]
    return Contender(command=command, environment={}, path="/v2/models/tiny/infer", body=BODY)


def triton(folder: Path, model: Path, port: int) -> Contender:
    python = python_of("triton-python")
    (site,) = (python.parents[1] / "lib").glob("python3.*/site-packages")
    server = site / "pytriton" / "tritonserver"
    stub = server / "backends" / "python" / "triton_python_backend_stub"
    if not stub.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copy(server / "python_backend_stubs" / version / stub.name, stub)
    models = repository(folder / "triton", "python", {"model.py": HERE / "triton_model.py", "tiny.onnx": model})
    command = [str(server / "bin" / "tritonserver"), "--model-repository", str(models), "--allow-metrics=false"]
    command += ["--backend-directory", str(server / "backends"), "--allow-grpc=false", "--http-port", str(port)]
    base = Path(sys.base_prefix) / "lib"
    environment = {
        "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{base}",
        "PYTHONPATH": str(site),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    return Contender(command=command, environment=environment, path="/v2/models/tiny/infer", body=BODY)


def mlserver(folder: Path, model: Path, port: int) -> Contender:
    python = python_of("mlserver")
    home = folder / "mlserver"
    home.mkdir()
    shutil.copy(HERE / "mlserver_model.py", home)
    settings = {"host": "127.0.0.1", "http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    settings |= {"parallel_workers": 0, "debug": False}
    (home / "settings.json").write_text(json.dumps(settings))
    one = {"name": "tiny", "implementation": "mlserver_model.Tiny", "parameters": {"uri": str(model)}}
    (home / "model-settings.json").write_text(json.dumps(one))
    environment = {"PYTHONPATH": str(home)}
    command = [str(python.parent / "mlserver"), "start", str(home)]
    return Contender(command=command, environment=environment, path="/v2/models/tiny/infer", body=BODY)


def litserve(folder: Path, model: Path, port: int) -> Contender:
    command = [str(python_of("litserve")), str(HERE / "litserve_app.py"), str(model), str(port)]
    return Contender(command=command, environment={}, path="/predict", body=BODY)


CONTENDERS: dict[str, Callable[[Path, Path, int], Contender]] = {
    "oriel": oriel,
    "triton-python": triton,
    "mlserver": mlserver,
    "litserve": litserve,
}


def load(port: int, contender: Contender, connections: int, seconds: int, folder: Path) -> dict[str, float]:
    """One run of the load generator."""
    script = folder / f"load-{port}.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = [==[{contender.body}]==]\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    url = f"http://127.0.0.1:{port}{contender.path}"
    out = subprocess.run(
        ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), url],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        sys.exit(f"a contender failed requests:\n{out}")
    scale = {"us": 0.001, "ms": 1.0, "s": 1000.0}
    found = {f"p{quantile}_ms": re.search(rf"{quantile}%\s+([\d.]+)(us|ms|s)", out) for quantile in (50, 99)}
    requests = re.search(r"(\d+) requests in", out)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert requests and rate and all(found.values())
    figures = {name: float(match[1]) * scale[match[2]] for name, match in found.items() if match}
    return {"requests": float(requests[1]), "rate": float(rate[1]), **figures}


def pss_mb(pid: int) -> float:
    """Memory of a process tree, shared pages divided among their users."""
    lines = [Path(f"/proc/{member}/smaps_rollup").read_text() for member in tree(pid)]
    return sum(int(re.search(r"^Pss:\s+(\d+)", text, re.M)[1]) for text in lines) / 1024  # type: ignore[index]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if shutil.which("wrk") is None:
        sys.exit("wrk is not on PATH; on Debian: apt-get install wrk")
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "tiny.onnx"
        subprocess.run([sys.executable, str(HERE / "tiny.py"), str(model)], check=True)
        ports: dict[str, int] = {}
        made: dict[str, Contender] = {}
        pids: dict[str, int] = {}
        for name in args.only:
            ports[name] = free_port()
            try:
                made[name] = CONTENDERS[name](folder, model, ports[name])
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                left_out[name] = f"its environment cannot be made: {error}"
                continue
            starting = running(made[name].command, ports[name], 60, **made[name].environment)
            pids[name] = stack.enter_context(starting)
        figures: dict[str, dict[int, list[dict[str, float]]]] = {n: {c: [] for c in args.connections} for n in pids}
        for name in pids:
            load(ports[name], made[name], max(args.connections), 1, folder)  # warm-up
        for number in range(args.rounds):
            for connections in args.connections:
                for name, pid in pids.items():
                    before = cpu_s(pid)
                    run = load(ports[name], made[name], connections, args.seconds, folder)
                    run["cpu_us"] = (cpu_s(pid) - before) * 1e6 / run.pop("requests")
                    figures[name][connections].append(run)
                    print(
                        f"round {number + 1} {name:14} at {connections:3} connections {run['rate']:8.0f}/s "
                        f"{run['cpu_us']:8.1f} us",
                        file=sys.stderr,
                    )
        memory = {name: pss_mb(pid) for name, pid in pids.items()}
    medians = {
        name: {c: {what: statistics.median(run[what] for run in runs) for what in runs[0]} for c, runs in by.items()}
        for name, by in figures.items()
    }
    if args.json:
        print(json.dumps({"medians": medians, "pss_mb": memory, "runs": figures, "left_out": left_out}))
        return
    print(f"{'':14} {'connections':>11} {'req/s':>8} {'CPU us':>8} {'p50 ms':>8} {'p99 ms':>8} {'PSS MB':>8}")
    for connections in args.connections:
        for name, by in medians.items():
            m = by[connections]
            print(
                f"{name:14} {connections:11} {m['rate']:8.0f} {m['cpu_us']:8.1f} {m['p50_ms']:8.2f} {m['p99_ms']:8.2f} "
                f"{memory[name]:8.0f}"
            )
    for name, why in left_out.items():
        print(f"left out: {name}: {why}")


if __name__ == "__main__":
    main()
