"""Sequences as clients see them, over HTTP and gRPC."""

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit

from .conftest import settings_of
from .sequence_models import STATE, Client, put
from .thread_unit import unit_in_thread

ZERO = STATE % 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }'
OLDEST = "oldest { max_candidate_sequences: 4 }"


@pytest.fixture(scope="module")
def sequence_unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    root = tmp_path_factory.mktemp("sequences")
    put(root, "sum", f"{OLDEST} {ZERO} max_sequence_idle_microseconds: 60000000")
    with unit_in_thread(settings_of(root)) as unit:
        yield unit


@pytest.fixture(params=["http", "grpc"])
def client(sequence_unit: Unit, request: pytest.FixtureRequest) -> Iterator[Client]:
    module: Any = getattr(tritonclient, request.param)
    port = sequence_unit.http_port if request.param == "http" else sequence_unit.grpc_port
    made = Client(module, f"127.0.0.1:{port}")
    yield made
    made.client.close()


def test_the_steps_of_a_sequence_share_a_state_of_their_own(client: Client) -> None:
    assert client.step(7, 1, start=True) == 1
    assert client.step("7", 100, start=True) == 100  # a text is another sequence than the number
    assert client.step(7, 2) == 3
    assert client.step("7", 20, end=True) == 120
    assert client.step(7, 3, end=True) == 6
    with pytest.raises(InferenceServerException, match="inference request for sequence 7 to model 'sum' must specify"):
        client.step(7, 4)


def test_a_start_begins_anew(client: Client) -> None:
    assert client.step(8, 5, start=True) == 5
    assert client.step(8, 6, start=True) == 6
    assert client.step(8, 1, end=True) == 7


def test_what_is_no_step_is_refused_in_the_words_of_triton(client: Client) -> None:
    with pytest.raises(InferenceServerException) as refused:
        client.step(0, 1)
    text = "inference request to model 'sum' must specify a non-zero or non-empty correlation ID"
    assert refused.value.message() == text
    with pytest.raises(InferenceServerException) as refused:
        client.step(99, 1)
    assert refused.value.message().startswith(
        "inference request for sequence 99 to model 'sum' must specify the START flag on the first request of the "
        "sequence"
    )
    assert refused.value.status() in ("400", "StatusCode.INVALID_ARGUMENT")
    with pytest.raises(InferenceServerException) as refused:
        client.client.infer("sum", client.inputs(1, rows=2), sequence_id=9, sequence_start=True)
    text = "inference request to model 'sum' must specify batch-size 1 due to requirements of sequence batcher"
    assert refused.value.message() == text


def test_clients_see_only_the_tensors_that_they_send_and_get(client: Client) -> None:
    http = tritonclient.http.InferenceServerClient
    metadata = client.client.get_model_metadata("sum")
    config = client.client.get_model_config("sum")
    server = client.client.get_server_metadata()
    if isinstance(client.client, http):
        assert [each["name"] for each in metadata["inputs"] + metadata["outputs"]] == ["INPUT", "OUTPUT"]
        assert config["sequence_batching"]["state"][0]["input_name"] == "STATE_IN"
        assert "sequence" in server["extensions"]
    else:
        assert [each.name for each in (*metadata.inputs, *metadata.outputs)] == ["INPUT", "OUTPUT"]
        assert config.config.sequence_batching.state[0].input_name == "STATE_IN"
        assert "sequence" in server.extensions
