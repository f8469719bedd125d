import json
import struct

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit
from oriel_inference.errors import Outcome
from oriel_inference.servers.statuses import as_inference_error
from oriel_wire.observe.trace import ListSink

from .clients import client_of

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"


async def test_json_request_gets_a_json_answer(kept_http: httpx.AsyncClient) -> None:
    answer = await kept_http.post(INFER, json={**ONES, "id": "seven"})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "model_name": "double",
        "model_version": "1",
        "id": "seven",
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [1, 4], "data": [2.0, 4.0, 6.0, 8.0]}],
    }


async def test_binary_request_gets_binary_outputs_when_it_asks(kept_http: httpx.AsyncClient) -> None:
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    head = {
        "inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "parameters": {"binary_data_size": 32}}],
        "parameters": {"binary_data_output": True},
    }
    part = json.dumps(head).encode()
    part += b" " * (len(part) % 4 == 0)  # an unaligned tensor behind it
    answer = await kept_http.post(
        INFER, content=part + rows.tobytes(), headers={"Inference-Header-Content-Length": str(len(part))}
    )
    length = int(answer.headers["inference-header-content-length"])
    assert answer.headers["content-type"] == "application/octet-stream"
    np.testing.assert_array_equal(np.frombuffer(answer.content[length:], np.float32), (rows * 2).ravel())


async def test_raw_request_is_one_row_of_the_only_input(kept_http: httpx.AsyncClient) -> None:
    raw = struct.pack("<4f", 1, 2, 3, 4)
    answer = await kept_http.post(INFER, content=raw, headers={"Inference-Header-Content-Length": "0"})
    length = int(answer.headers["inference-header-content-length"])
    assert struct.unpack("<4f", answer.content[length:]) == (2, 4, 6, 8)


