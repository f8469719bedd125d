"""Scans as clients see them: one call runs a model over a leading time axis."""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit

from . import models
from .conftest import settings_of
from .sequence_models import CORRID, FLAGS, Recurrent
from .thread_unit import unit_in_thread

WIDTH, UNITS = 24, 32
MODEL = Recurrent(WIDTH, UNITS)
KINDS = ["vad", "single", "padded"]
SLOTS = "oldest { max_candidate_sequences: 16 }"


@pytest.fixture(scope="module")
def scan_unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Unit]:
    root = tmp_path_factory.mktemp("scans")
    MODEL.put(root, "vad", SLOTS)
    Recurrent(WIDTH, UNITS, batched=False).put(root, "single", SLOTS)
    controls = [(name, models.TensorProto.INT32, ["n", 1]) for name in ("START", "READY", "END")]
    padded = MODEL.proto()
    padded.graph.input.extend([models.helper.make_tensor_value_info(*each) for each in controls])
    MODEL.put(root, "padded", f"direct {{ }} {FLAGS}", model=padded)
    named = MODEL.proto()
    named.graph.input.append(models.helper.make_tensor_value_info("CORRID", models.TensorProto.INT64, ["n", 1]))
    MODEL.put(root, "named", f"direct {{ }} {CORRID}", model=named)
    models.put(root, "plain", MODEL.proto(), None)
    with unit_in_thread(settings_of(root)) as unit:
        yield unit


@pytest.fixture(params=["http", "grpc"])
def client(scan_unit: Unit, request: pytest.FixtureRequest) -> Iterator[Any]:
    module: Any = getattr(tritonclient, request.param)
    port = scan_unit.http_port if request.param == "http" else scan_unit.grpc_port
    made = module.InferenceServerClient(f"127.0.0.1:{port}", **({"concurrency": 8} if request.param == "http" else {}))
    made.module = module
    yield made
    made.close()


def chunks_of(steps: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=(steps, WIDTH)).astype(np.float32)


def arguments(module: Any, tensors: dict[str, Any], outputs: tuple[str, ...] = (), scan: Any = True) -> dict[str, Any]:
    inputs = []
    for name, array in tensors.items():
        inputs.append(module.InferInput(name, list(array.shape), "FP32"))
        inputs[-1].set_data_from_numpy(array)
    wanted = [module.InferRequestedOutput(name) for name in outputs] or None
    return {"inputs": inputs, "outputs": wanted, "parameters": {"scan": scan}}


def scanned(client: Any, model: str, tensors: dict[str, Any], *outputs: str, **more: Any) -> Any:
    return client.infer(model, **arguments(client.module, tensors, outputs), **more)


@pytest.mark.parametrize("model", KINDS)
def test_a_scan_equals_the_loop(client: Any, model: str) -> None:
    chunks = chunks_of(301)
    speech, _ = MODEL.loop(chunks)
    found = scanned(client, model, {"chunk": chunks})
    np.testing.assert_allclose(found.as_numpy("speech"), speech, atol=1e-4)
    assert found.as_numpy("hidden_out") is None


@pytest.mark.parametrize("model", KINDS)
def test_a_scan_goes_on_where_another_ended(client: Any, model: str) -> None:
    chunks = chunks_of(40)
    speech, last = MODEL.loop(chunks)
    first = scanned(client, model, {"chunk": chunks[:25]}, "speech", "hidden_out")
    tensors = {"chunk": chunks[25:], "hidden": first.as_numpy("hidden_out")}
    second = scanned(client, model, tensors, "speech", "hidden_out")
    both = np.concatenate([first.as_numpy("speech"), second.as_numpy("speech")])
    np.testing.assert_allclose(both, speech, atol=1e-4)
    np.testing.assert_allclose(second.as_numpy("hidden_out"), last, atol=1e-4)


def test_a_scan_that_does_not_fit_is_refused(client: Any) -> None:
    chunks = chunks_of(3)
    for model, tensors, outputs, text in (
        ("plain", {"chunk": chunks}, (), "model 'plain' cannot be scanned"),
        ("named", {"chunk": chunks}, (), "model 'named' cannot be scanned"),
        ("vad", {"chunk": chunks[:0]}, (), "a scan of 0 steps"),
        ("vad", {"chunk": chunks[:, :5]}, (), "unexpected shape for input 'chunk'"),
        ("vad", {"chunk": chunks, "hidden": np.zeros((2, UNITS), np.float32)}, (), "state 'hidden' of a scan must"),
        ("vad", {"chunk": chunks}, ("other",), "unexpected inference output 'other'"),
        ("vad", {"hidden": np.zeros((1, UNITS), np.float32)}, (), "also needs input 'chunk'"),
    ):
        with pytest.raises(InferenceServerException, match=text):
            scanned(client, model, tensors, *outputs)
    with pytest.raises(InferenceServerException, match="parameter 'scan' must be true, false or 'stream'"):
        client.infer("vad", **arguments(client.module, {"chunk": chunks}, scan="other"))
    with pytest.raises(InferenceServerException, match="come on ModelStreamInfer or generate_stream"):
        client.infer("vad", **arguments(client.module, {"chunk": chunks}, scan="stream"))


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6), model=st.sampled_from(KINDS))
def test_callers_at_the_same_time_get_what_their_own_loops_give(
    scan_unit: Unit, lengths: list[int], model: str
) -> None:
    def one(seed: int) -> Any:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{scan_unit.grpc_port}") as client:
            client.module = tritonclient.grpc
            found = scanned(client, model, {"chunk": chunks_of(lengths[seed], seed)}, "speech", "hidden_out")
            return found.as_numpy("speech"), found.as_numpy("hidden_out")

    with ThreadPoolExecutor(len(lengths)) as callers:
        answers = list(callers.map(one, range(len(lengths))))
    for seed, (speech, last) in enumerate(answers):
        expected, state = MODEL.loop(chunks_of(lengths[seed], seed))
        np.testing.assert_allclose(speech, expected, atol=1e-4)
        np.testing.assert_allclose(last, state, atol=1e-4)


def test_the_steps_of_a_scan_are_streamed(scan_unit: Unit) -> None:
    chunks = chunks_of(4000)
    speech, last = MODEL.loop(chunks)
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{scan_unit.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        asked = arguments(tritonclient.grpc, {"chunk": chunks}, ("speech", "hidden_out"), "stream")
        client.async_stream_infer("vad", **asked, enable_empty_final_response=True)
        parts: list[Any] = []
        while not parts or parts[-1].as_numpy("hidden_out") is None:
            parts.append(answers.get(timeout=30))
            assert not isinstance(parts[-1], InferenceServerException)
    assert len(parts) > 1
    np.testing.assert_allclose(np.concatenate([each.as_numpy("speech") for each in parts]), speech, atol=1e-3)
    np.testing.assert_allclose(parts[-1].as_numpy("hidden_out"), last, atol=1e-3)


def test_a_scan_is_streamed_as_events(scan_unit: Unit) -> None:
    chunks = chunks_of(3)
    url = f"http://127.0.0.1:{scan_unit.http_port}/v2/models/vad/generate_stream"
    answer = httpx.post(url, json={"chunk": chunks.tolist(), "scan": "stream"})
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines and "speech" in lines[0]


def test_a_scan_ends_at_its_deadline(client: Any) -> None:
    chunks = chunks_of(1 << 16)
    with pytest.raises(InferenceServerException, match="deadline"):
        scanned(client, "vad", {"chunk": chunks}, timeout=1000)
    assert scanned(client, "vad", {"chunk": chunks[:2]}).as_numpy("speech").shape == (2, 1)
