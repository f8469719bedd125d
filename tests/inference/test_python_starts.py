"""Instances of a Python model start together with one configuration; models and requests may have no inputs."""

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
from onnx import TensorProto, helper, numpy_helper

from oriel_inference.model import ModelState
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.settings import Settings

from . import models
from .thread_unit import unit_in_thread

TOGETHER = """
import json, os, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.text = json.dumps([args["model_instance_name"], json.loads(args["model_config"])])
        folder = os.environ["MEETING"]
        open(os.path.join(folder, args["model_instance_name"]), "w").close()
        while len(os.listdir(folder)) < 3:
            time.sleep(0.005)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("said", np.array([self.text], object))]) for _ in requests]
"""
COMPLETING = """
    @staticmethod
    def auto_complete_config(config):
        config.add_output({"name": "said", "data_type": "TYPE_STRING", "dims": [1]})
        return config
"""
OUTPUT = 'output { name: "said" data_type: TYPE_STRING dims: [ 1 ] }'
FAILS = (
    "class TritonPythonModel:\n    def initialize(self, args):\n        assert args['model_instance_name'] != 'm_0_1'\n"
)


def put(root: Path, source: str, config: str) -> None:
    folder = models.put(root, "m", None, config)
    (folder / "1/model.py").write_text(source)


def serve(root: Path, **more: Any) -> Settings:
    return Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, drain_s=0.2, **more)


@pytest.mark.parametrize("completing", [False, True])
def test_instances_wait_for_one_another_and_see_the_completed_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, completing: bool
) -> None:
    """They were started one after the other, and the first saw a configuration without `instance_group`."""
    monkeypatch.setenv("MEETING", str(tmp_path / "meeting"))
    (tmp_path / "meeting").mkdir()
    groups = "instance_group [ { count: 2 kind: KIND_CPU }, { kind: KIND_CPU } ]"
    parts = (TOGETHER + COMPLETING, "") if completing else (TOGETHER, OUTPUT)
    put(tmp_path / "models", parts[0], f'backend: "python" {groups} {parts[1]}')
    with unit_in_thread(
        serve(tmp_path / "models", load_defaults=LoadDefaults(python_environment=("MEETING",)))
    ) as unit:
        assert [entry.state for entry in unit.catalog.index()] == [ModelState.READY]
        assert len(unit.catalog.get("m").sessions) == 3
        sessions = unit.catalog.get("m").sessions
        names = [session.launch.args["model_instance_name"] for session in sessions]  # type: ignore[attr-defined]
        assert (
            names == ["m_0_0", "m_0_1", "m_1_0"] and sorted(p.name for p in (tmp_path / "meeting").iterdir()) == names
        )
        configs = {session.launch.args["model_config"] for session in sessions}  # type: ignore[attr-defined]
        assert len(configs) == 1


def test_the_first_instance_sees_an_instance_group_that_nobody_configured(tmp_path: Path) -> None:
    source = TOGETHER[: TOGETHER.index("        folder")] + TOGETHER[TOGETHER.index("\n    def execute") :]
    put(tmp_path, source, f'backend: "python" {OUTPUT}')
    with unit_in_thread(serve(tmp_path)) as unit:
        url = f"http://127.0.0.1:{unit.http_port}/v2/models/m/infer"
        (output,) = httpx.post(url, json={"inputs": []}, trust_env=False, timeout=60).json()["outputs"]
        _, config = json.loads(output["data"][0])
        (group,) = config["instance_group"]
        assert (group["name"], group["kind"], group["count"]) == ("m_0", "KIND_CPU", 1)


def test_an_instance_that_fails_ends_the_others(tmp_path: Path) -> None:
    put(tmp_path, FAILS + "    execute = None\n", f'backend: "python" instance_group {{ count: 3 }} {OUTPUT}')
    with unit_in_thread(serve(tmp_path)) as unit:
        (entry,) = unit.catalog.index()
        assert entry.state is ModelState.UNAVAILABLE and "model.py, line 3" in entry.reason


def test_a_request_may_have_no_inputs(tmp_path: Path) -> None:
    constant = helper.make_node("Constant", [], ["y"], value=numpy_helper.from_array(np.ones((1, 4), np.float32)))
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])
    graph = helper.make_graph([constant], "g", [], [output])
    models.put(
        tmp_path, "constant", helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 16)])
    )
    with unit_in_thread(serve(tmp_path)) as unit:
        base = f"http://127.0.0.1:{unit.http_port}/v2/models/constant"
        for path, body in (("infer", {"inputs": []}), ("generate", {})):
            answer = httpx.post(f"{base}/{path}", json=body, trust_env=False, timeout=60)
            assert answer.status_code == 200, answer.text
        client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}")
        found = client.infer("constant", []).as_numpy("y")
        assert found is not None and found.tolist() == [[1.0] * 4]
        client.close()
