"""`tritonserver` as a command: what was written for Triton runs here with another image, and nothing else changed."""

import json
import os
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import yaml
from object_stores import ObjectServer, object_server

from oriel_cli import tritonserver
from oriel_cli.arguments import Parser

from ..conftest import Run
from ..waiting import wait_until
from . import models
from .control_server import times

ROOT = Path(__file__).resolve().parents[2]
DEPLOYMENT = yaml.safe_load((ROOT / "tests/inference/deployments/triton.yaml").read_text())
CONTAINER = DEPLOYMENT["spec"]["template"]["spec"]["containers"][0]
# Triton's log has these lines, and scripts wait for them.
STARTED = {
    "http": "Started HTTPService at 0.0.0.0:",
    "grpc": "Started GRPCInferenceService at 0.0.0.0:",
    "metrics": "Started Metrics Service at 0.0.0.0:",
}


@pytest.fixture
def store(run: Run) -> Iterator[ObjectServer]:
    with object_server("s3", run) as running:
        yield running


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the commands that the wheel puts into the image, from the entry points that the project declares."""
    folder = tmp_path_factory.mktemp("bin")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        module, _, function = target.partition(":")
        text = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def words_of(container: Mapping[str, Any], image: Path) -> list[str]:
    """Return what a container runs: its command, or the image's entry point, and the arguments behind it."""
    dockerfile = (ROOT / "inference/Dockerfile").read_text().splitlines()
    (entry,) = [json.loads(line.partition(" ")[2]) for line in dockerfile if line.startswith("ENTRYPOINT ")]
    command, *words = [*(container.get("command") or entry), *container.get("args", ())]
    return [str(image / Path(command).name), *words]


