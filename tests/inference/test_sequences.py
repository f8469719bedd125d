"""Sequences as clients see them, over HTTP and gRPC."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit
from oriel_inference.sequences.scheduler import SequenceScheduler

from ..waiting import wait_until
from . import ensembles, models, python_calls
from .conftest import settings_of
from .sequence_models import CORRID, FLAGS, INT32, STATE, TENSORS, Client, accumulator, observer, put
from .thread_unit import unit_in_thread

ZERO = STATE % 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }'
HEAD = 'platform: "ensemble" max_batch_size: 4'
IN, OUT = [("INPUT", INT32, ["n", 1])], [("OUTPUT", INT32, ["n", 1])]
OLDEST = "oldest { max_candidate_sequences: 4 }"


CONTROLS = f"{FLAGS} {CORRID}"
WIDE = TENSORS.replace('"OUTPUT" data_type: TYPE_INT32 dims: [ 1 ]', '"OUTPUT" data_type: TYPE_INT32 dims: [ 8 ]')


@pytest.fixture(scope="module")
def sequence_unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    root = tmp_path_factory.mktemp("sequences")
    long = "max_sequence_idle_microseconds: 60000000"
    put(root, "sum", f"{OLDEST} {ZERO} {long}")
    put(root, "brief", f"{OLDEST} {ZERO} max_sequence_idle_microseconds: 50000")
    put(root, "alone", f"{OLDEST} {ZERO} {long}", rows=0, model=accumulator([1]))
    put(
        root,
        "seen",
        f"{ZERO} {long}",
        tensors=TENSORS + 'output [ { name: "STATE_OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]',
    )
    put(root, "direct", f"direct {{ }} {CONTROLS} {long}", tensors=WIDE, model=observer())
    started = FLAGS[: FLAGS.index("control_input", 1)]
    config = f'backend: "python" max_batch_size: 4 {TENSORS} sequence_batching {{ {OLDEST} {started} {long} }}'
    python_calls.put(root, "remember", "remember", config)
    python_calls.put(root, "passes_on", "remember", config)
    direct = f"sequence_batching {{ direct {{ }} {FLAGS} {long} }}"
    python_calls.put(root, "remember_direct", "remember", f'backend: "python" max_batch_size: 4 {TENSORS} {direct}')
    iterative = f"{TENSORS} sequence_batching {{ oldest {{ max_candidate_sequences: 4 }} iterative_sequence: true }}"
    python_calls.put(root, "iterate", "iterate", f'backend: "python" max_batch_size: 4 {iterative}')
    stream = f'backend: "python" model_transaction_policy {{ decoupled: true }} max_batch_size: 1 {iterative}'
    python_calls.put(root, "iterate_stream", "iterate", stream)
    python_calls.put(root, "once", "iterate", f'backend: "python" max_batch_size: 4 {TENSORS}')
    into, out = {"INPUT": "INPUT"}, {"OUTPUT": "OUTPUT"}
    ensembles.put(
        root, "steps", f"{HEAD} {TENSORS} ensemble_scheduling {{ {ensembles.scheduled([('sum', into, out)])} }}"
    )
    models.put(root, "same", models.graph([models.helper.make_node("Identity", ["INPUT"], ["OUTPUT"])], IN, OUT), None)
    ensembles.put(
        root, "plain", f"{HEAD} {TENSORS} ensemble_scheduling {{ {ensembles.scheduled([('same', into, out)])} }}"
    )
    with unit_in_thread(settings_of(root)) as unit:
        yield unit


@pytest.fixture(params=["http", "grpc"])
def client(sequence_unit: Unit, request: pytest.FixtureRequest) -> Iterator[Client]:
    module: Any = getattr(tritonclient, request.param)
    port = sequence_unit.http_port if request.param == "http" else sequence_unit.grpc_port
    with Client(module, f"127.0.0.1:{port}") as made:
        yield made


@pytest.fixture
def grpc(sequence_unit: Unit) -> Iterator[Client]:
    with Client(tritonclient.grpc, f"127.0.0.1:{sequence_unit.grpc_port}") as made:
        yield made


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


@pytest.mark.parametrize("model", ["alone", "seen", "remember", "remember_direct", "passes_on", "steps"])
def test_every_kind_of_model_remembers(client: Client, model: str) -> None:
    """Without a batch dimension, with a state that clients get, in Python (also with controls at fixed slots), called
    from there, and as a step of an ensemble.
    """
    client.name = model
    assert [client.step(5, 1, start=True), client.step("t", 10, start=True)] == [1, 10]
    assert [client.step(5, 2), client.step("t", 20, end=True), client.step(5, 3, end=True)] == [3, 30, 6]
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        client.step(5, 1)


def test_sequences_end_with_the_process_that_remembers_them(grpc: Client) -> None:
    grpc.name = "remember_direct"
    assert [grpc.step(31, 1, start=True), grpc.step(32, 10, start=True)] == [1, 10]
    with pytest.raises(InferenceServerException, match="died"):
        grpc.step(32, -1)
    for sequence in (31, 32):
        with pytest.raises(InferenceServerException, match="was lost, because the model's process died"):
            grpc.step(sequence, 1)
    assert grpc.step(31, 2, start=True, end=True) == 2


def test_a_state_may_be_an_output_too(client: Client) -> None:
    found = client.client.infer("seen", client.inputs(4), sequence_id=6, sequence_start=True, sequence_end=True)
    assert found.as_numpy("STATE_OUT").tolist() == [[4]]


def test_a_model_with_controls_gets_them_at_the_row_of_its_slot(client: Client) -> None:
    client.name = "direct"
    assert client.row(11, 5, start=True) == [1, 1, 1, 1, 1, 0, 11, 5]
    assert client.row(12, 6, start=True) == [1, 2, 2, 1, 1, 0, 12, 6]
    assert client.row(12, 7) == [1, 2, 2, 0, 1, 0, 12, 7]
    assert client.row(11, 8, end=True) == [1, 1, 1, 0, 1, 1, 11, 8]
    assert client.row(12, 9, end=True) == [1, 2, 2, 0, 1, 1, 12, 9]
    with pytest.raises(InferenceServerException, match="sequence_id 'text' must be a number for this model"):
        client.row("text", 1, start=True)


def test_generate_sends_steps(sequence_unit: Unit) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{sequence_unit.http_port}", trust_env=False, timeout=60) as http:
        for value, expected in ((1, 1), (2, 3)):
            body = {"INPUT": [value], "sequence_id": 301, "sequence_start": value == 1, "sequence_end": value == 2}
            found = http.post("/v2/models/alone/generate", json=body)
            assert (found.status_code, found.json().get("OUTPUT")) == (200, expected)
        for wrong in ({"sequence_id": 1.5}, {"sequence_id": True}, {"sequence_id": "x" * 129}, {"sequence_start": 1}):
            found = http.post("/v2/models/alone/generate", json={"INPUT": [1], "sequence_id": 1, **wrong})
            assert found.status_code == 400 and f"parameter {next(iter(wrong))!r} must" in found.json()["error"]


def test_a_step_of_an_idle_sequence_gets_the_reason(client: Client, sequence_unit: Unit) -> None:
    client.name = "brief"
    assert client.step(3, 1, start=True) == 1
    scheduler = sequence_unit.catalog.get("brief").batcher
    assert isinstance(scheduler, SequenceScheduler)
    wait_until(lambda: not scheduler.table.holding)
    with pytest.raises(InferenceServerException, match="was lost, because no step came for 0.05 s"):
        client.step(3, 1)


def test_steps_on_one_stream_are_interleaved_and_sent_ahead(grpc: Client) -> None:
    answers: Any = queue.SimpleQueue()
    grpc.client.start_stream(lambda result, error: answers.put((result, error)))
    for value in range(1, 21):
        for sequence in (101, "other"):
            flags = {"sequence_start": value == 1, "sequence_end": value == 20}
            grpc.client.async_stream_infer("sum", grpc.inputs(value), sequence_id=sequence, **flags)
    found = [answers.get(timeout=60) for _ in range(40)]
    grpc.client.stop_stream()
    assert [error for _, error in found] == [None] * 40
    sums = [int(result.as_numpy("OUTPUT").item()) for result, _ in found]
    assert sums == [total for value in range(1, 21) for total in [value * (value + 1) // 2] * 2]


def test_an_ensemble_returns_the_flags_of_its_call(grpc: Client) -> None:
    for model in ("plain", "steps"):
        for start, end in ((True, False), (False, False), (False, True)):
            flags = {"sequence_id": 77, "sequence_start": start, "sequence_end": end}
            for _ in range(2 if model == "plain" or start else 1):  # a second one is recognised
                parameters = grpc.client.infer(model, grpc.inputs(1), **flags).get_response().parameters
                assert (parameters["sequence_start"].bool_param, parameters["sequence_end"].bool_param) == (start, end)
    assert not grpc.client.infer("plain", grpc.inputs(1)).get_response().parameters


def test_statistics_and_metrics_count_steps_and_sequences(client: Client, sequence_unit: Unit) -> None:
    def count() -> int:
        stats = client.client.get_inference_statistics("sum")
        if isinstance(stats, dict):
            return int(stats["model_stats"][0]["inference_count"])
        return int(stats.model_stats[0].inference_count)

    before = count()
    client.step(201, 1, start=True)
    client.step(201, 1)
    metrics = httpx.get(f"http://127.0.0.1:{sequence_unit.metrics_port}/metrics", trust_env=False).text
    assert 'oriel_sequences{model="sum",version="1",state="waiting"} 0' in metrics
    assert 'oriel_sequences{model="sum",version="1",state="holding"} 1' in metrics
    client.step(201, 1, end=True)
    assert count() == before + 3
    metrics = httpx.get(f"http://127.0.0.1:{sequence_unit.metrics_port}/metrics", trust_env=False).text
    assert 'oriel_sequences_ended_total{model="sum",version="1",how="end"}' in metrics
    assert 'oriel_sequences{model="same"' not in metrics


def test_a_model_executes_an_iterative_request_until_it_releases_it(client: Client) -> None:
    """Requests are executed together, however many executions each of them needs."""

    def ask(value: int) -> int:
        with Client(client.module, client.address, "iterate") as own:
            return int(own.client.infer("iterate", own.inputs(value)).as_numpy("OUTPUT").item())

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(ask, (40, 1, 60)))
    assert len(found) == 3 and max(found) <= 3
    with pytest.raises(InferenceServerException, match="rescheduling needs sequence_batching"):
        client.client.infer("once", client.inputs(3), sequence_id=1, sequence_start=True)


def test_an_iterative_request_of_a_decoupled_model_streams(grpc: Client) -> None:
    answers: Any = queue.SimpleQueue()
    grpc.client.start_stream(lambda result, error: answers.put((result, error)))
    grpc.client.async_stream_infer("iterate_stream", grpc.inputs(5), enable_empty_final_response=True)
    found = [answers.get(timeout=60) for _ in range(6)]
    grpc.client.stop_stream()
    assert [error for _, error in found] == [None] * 6
    assert [int(result.as_numpy("OUTPUT").item()) for result, _ in found[:5]] == [4, 3, 2, 1, 0]
    assert found[5][0].get_response().parameters["triton_final_response"].bool_param
