"""Unmodified v2 clients against the server."""

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit

ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)


def exercise(module: Any, client: Any) -> None:
    """Do what every synchronous client must be able to do."""
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("double") and not client.is_model_ready("broken")
    given = module.InferInput("x", [2, 4], "FP32")
    given.set_data_from_numpy(ROWS)
    result = client.infer("double", [given], request_id="r1", timeout=5_000_000, priority=1)
    np.testing.assert_array_equal(result.as_numpy("y"), ROWS * 2)
    wanted = [module.InferRequestedOutput("said")]
    text = module.InferInput("text", [2, 1], "BYTES")
    text.set_data_from_numpy(np.array([["a"], ["ü"]], dtype=np.object_))
    result = client.infer("echo", [text], outputs=wanted)
    assert [each.decode() for each in result.as_numpy("said").ravel()] == ["a", "ü"]
    index = module.InferInput("index", [1, 1], "INT64")
    index.set_data_from_numpy(np.array([[2]]))
    result = client.infer("lookup", [index], outputs=[module.InferRequestedOutput("row", class_count=1)])
    assert result.as_numpy("row").ravel().tolist() == [b"5.000000:1:right"]
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.infer("absent", [given])
    with pytest.raises(InferenceServerException, match="'duoble' is not found, did you mean 'double'?"):
        client.infer("duoble", [given])
    with pytest.raises(InferenceServerException, match="Expected \\[-1,4\\]"):
        given.set_shape([4, 2])
        client.infer("double", [given])


def over_http(port: int) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        exercise(tritonclient.http, client)
        assert client.get_server_metadata()["name"] == "oriel"
        assert client.get_model_metadata("double")["inputs"][0]["shape"] == [-1, 4]
        assert client.get_model_config("double")["max_batch_size"] == 8
        assert client.get_inference_statistics("double")["model_stats"][0]["name"] == "double"
        handles = []
        for value in range(12):
            given = tritonclient.http.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.full((1, 4), value, np.float32), binary_data=bool(value % 2))
            handles.append(client.async_infer("double", [given]))
        answers = [handle.get_result().as_numpy("y") for handle in handles]
        assert [float(answer[0, 0]) for answer in answers] == [2.0 * value for value in range(12)]


def over_grpc(port: int) -> None:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        exercise(tritonclient.grpc, client)
        assert client.get_server_metadata().name == "oriel"
        assert list(client.get_model_metadata("double").inputs[0].shape) == [-1, 4]
        assert client.get_model_config("double").config.max_batch_size == 8
        assert client.get_inference_statistics("double").model_stats[0].name == "double"
        with pytest.raises(InferenceServerException, match="failed to get model version from specified .* 'latest'"):
            client.get_model_metadata("double", "latest")


async def test_tritonclient_http(unit: Unit) -> None:
    await asyncio.to_thread(over_http, unit.http_port)


async def test_tritonclient_grpc(unit: Unit) -> None:
    await asyncio.to_thread(over_grpc, unit.grpc_port)


async def test_tritonclient_http_aio(unit: Unit) -> None:
    async with tritonclient.http.aio.InferenceServerClient(f"127.0.0.1:{unit.http_port}") as client:
        assert await client.is_server_ready()
        given = tritonclient.http.InferInput("x", [2, 4], "FP32")
        given.set_data_from_numpy(ROWS)
        result = await client.infer("double", [given])
        np.testing.assert_array_equal(result.as_numpy("y"), ROWS * 2)


async def test_tritonclient_grpc_aio(unit: Unit) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
        assert await client.is_server_ready()

        async def one(number: int) -> None:
            given = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            given.set_data_from_numpy(np.full((1, 4), number, np.float32))
            result = await client.infer("double", [given])
            assert float(result.as_numpy("y")[0, 0]) == 2.0 * number

        await asyncio.gather(*(one(number) for number in range(20)))