async def test_text_tensors_and_variable_shapes(kept_http: httpx.AsyncClient) -> None:
    body = {"inputs": [{"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["grün", ""]}]}
    answer = await kept_http.post("/v2/models/echo/infer", json=body)
    assert answer.json()["outputs"][0]["data"] == ["grün", ""]
    for width in (1, 3):
        inputs = [{"name": n, "shape": [1, width], "datatype": "FP32", "data": [5] * width} for n in "ab"]
        answer = await kept_http.post(
            "/v2/models/pair/infer", json={"inputs": inputs, "outputs": [{"name": "difference"}]}
        )
        assert [(o["name"], o["data"]) for o in answer.json()["outputs"]] == [("difference", [0.0] * width)]


async def test_classes_are_values_indexes_and_labels(kept_http: httpx.AsyncClient) -> None:
    body = {
        "inputs": [{"name": "index", "shape": [2, 1], "datatype": "INT64", "data": [0, 2]}],
        "outputs": [{"name": "row", "parameters": {"classification": 2}}],
    }
    answer = await kept_http.post("/v2/models/lookup/infer", json=body)
    (output,) = answer.json()["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [2, 2])
    assert output["data"] == ["1.000000:1:right", "0.000000:0:left", "5.000000:1:right", "4.000000:0:left"]


# --- what every answer carries ------------------------------------------------------------------------------------


async def test_answer_carries_identity_stages_and_cost(http: httpx.AsyncClient, sink: ListSink) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = await http.post(INFER, json=ONES, headers={"traceparent": parent, "x-request-id": "find-me"})
    assert answer.headers["x-request-id"] == "find-me"
    assert answer.headers["traceresponse"].startswith("00-0af7651916cd43dd8448eb211c80319c-")
    assert [stage.split(";")[0] for stage in answer.headers["server-timing"].split(", ")] == ["queue", "compute"]
    assert int(answer.headers["x-oriel-cost-us"]) >= 0
    request, queue, compute = sink.spans
    assert [span.name for span in sink.spans] == ["POST /v2/models/{model}/infer", "queue", "compute"]
    assert request.parent_id == 0xB7AD6B7169203331 and request.attributes["oriel.request_id"] == "find-me"
    assert {queue.parent_id, compute.parent_id} == {request.context.span_id}
    assert request.start_s <= queue.start_s <= queue.end_s == compute.start_s <= compute.end_s <= request.end_s
    sink.spans.clear()
    await http.post(INFER, json=ONES, headers={"traceparent": f"{parent[:-2]}00"})
    assert sink.spans == [], "its trace is not sampled"


# --- deadlines ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v2/models/absent/infer"),
        ("POST", INFER),
        ("GET", "/v2/models/absent"),
        ("GET", INFER),
        ("GET", "/v2/nothing"),
        ("POST", "/v2/systemsharedmemory/region/r/register"),
        ("POST", "/v2/models/double/generate"),
        ("POST", "/v2/repository/models/double/load"),
    ],
)
async def test_every_error_names_its_request(kept_http: httpx.AsyncClient, method: str, path: str) -> None:
    for headers in ({}, {"x-request-id": "mine-1"}):
        answer = await kept_http.request(method, path, content=b"{}", headers=headers)
        said = answer.json()
        assert answer.status_code >= 400 and isinstance(said["error"], str)
        assert said["request_id"] == answer.headers["x-request-id"] == headers.get("x-request-id", said["request_id"])


async def test_a_misspelt_model_gets_a_near_name_among_those_the_caller_may_use(kept_http: httpx.AsyncClient) -> None:
    async def told(path: str, method: str = "POST", **headers: str) -> str:
        answer = await kept_http.request(method, path, content=b"{}", headers=headers)
        assert answer.status_code == 404
        return str(answer.json()["error"])

    asked = "/v2/models/duoble"
    assert await told(f"{asked}/infer") == "Request for unknown model: 'duoble' is not found, did you mean 'double'?"
    assert "did you mean 'double'?" in await told(asked, "GET")
    assert "did you mean 'double'?" in await told(f"{asked}/infer", **{"x-oriel-models": "x, dou*"})
    for patterns in ("echo,lookup", "!", ""):
        assert "did you mean" not in await told(f"{asked}/infer", **{"x-oriel-models": patterns}), patterns
    assert "did you mean" not in await told("/v2/models/nothing-like-it/infer")


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": [{**ONES["inputs"][0], "name": "z"}]}, "unexpected inference input 'z' for model 'double'"),
        (
            {"inputs": [{**ONES["inputs"][0], "datatype": "INT32"}]},
            "inference input 'x' data-type is 'INT32', but model 'double' expects 'FP32'",
        ),
        (
            {"inputs": [{**ONES["inputs"][0], "shape": [4]}]},
            "unexpected shape for input 'x' for model 'double'. Expected [-1,4], got [4]",
        ),
        ({"inputs": [{**ONES["inputs"][0], "shape": [2, 4]}]}, "holds 4"),
        ({"inputs": [{**ONES["inputs"][0], "shape": [0, 4], "data": []}]}, ">= 1, it is 0"),
        (
            {"inputs": [{**ONES["inputs"][0], "shape": [9, 4], "data": [0] * 36}]},
            "inference request batch-size must be <= 8 for 'double'",
        ),
        ({"outputs": [{"name": "q"}]}, "unexpected inference output 'q' for model 'double'"),
        ({"parameters": {"triton_secret": 1}}, "reserved"),
    ],
)
async def test_request_that_does_not_fit_the_model_is_told_why(
    kept_http: httpx.AsyncClient, change: dict[str, object], words: str
) -> None:
    answer = await kept_http.post(INFER, json={**ONES, **change})
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v2/nothing", 404),
        ("GET", "/v2/models", 404),
        ("POST", "/v2/models/absent/infer", 404),
        ("POST", "/v2/models/double/versions/7/infer", 404),
        ("POST", "/v2/models/double/versions/x/infer", 404),
        ("POST", "/v2/models/double/versions/1/infer", 200),
        ("POST", "/v2/models/d%6Fuble/infer", 200),
        ("POST", "/v2/models/..%2f..%2fetc/infer", 404),
        ("POST", "/v2/models/%252e%252e/infer", 404),
        ("POST", "/v2/models/absent/generate", 404),
        ("GET", "/v2/models/double/generate", 405),
        ("POST", "/v2/models/double/generates", 404),
        ("GET", "/v2/repository/index", 405),
        ("GET", INFER, 405),
        ("DELETE", "/v2/models/double", 405),
        ("POST", "/v2/health/live", 405),
        ("POST", "/v2/models/broken/infer", 404),
        ("GET", "/v2/models/broken/ready", 400),
        ("GET", "/v2/models/absent/ready", 404),
    ],
)
async def test_paths_and_methods(kept_http: httpx.AsyncClient, method: str, path: str, status: int) -> None:
    answer = await kept_http.request(method, path, json=ONES if method == "POST" else None)
    assert answer.status_code == status, answer.text
    assert ("retry-after" in answer.headers) == (status == 503)


