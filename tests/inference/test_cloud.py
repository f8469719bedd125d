"""The paths of SageMaker's and Vertex AI's containers: what they stand for, and what they do not reach."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit, open_unit
from oriel_inference.servers.cloud import vertex_paths
from oriel_inference.servers.restrictions import restriction_flag
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from .clients import client_of

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
PREDICT, HEALTH = "/v1/endpoints/7/deployedModels/8:predict", "/v1/endpoints/7/deployedModels/8"
MIME = "application/vnd.{}-triton.binary+json;json-header-size="
clouds = pytest.mark.parametrize(
    ("cloud", "health", "predict"), [("SageMaker", "/ping", "/invocations"), ("Vertex-AI", HEALTH, PREDICT)]
)


@pytest.fixture
async def unit(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Unit]:
    monkeypatch.setenv("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME", "double")
    monkeypatch.setenv("AIP_PREDICT_ROUTE", PREDICT)
    monkeypatch.setenv("AIP_HEALTH_ROUTE", HEALTH)
    secret = restriction_flag("api", "")("statistics:key=secret")
    both = replace(settings, sagemaker_port=0, vertex_port=0, vertex_model="double", http_restrictions=(secret,))
    async with open_unit(replace(both, http_port=None, grpc_port=None), sink=ListSink()) as running:
        yield running


@clouds
async def test_health_and_the_default_model(unit: Unit, cloud: str, health: str, predict: str) -> None:
    async with client_of(unit.cloud_ports[cloud]) as http:
        assert (await http.get(health)).json() == {"ready": True}
        assert (await http.post(predict, json=ONES)).json()["model_name"] == "double"
        assert (await http.get(predict)).status_code == 405
        for path in ("/v2", "/v2/models/double/infer", "/models", "/"):
            assert (await http.post(path, json=ONES)).status_code == 404


@clouds
async def test_the_content_type_tells_the_length_of_json(unit: Unit, cloud: str, health: str, predict: str) -> None:
    row, mime = np.arange(4, dtype=np.float32), MIME.format(cloud.lower())
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    async with client_of(unit.cloud_ports[cloud]) as http:

        async def ask(kind: str) -> httpx.Response:
            return await http.post(predict, content=head + row.tobytes(), headers={"content-type": kind})

        for _ in range(2):  # the second one is recognised by its text
            answer = await ask(f"{mime}{len(head)}")
            length = int(answer.headers["content-type"].removeprefix(mime))
            np.testing.assert_array_equal(np.frombuffer(answer.content[length:], np.float32), row * 2)
        for wrong in (f"more/{mime}{len(head)}", f"{mime}x{len(head)}", f"{mime}-1", f"{mime}12345", "text/plain"):
            assert (await ask(wrong)).status_code == 400


async def test_a_header_of_sagemaker_names_another_model(unit: Unit) -> None:
    async with client_of(unit.cloud_ports["SageMaker"]) as http:
        for name, status in (("double", 200), ("broken", 404), ("../../repository", 404)):
            headers = {"x-amzn-sagemaker-target-model": name}
            assert (await http.post("/invocations", json=ONES, headers=headers)).status_code == status


async def test_vertex_redirects_to_paths_of_v2(unit: Unit) -> None:
    async with client_of(unit.cloud_ports["Vertex-AI"]) as http:

        async def ask(target: str, body: object = ONES, key: str = "") -> httpx.Response:
            headers = {"X-Vertex-Ai-Triton-Redirect": target, "key": key}
            return await http.post(PREDICT, json=body, headers=headers)

        assert (await ask("v2")).json()["name"] == "oriel"
        assert (await ask("v2/models/double")).json()["name"] == "double"
        assert (await ask("v2/models/double/infer")).json()["outputs"][0]["data"] == [2, 4, 6, 8]
        assert "double" in {each["name"] for each in (await ask("v2/repository/index", {})).json()}
        assert (await ask("v2/models/stats")).status_code == 403, "a restriction holds here, too"
        assert (await ask("v2/models/stats", key="secret")).json()["model_stats"]
        for nowhere in ("metrics", "v2/logging", "v2/../v2/logging", "", "/v2"):
            assert (await ask(nowhere)).status_code == 404


def test_vertex_needs_its_routes() -> None:
    with pytest.raises(StartFailed, match="AIP_PREDICT_ROUTE"):
        vertex_paths({"AIP_HEALTH_ROUTE": HEALTH}, str)
