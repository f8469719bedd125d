"""The OpenVINO execution provider for real: `make test SUITE=openvino`, in an environment of its own.

Skipped where no OpenVINO provider is installed.
"""

from pathlib import Path

import httpx
import numpy as np
import pytest

ort = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402

from oriel_inference.app import open_unit  # noqa: E402
from oriel_inference.backends import find_backend  # noqa: E402
from oriel_inference.backends.providers import OPENVINO, missing  # noqa: E402
from oriel_inference.errors import LoadFailed  # noqa: E402
from oriel_inference.repository.check import CheckPool  # noqa: E402
from oriel_inference.repository.load import LoadedVersion, Loading, load_model  # noqa: E402
from oriel_inference.settings import Settings  # noqa: E402
from oriel_inference.stores.local import LocalStore  # noqa: E402
from oriel_wire.observe.trace import ListSink  # noqa: E402

pytestmark = pytest.mark.skipif(bool(missing(OPENVINO)), reason="no OpenVINO provider: make test SUITE=openvino")

TENSORS = """
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 64 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 16 ] } ]
"""


def accelerated(parameters: str = "") -> str:
    entry = f'cpu_execution_accelerator [ {{ name: "openvino" {parameters} }} ]'
    return TENSORS + f"optimization {{ execution_accelerators {{ {entry} }} }}"


def put(root: Path, name: str, config: str) -> None:
    values = np.random.default_rng(7)
    weights = [
        numpy_helper.from_array(values.standard_normal(shape).astype(np.float32), weight)
        for weight, shape in (("w1", (64, 128)), ("w2", (128, 16)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    x, y = (
        helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", size]) for each, size in (("x", 64), ("y", 16))
    )
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    (root / name / "1").mkdir(parents=True)
    (root / name / "1/model.onnx").write_bytes(model.SerializeToString())
    (root / name / "config.pbtxt").write_text(config)


def load(root: Path, name: str) -> LoadedVersion | LoadFailed | None:
    check = CheckPool(60)
    try:
        found = load_model(Loading(LocalStore(root), name, find_backend=find_backend, cores=2, models=1, check=check))
    finally:
        check.close_idle()
    return found[1]


@pytest.mark.parametrize(
    "parameters",
    [
        "",
        'parameters { key: "precision" value: "ACCURACY" } parameters { key: "num_streams" value: "1" }',
        'parameters { key: "num_of_threads" value: "1" }',
    ],
)
def test_model_runs_on_openvino_and_agrees_with_the_cpu(tmp_path: Path, parameters: str) -> None:
    put(tmp_path, "plain", TENSORS)
    put(tmp_path, "fast", accelerated(parameters))
    plain, fast = load(tmp_path, "plain"), load(tmp_path, "fast")
    assert isinstance(plain, LoadedVersion), plain
    assert isinstance(fast, LoadedVersion), fast
    assert plain.sessions[0].provider == "CPUExecutionProvider"
    assert fast.sessions[0].provider == OPENVINO
    for rows in (1, 3, 8):
        x = np.random.default_rng(rows).standard_normal((rows, 64)).astype(np.float32)
        (expected,), (got,) = (each.sessions[0].run({"x": x}, ["y"]) for each in (plain, fast))
        # Full precision: rounding to BF16 would miss this by far.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


def test_cache_lies_below_our_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(tmp_path / "root", "fast", accelerated('parameters { key: "cache_dir" value: "/elsewhere" }'))
    version = load(tmp_path / "root", "fast")
    assert isinstance(version, LoadedVersion), version
    assert list((tmp_path / "cache/oriel/engines/elsewhere").rglob("*"))
    assert not Path("/elsewhere").exists()


def test_what_openvino_refuses_fails_the_load(tmp_path: Path) -> None:
    """On a CPU there is no FP16: the provider does not start, and the model must not run on another one instead."""
    if OPENVINO not in ort.get_available_providers() or ort.__version__ >= "1.30":
        pytest.skip("the plug-in computes FP16 on a CPU")
    put(tmp_path, "half", accelerated('parameters { key: "precision" value: "FP16" }'))
    failure = load(tmp_path, "half")
    assert isinstance(failure, LoadFailed)
    assert f"asks for {OPENVINO}" in failure.reason and "CPUExecutionProvider" in failure.reason


async def test_server_answers_from_openvino(tmp_path: Path) -> None:
    put(tmp_path, "fast", accelerated())
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=2, drain_s=5.0)
    async with open_unit(settings, sink=ListSink()) as unit:
        assert unit.catalog.get("fast").provider == OPENVINO
        url = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            assert (await client.get("/v2/health/ready")).status_code == 200
            shown = (await client.get("/v2/models/fast/config")).json()
            (entry,) = shown["optimization"]["execution_accelerators"]["cpu_execution_accelerator"]
            assert entry["name"] == "openvino"
            row = {"inputs": [{"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [1.0] * 64}]}
            answer = await client.post("/v2/models/fast/infer", json=row)
            assert answer.status_code == 200 and answer.json()["outputs"][0]["shape"] == [1, 16]