class Pod:
    """One replica. Its ports are free ones, because here all replicas have one network."""

    def __init__(self, image: Path, folder: Path, store: ObjectServer, container: Mapping[str, Any] = CONTAINER):
        folder.mkdir()
        self.log = folder / "log"
        secrets = store.environment(store.port)
        names = {each["name"]: each.get("value") or secrets[each["name"]] for each in container["env"]}
        words = [word.replace("s3://models", store.url) for word in words_of(container, image)]
        environment = {**os.environ, **names, "HOME": str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
        environment |= {"ORIEL_STATE": str(folder), "AWS_ENDPOINT_URL": secrets["AWS_ENDPOINT_URL"]}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        with self.log.open("wb") as log:
            free = [f"--{name}-port=0" for name in STARTED]
            self.process = subprocess.Popen([*words, *free], env=environment, stdout=log, stderr=log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()

    def port(self, name: str) -> int:
        """Wait until the log says that this port is served, and return it."""

        def started() -> str:
            text = self.log.read_text()
            assert self.process.poll() is None, text
            return text.partition(STARTED[name])[2].partition("\n")[0]

        return int(wait_until(started))

    def probe(self, which: str) -> int:
        """Ask as a kubelet does, and return the status."""
        asked = CONTAINER[which]["httpGet"]
        assert asked["port"] in [each["name"] for each in CONTAINER["ports"]]
        return httpx.get(f"http://127.0.0.1:{self.port(asked['port'])}{asked['path']}", trust_env=False).status_code

    def answer(self) -> list[float]:
        inputs = triton_grpc.InferInput("x", [1, 4], "FP32")
        inputs.set_data_from_numpy(np.ones((1, 4), np.float32))
        with triton_grpc.InferenceServerClient(f"127.0.0.1:{self.port('grpc')}") as client:
            return list(client.infer("double", [inputs]).as_numpy("y")[0])

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(240)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of grpcio, closing a channel
def test_a_deployment_of_triton_serves_with_another_image(image: Path, store: ObjectServer, tmp_path: Path) -> None:
    """The store is empty at first: the next poll finds the first model, as where a pipeline uploads it later."""
    with ExitStack() as ends:
        pods = [Pod(image, tmp_path / str(number), store) for number in range(DEPLOYMENT["spec"]["replicas"])]
        for pod in pods:
            ends.callback(pod.close)
        for pod in pods:
            assert pod.probe("livenessProbe") == pod.probe("readinessProbe") == 200, "nothing is there to be loaded"
        store.put("double/config.pbtxt", models.DOUBLE.encode())
        store.put("double/1/model.onnx", times(2).SerializeToString())
        store.put("slow/1/model.onnx", models.slow().SerializeToString())
        for pod in pods:
            with triton_http.InferenceServerClient(f"127.0.0.1:{pod.port('http')}") as client:
                wait_until(lambda: client.is_model_ready("double") and client.is_model_ready("slow"))
                assert client.get_server_metadata()["name"] == "triton"
            assert pod.answer() == [2, 2, 2, 2]
            assert pod.probe("startupProbe") == pod.probe("readinessProbe") == 200
            metrics = httpx.get(f"http://127.0.0.1:{pod.port('metrics')}/metrics", trust_env=False).text
            assert 'nv_inference_request_success{model="double",version="1"} 1' in metrics
        drained(pods[0])
        assert [pod.stop() for pod in pods[1:]] == [0, 0]


def drained(pod: Pod) -> None:
    """Send SIGTERM while calls are under way: each of them is answered, and the process ends with 0."""
    port, rows = pod.port("http"), np.ones((4, 512), np.float32)
    first = threading.Event()

    def call(number: int) -> bool:
        inputs = triton_http.InferInput("x", [4, 512], "FP32")
        inputs.set_data_from_numpy(rows)
        with triton_http.InferenceServerClient(f"127.0.0.1:{port}", network_timeout=240.0) as client:
            done = client.infer("slow", [inputs]) is not None
        first.set()
        return done

    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(call, number) for number in range(6)]
        assert first.wait(240)
        assert pod.stop() == 0
        assert all(each.result() for each in calls)


def test_arguments_that_begin_with_tritonserver_run_it_too(image: Path, store: ObjectServer, tmp_path: Path) -> None:
    """Triton's charts leave the command to the image, whose entry point runs what the arguments say."""
    store.put("double/config.pbtxt", models.DOUBLE.encode())
    store.put("double/1/model.onnx", times(3).SerializeToString())
    container = {**CONTAINER, "command": None, "args": [*CONTAINER["command"], *CONTAINER["args"]]}
    with ExitStack() as ends:
        pod = Pod(image, tmp_path / "pod", store, container)
        ends.callback(pod.close)
        assert pod.answer() == [3, 3, 3, 3] and pod.stop() == 0


def parsed(*words: str) -> Any:
    parser = Parser(prog="tritonserver")
    tritonserver.add_arguments(parser)
    return parser.parse_args(words)


def test_its_defaults_are_tritons() -> None:
    args = parsed("--model-repository=/m")
    ports = {each["name"]: each["containerPort"] for each in CONTAINER["ports"]}
    assert ports == {"http": args.http_port, "grpc": args.grpc_port, "metrics": args.metrics_port}
    assert (args.host, args.server_id, args.control_mode, args.strict_readiness) == ("0.0.0.0", "triton", "none", True)
    assert parsed("--model-repository=/m", "--id=mine", "--http-address=127.0.0.1").server_id == "mine"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--version"], 0, "oriel "),
        (["--help"], 0, "--model-control-mode"),
        (["--model-repository=/m", "--http-prot=1"], 1, "unknown flag --http-prot, did you mean --http-port?"),
        (["--model-repository=/m", "--model-load-gpu-limit=0:0.5"], 1, "--model-load-gpu-limit is refused"),
        (["--model-repository=/nothing/is/here"], 1, "pass --model-repository DIR"),
        ([], 1, "required: --model-repository"),
    ],
)
def test_its_exit_codes_are_tritons(image: Path, words: Sequence[str], code: int, said: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [str(image / "tritonserver"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code and said in done.stdout + done.stderr
    assert code == 0 or (done.stdout == "" and done.stderr.count("\n") == 1)
