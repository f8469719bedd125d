"""Requests that are recognised by their text are answered like those that are not."""

import asyncio
import json
from typing import Any

import httpx
import numpy as np
import pytest

from oriel_inference.app import Unit
from oriel_wire.v2.http import decode_response, encode_request
from oriel_wire.v2.messages import InferRequest, RequestedOutput, tensor

INFER = "/v2/models/double/infer"


def body(values: list[Any], **members: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": values}], **members}
    ).encode()


def known(unit: Unit, model: str = "double") -> int:
    templates = unit.catalog.get(model).templates
    return len(templates._lists) + len(templates._binary)


async def test_numbers_change_and_nothing_else(unit: Unit, http: httpx.AsyncClient) -> None:
    for number in range(6):
        answer = await http.post(INFER, content=body([number, 0.5, -1, 1e30], id="same"))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["x-request-id"] and answer.headers["traceresponse"].startswith("00-")
        assert answer.headers["server-timing"].startswith("queue;dur=")
        document = answer.json()
        assert document["id"] == "same" and document["model_version"] == "1"
        (output,) = document["outputs"]
        assert output["data"][:3] == [2.0 * number, 1.0, -2.0]
    assert known(unit) == 1


async def test_many_connections_get_their_own_numbers(kept_http: httpx.AsyncClient) -> None:
    async def ask(number: int) -> None:
        answer = await kept_http.post(INFER, content=body([number] * 4))
        assert answer.json()["outputs"][0]["data"] == [2.0 * number] * 4

    for _ in range(3):
        await asyncio.gather(*(ask(number) for number in range(32)))


@pytest.mark.parametrize("values", [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 1e39], [1, 2, 3, "4"], [1, 2, 3, None], []])
async def test_what_does_not_fit_is_refused_in_the_full_decoders_words(
    kept_http: httpx.AsyncClient, values: list[Any]
) -> None:
    for _ in range(3):
        assert (await kept_http.post(INFER, content=body([1, 2, 3, 4]))).status_code == 200
    refused = await kept_http.post(INFER, content=body(values))
    assert refused.status_code == 400
    assert "'x'" in refused.json()["error"]
    assert (await kept_http.post(INFER, content=body([1, 2, 3, 4]))).status_code == 200


async def test_an_answer_without_json_numbers(kept_http: httpx.AsyncClient) -> None:
    for _ in range(4):
        answer = await kept_http.post(INFER, content=body([3e38, 0, 0, 0]))
        assert answer.status_code == 200
        assert json.loads(answer.text)["outputs"][0]["data"][0] == float("inf")


async def test_binary_both_ways_with_one_of_two_outputs(unit: Unit, http: httpx.AsyncClient) -> None:
    for number in range(5):
        a = np.full((2, 3), number, np.float32)
        request = InferRequest(
            model_name="pair",
            inputs=[tensor("a", a), tensor("b", np.ones((2, 3), np.float32))],
            outputs=[RequestedOutput("difference", binary=True)],
        )
        parts, length = encode_request(request)
        headers = {"Inference-Header-Content-Length": str(length)}
        answer = await http.post("/v2/models/pair/infer", content=b"".join(parts), headers=headers)
        assert answer.status_code == 200
        found = decode_response(answer.content, int(answer.headers["inference-header-content-length"]))
        (output,) = found.outputs
        assert output.name == "difference"
        assert np.array_equal(output.array, a - 1)
    assert known(unit, "pair") == 1


async def test_compressed_answers_take_the_long_way(http: httpx.AsyncClient) -> None:
    values = np.random.default_rng(1).random(32, np.float32)
    text = {"inputs": [{"name": "x", "shape": [8, 4], "datatype": "FP32", "data": values.tolist()}]}
    for _ in range(4):
        answer = await http.post(INFER, content=json.dumps(text), headers={"accept-encoding": "gzip"})
        assert answer.status_code == 200
        assert answer.headers["content-encoding"] == "gzip"
        assert np.array_equal(np.array(answer.json()["outputs"][0]["data"], np.float32), 2 * values)


async def test_a_text_that_is_no_json_is_not_learned(http: httpx.AsyncClient) -> None:
    x = np.ones((1, 4), np.float32)
    parts, _ = encode_request(InferRequest(model_name="double", inputs=[tensor("x", x)]))
    head = bytes(parts[0]).rstrip().replace(b'"parameters":{"binary_data_output":true}', b'"parameters":{"a":NaN}')
    assert b"NaN" in head
    headers = {"Inference-Header-Content-Length": str(len(head))}
    for _ in range(4):
        answer = await http.post(INFER, content=head + b"".join(parts[1:]), headers=headers)
        assert answer.status_code == 400 and "holds NaN" in answer.json()["error"]


async def test_nan_in_a_known_request_is_refused_as_in_any_other(http: httpx.AsyncClient) -> None:
    """The refusal names the position of the NaN, both before and after the text around the numbers is known."""
    text = '{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1,%s,3,4]}]}'
    for word in ("2", "2", "2", "NaN", "Infinity", "-Infinity", "2"):
        answer = await http.post(INFER, content=text % word)
        if word == "2":
            assert answer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
        else:
            assert answer.status_code == 400
            assert f"input 'x': data holds {word} at position 1" in answer.json()["error"]
