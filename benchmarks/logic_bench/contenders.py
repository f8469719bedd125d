"""Starts each framework's version of the same service, each in an environment of its own, one process each."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
from harness.environments import python_of
from harness.load import post
from harness.processes import PEERS, ROOT, free_port, serving, status_of

from oriel_wire.v2.http import encode_request
from oriel_wire.v2.messages import InferRequest, RequestedOutput, tensor

__all__ = ["CONTENDERS", "DIRECT", "FILES", "Running", "picture", "start"]

FILES = PEERS / "logic"

DIRECT = "model, called directly"
CONTENDERS = (
    "oriel",
    "oriel, untyped",
    "fastapi+tritonclient.aio",
    "asgi+grpc.aio",
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


def picture() -> list[float]:
    """The input of every contender: the 64 floats of a 7, as the example's v2 request has them."""
    document = json.loads((ROOT / "examples" / "digits" / "7.v2.json").read_text())
    return [float(value) for value in np.asarray(document["inputs"][0]["data"]).ravel()]


class Running:
    """A started contender. script: what wrk sends to `url`."""

    def __init__(self, pid: int, url: str, body: bytes, headers: Mapping[str, str], folder: Path) -> None:
        self.pid = pid
        self.url = url
        self.body = body
        self.headers = headers
        self.script = post(folder / f"{pid}.lua", body, headers)

    def check(self) -> None:
        """Exit unless the right answer comes within START_S: a server may listen before all its processes are ready."""
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
    """The body and the headers of the model call that Oriel's logic server makes for the picture."""
    given = tensor("image", np.array([picture()], np.float32))
    wanted = [RequestedOutput("label", True)]
    request = InferRequest(model_name="digits", model_version="", inputs=[given], outputs=wanted)
    parts, head = encode_request(request)
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(head)}
    return b"".join(bytes(part) for part in parts), headers


@contextmanager
def start(name: str, servers: tuple[int, int, int], folder: Path) -> Iterator[Running]:
    """A contender that gives the right answer. servers: process id, HTTP and gRPC port of the inference server."""
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
    environment = {"TARGET": f"127.0.0.1:{grpc_port}", "BENTOML_HOME": str(home), "BENTOML_DO_NOT_TRACK": "True"}
    path = OURS.get(name, "/label")
    with serving(command, lambda: status_of(f"http://127.0.0.1:{port}{path}") > 0, environment) as started:
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
    app = "fastapi_app" if name == "fastapi+tritonclient.aio" else "asgi_app"
    python = python_of("logic-fastapi" if app == "fastapi_app" else "logic-asgi")
    return [
        *(str(python), "-m", "uvicorn", f"{app}:app", "--app-dir", str(FILES), "--no-access-log"),
        *("--loop", "uvloop", "--http", "httptools", "--port", str(port), "--log-level", "error"),
    ]
