"""An unmodified tritonclient, HTTP and gRPC, pointed at the gateway with the key as a header."""

import warnings
from typing import Any

import numpy as np
import pytest
from stacks import Stack, key

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import tritonclient.grpc as triton_grpc
    import tritonclient.http as triton_http
    from tritonclient.utils import InferenceServerException

# scikit-learn's scan of a 7 that training never saw, in sixteenths of full ink.
SEVEN = (
    "0 0 4 15 16 11 0 0 0 0 7 9 9 16 0 0 0 0 0 0 4 13 0 0 0 0 1 9 15 16 10 0 "
    "0 0 13 15 16 8 2 0 0 0 3 7 13 0 0 0 0 0 1 13 4 0 0 0 0 0 6 11 0 0 0 0"
)
IMAGE = np.array([[int(word) / 16 for word in SEVEN.split()]], np.float32)


@pytest.fixture(params=[0, 1], ids=["http", "grpc"])
def triton(stack: Stack, request: pytest.FixtureRequest) -> Any:
    """(module, client) of one transport."""
    module = (triton_http, triton_grpc)[request.param]
    url = stack.address("gateway", ("http", "grpc")[request.param])
    client = module.InferenceServerClient(url)
    yield module, client
    client.close()


def inputs(module: Any, array: np.ndarray[Any, Any]) -> list[Any]:
    image = module.InferInput("image", list(array.shape), "FP32")
    image.set_data_from_numpy(array)
    return [image]


def test_health_and_metadata(triton: Any) -> None:
    _, client = triton
    assert client.is_server_live(headers=key("gold")) and client.is_server_ready(headers=key("gold"))
    assert client.is_model_ready("digits", headers=key("gold"))
    metadata = client.get_model_metadata("digits", headers=key("gold"))
    name = metadata["name"] if isinstance(metadata, dict) else metadata.name
    config = client.get_model_config("digits", headers=key("gold"))
    largest = config["max_batch_size"] if isinstance(config, dict) else config.config.max_batch_size
    assert (name, largest) == ("digits", 64)


def test_one_image_and_a_batch_of_them(triton: Any) -> None:
    module, client = triton
    for rows in (1, 5):
        array = np.repeat(IMAGE, rows, axis=0)
        result = client.infer("digits", inputs(module, array), headers=key("gold"), request_id="a1")
        assert result.as_numpy("label").ravel().tolist() == [7] * rows
        assert result.as_numpy("probabilities").shape == (rows, 10)


def test_only_the_outputs_asked_for_come_back(triton: Any) -> None:
    module, client = triton
    wanted = [module.InferRequestedOutput("label")]
    result = client.infer("digits", inputs(module, IMAGE), outputs=wanted, headers=key("silver"))
    assert result.as_numpy("label").tolist() == [[7]] and result.as_numpy("probabilities") is None


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong"}])
def test_without_a_good_key_nothing_runs(triton: Any, headers: dict[str, str]) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException) as refused:
        # A copy: the client writes fields of its own into the headers it is given.
        client.infer("digits", inputs(module, IMAGE), headers=dict(headers))
    assert "401" in str(refused.value) or "UNAUTHENTICATED" in str(refused.value)


def test_a_model_of_others_is_not_found(triton: Any) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException) as refused:
        client.infer("mlp_single", inputs(module, IMAGE), headers=key("silver"))
    assert "404" in str(refused.value) or "NOT_FOUND" in str(refused.value)


def test_a_tensor_that_does_not_fit_is_the_clients_fault(triton: Any) -> None:
    module, client = triton
    with pytest.raises(InferenceServerException) as refused:
        client.infer("digits", inputs(module, IMAGE[:, :9].copy()), headers=key("gold"))
    assert "400" in str(refused.value) or "INVALID_ARGUMENT" in str(refused.value)