# --- what the server says of itself -------------------------------------------------------------------------------


async def test_health_and_metadata(kept_http: httpx.AsyncClient) -> None:
    assert (await kept_http.get("/v2/health/live")).json() == {"live": True}
    assert (await kept_http.get("/v2/health/ready")).json() == {"ready": True}
    assert (await kept_http.get("/v2")).json()["name"] == "oriel"
    assert (await kept_http.get("/v2/models/double/ready")).json() == {"name": "double", "ready": True}
    assert (await kept_http.get("/v2/models/double")).json() == {
        "name": "double",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }


async def test_configuration_and_statistics(kept_http: httpx.AsyncClient) -> None:
    config = (await kept_http.get("/v2/models/double/config")).json()
    assert (config["max_batch_size"], config["input"][0]["dims"]) == (8, [4])
    answer = await kept_http.get("/v2/models/double/stats")
    assert answer.headers["x-oriel-provider"], "which the gateway's console shows"
    assert "x-oriel-artefact" not in answer.headers, "it has no artefact"
    assert int(answer.headers["x-oriel-loop-us"]) > 0, "which oriel simulate profile reads"
    everything = (await kept_http.get("/v2/models/stats")).json()["model_stats"]
    assert [each["name"] for each in everything] == ["double", "echo", "lookup", "pair"]


async def test_metrics_port(kept_unit: Unit) -> None:
    async with client_of(kept_unit.metrics_port) as control:
        assert (await control.get("/health/ready")).status_code == 200
        assert (
            'nv_inference_request_failure{model="double",version="1",reason="REJECTED"}'
            in (await control.get("/metrics")).text
        )
        lines = {line["name"]: line for line in (await control.get("/models")).json()}
    assert lines["double"]["provider"] == "CPUExecutionProvider"
    assert lines["double"]["batching"] == {
        "enabled": True,
        "max_batch_size": 8,
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": 0,
    }
    assert lines["broken"]["state"] == "UNAVAILABLE" and "model.onnx" in lines["broken"]["reason"]


def test_an_unexpected_error_is_logged_and_shows_no_insides(caplog: pytest.LogCaptureFixture) -> None:
    error = as_inference_error(KeyError("/etc/secret"))
    assert (error.outcome, error.message) == (Outcome.BACKEND_FAILED, "the server failed on this request")
    assert "/etc/secret" in caplog.text


# --- hostile bodies -----------------------------------------------------------------------------------------------


async def test_mutated_requests_are_answered_or_refused_never_more(kept_http: httpx.AsyncClient) -> None:
    random = np.random.default_rng(5)
    sound = bytearray(json.dumps(ONES).encode())
    seen = set()
    for _ in range(150):
        body = bytearray(sound)
        for _ in range(int(random.integers(1, 4))):
            at = int(random.integers(len(body)))
            match random.integers(3):
                case 0:
                    body[at] = int(random.integers(256))
                case 1:
                    del body[at : at + int(random.integers(1, 8))]
                case _:
                    body[at:at] = sound[at : at + int(random.integers(1, 16))]
        headers = {"inference-header-content-length": str(random.integers(200))} if random.integers(3) == 0 else {}
        answer = await kept_http.post(INFER, content=bytes(body), headers=headers)
        assert answer.status_code in (200, 400), (bytes(body), answer.text)
        if answer.status_code == 400:
            assert len(answer.json()["error"]) <= 500
        seen.add(answer.status_code)
    assert seen == {200, 400}


async def test_a_repeated_header_length_is_refused(kept_http: httpx.AsyncClient) -> None:
    inputs = [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]
    body = json.dumps({"inputs": inputs}).encode()
    name, length = "inference-header-content-length", str(len(body))
    assert (await kept_http.post(INFER, content=body, headers=[(name, length)])).status_code == 200
    for other in (length, "0"):
        answer = await kept_http.post(INFER, content=body, headers=[(name, length), (name, other)])
        assert answer.status_code == 400 and "twice" in answer.json()["error"]
