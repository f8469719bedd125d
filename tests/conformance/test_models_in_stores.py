"""A real inference server whose models lie in Google's and Azure's store: loading, a bad upload, an outage, a restart.

tests/inference has the same for S3, and more; these tests cover what differs with the client of the store.
"""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from oriel_cli.up.units import free_ports

from ..conftest import Run
from ..waiting import wait_until
from . import onnx_files
from .object_stores import ObjectServer, object_server
from .redis_server import proxy_in_a_thread

# Each store costs two starts of an inference server. tests/conformance/test_object_clients.py tests the clients of the
# stores, and tests/inference/test_remote_repository.py a server in this process with the client of S3.
pytestmark = pytest.mark.long

ASKED = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture(params=["gs", "az"])
def store(request: pytest.FixtureRequest, run: Run) -> Iterator[ObjectServer]:
    with object_server(request.param, run) as running:
        yield running


class Running:
    """An `oriel inference` process that polls every half second."""

    def __init__(self, url: str, cache: Path, environment: Mapping[str, str]) -> None:
        http, grpc, metrics = free_ports("127.0.0.1", 3)
        self.base, self.metrics_port = f"http://127.0.0.1:{http}", metrics
        self.log = cache.parent / f"{cache.name}-{http}.log"
        words = ["inference", "--model-repository", url, "--model-cache", str(cache)]
        words += ["--model-control-mode", "poll", "--repository-poll-secs", "0.5"]
        words += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "oriel_cli.main", *words],
                env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
                stdout=log,
                stderr=log,
            )
        self._client = httpx.Client(trust_env=False, timeout=60.0)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._client.close()

    def ready(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        try:
            return self._client.get(f"{self.base}/v2/health/ready").status_code == 200
        except httpx.TransportError:
            return False

    def answer(self, version: str = "") -> list[float] | int:
        """Return the model's output, or the status of the answer."""
        path = f"/v2/models/double{f'/versions/{version}' if version else ''}/infer"
        reply = self._client.post(f"{self.base}{path}", json=ASKED)
        return reply.json()["outputs"][0]["data"] if reply.status_code == 200 else reply.status_code

    def reason(self, version: str) -> str:
        """Return the reason that the index gives for a version."""
        index = self._client.post(f"{self.base}/v2/repository/index", json={}).json()
        return " ".join(each.get("reason", "") for each in index if each.get("version") == version)

    def metrics(self) -> str:
        return self._client.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text


@contextmanager
def inference(url: str, cache: Path, environment: Mapping[str, str]) -> Iterator[Running]:
    running = Running(url, cache, environment)
    try:
        wait_until(lambda: running.ready())
        yield running
    finally:
        running.close()


def sums(data: bytes) -> bytes:
    return f"{hashlib.sha256(data).hexdigest()}  model.onnx\n".encode()


def test_models_of_a_store_serve_through_a_bad_upload_an_outage_and_a_restart(
    store: ObjectServer, tmp_path: Path
) -> None:
    with proxy_in_a_thread(store.port) as (port, set_mode):
        serve_through(store, store.environment(port), set_mode, tmp_path / "cache")


def serve_through(
    store: ObjectServer, environment: Mapping[str, str], set_mode: Callable[[str], None], cache: Path
) -> None:
    url = f"{store.url}/models"
    store.put("models/double/config.pbtxt", b"max_batch_size: 4\nversion_policy { all {} }")
    store.put("models/double/1/model.onnx", onnx_files.DOUBLE)
    store.put("models/double/1/SHA256SUMS", sums(onnx_files.DOUBLE))
    doubled = [2.0, 4.0, 6.0, 8.0]
    with inference(url, cache, environment) as running:
        assert running.answer() == doubled
        # Half of a file under its final name, and a file that does not match its checksum: both are reported, never
        # served.
        store.put("models/double/2/model.onnx", onnx_files.DOUBLE[: len(onnx_files.DOUBLE) // 2])
        store.put("models/double/3/model.onnx", onnx_files.DOUBLE.replace(b"Add", b"Mul"))
        store.put("models/double/3/SHA256SUMS", sums(onnx_files.DOUBLE))

        def refused() -> bool:
            assert running.answer("1") == doubled
            return bool(running.reason("2") and running.reason("3"))

        wait_until(refused)
        assert "SHA256SUMS" in running.reason("3")
        store.put("models/double/2/model.onnx", onnx_files.DOUBLE)

        def fixed() -> bool:
            assert running.answer("1") == doubled
            return running.answer("2") == doubled

        wait_until(fixed)
        # During an outage of the store the loaded models are served, and the server stays ready.
        set_mode("refuse")
        wait_until(lambda: "StoreUnavailable" in running.metrics() or "cannot be listed" in running.log.read_text())
        assert running.ready() and running.answer("1") == running.answer("2") == doubled
        told = running.log.read_text() + running.metrics() + running.reason("3")
    with inference(url, cache, environment) as again:
        assert again.answer("1") == again.answer("2") == doubled
        told += again.log.read_text()
    secrets = [value for name, value in environment.items() if "KEY" in name]
    assert not any(secret in told for secret in secrets)
