"""How to start each framework's version of the same service, each in an environment of its own, one process each."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from gateway_bench.contenders import ROOT, free_port, free_ports
from inference_bench.environments import python_of
from inference_bench.processes import serving

from logic_bench.request import FILES, picture
from oriel_wire.v2.http import encode_request
from oriel_wire.v2.messages import InferRequest, RequestedOutput, tensor

__all__ = ["CONTENDERS", "DIRECT", "EXPECTED", "Running", "inference", "start"]

DIRECT = "model, called directly"
CONTENDERS = (
    "oriel",
    "oriel, untyped",
    "fastapi+tritonclient.aio",
    "asgi+grpc.aio",
    "asgi+aiohttp",
    "litserve",
    "bentoml",
    DIRECT,
)
EXPECTED = 7
OURS = {
    "oriel": "/v1/services/label",
    "oriel, untyped": "/v1/services/untyped",
}
START_S = 20.0


class Running:
    """A started contender. script: what wrk sends to `url`."""

    def __init__(self, pid: int, url: str, body: bytes, headers: Mapping[str, str], folder: Path) -> None:
        self.pid = pid
        self.url = url
        self.body = body
        self.headers = headers
        content = folder / f"{pid}.body"
        content.write_bytes(body)
        self.script = folder / f"{pid}.lua"
        lines = [f'wrk.headers["{name}"] = "{value}"' for name, value in headers.items()]
        lines += ['wrk.method = "POST"', f'wrk.body = io.open("{content}", "rb"):read("*a")']
        self.script.write_text("\n".join(lines) + "\n")

    def check(self) -> None:
        """Ends the bench unless the answer is the right one, within START_S: a first process may answer for others."""
        end = time.monotonic() + START_S
        while True:
            answer = httpx.post(self.url, content=self.body, headers=dict(self.headers), timeout=30)
            right = "/v2/" in self.url or (answer.status_code == 200 and answer.json() == {"label": EXPECTED})
            if (answer.status_code == 200 and right) or time.monotonic() > end:
                break
            time.sleep(0.2)
        if answer.status_code != 200 or not right:
            sys.exit(f"{self.url} answers {answer.status_code} {answer.text[:500]!r} and not {EXPECTED}")


def binary_request() -> tuple[bytes, dict[str, str]]:
    """What the logic server sends for it: the body and its headers."""
    given = tensor("image", np.array([picture()], np.float32))
    wanted = [RequestedOutput("label", True)]
    request = InferRequest(model_name="digits", model_version="", inputs=[given], outputs=wanted)
    parts, head = encode_request(request)
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(head)}
    return b"".join(bytes(part) for part in parts), headers


def status_of(url: str) -> int:
    """Of a GET; 0 while nobody answers."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.TransportError:
        return 0


@contextmanager
def inference(folder: Path) -> Iterator[tuple[int, int, int]]:
    """The inference server that everybody calls: its process id, HTTP and gRPC port."""
    http_port, grpc_port, metrics_port = free_ports(3)
    command = [sys.executable, "-m", "oriel_cli.main", "inference"]
    command += ["--model-repository", str(ROOT / "examples" / "models"), "--http-port", str(http_port)]
    command += ["--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]
    url = f"http://127.0.0.1:{http_port}/v2/models/digits/ready"
    with serving(command, {}, lambda: status_of(url) == 200) as pid:
        yield pid, http_port, grpc_port


@contextmanager
def start(name: str, servers: tuple[int, int, int], folder: Path) -> Iterator[Running]:
    """A contender that answers rightly."""
    pid, http_port, grpc_port = servers
    if name == DIRECT:
        body, headers = binary_request()
        running = Running(pid, f"http://127.0.0.1:{http_port}/v2/models/digits/infer", body, headers, folder)
        running.check()
        yield running
        return
    port = free_port()
    home = folder / name.replace("+", "-").replace(", ", "-")
    home.mkdir()
    command = list(_command(name, port, http_port))
    target = http_port if name == "asgi+aiohttp" else grpc_port
    environment = {"TARGET": f"127.0.0.1:{target}", "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    path = OURS.get(name, "/label")
    with serving(command, environment, lambda: status_of(f"http://127.0.0.1:{port}{path}") > 0) as started:
        body = json.dumps({"image": picture()}).encode()
        url = f"http://127.0.0.1:{port}{path}"
        running = Running(started, url, body, {"content-type": "application/json"}, folder)
        running.check()
        yield running


def _command(name: str, port: int, http_port: int) -> Sequence[str]:
    if name in OURS:
        return [
            *(sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(FILES / "services")),
            *("--inference", f"127.0.0.1:{http_port}", "--http-port", str(port), "--admin-port", str(free_port())),
        ]
    if name == "litserve":
        return [str(python_of("logic-litserve")), str(FILES / "litserve_app.py"), str(port)]
    if name == "bentoml":
        python = python_of("logic-bentoml")
        serve = ["serve", "bentoml_app:Label", "--working-dir", str(FILES), "--host", "127.0.0.1"]
        # Started through its interpreter: the script's first line would name where the environment was made.
        return [str(python), str(python.parent / "bentoml"), *serve, "--port", str(port)]
    app = {"fastapi+tritonclient.aio": "fastapi_app", "asgi+grpc.aio": "asgi_app", "asgi+aiohttp": "asgi_http_app"}[
        name
    ]
    python = python_of("logic-fastapi" if app == "fastapi_app" else "logic-asgi")
    return [
        *(str(python), "-m", "uvicorn", f"{app}:app", "--app-dir", str(FILES), "--no-access-log"),
        *("--loop", "uvloop", "--http", "httptools", "--port", str(port), "--log-level", "error"),
    ]
