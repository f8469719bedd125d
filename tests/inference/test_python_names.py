"""The names that Python models import, without a process."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oriel_inference.backends.python import pb_utils
from oriel_inference.backends.python import runtime as runtime_module
from oriel_inference.backends.python.frames import read_tensors, tensor_parts
from oriel_inference.backends.python.messages import Infer, Inferred, ResultHead


def sent(tensor: pb_utils.Tensor) -> pb_utils.Tensor:
    """What the other side makes of it."""
    body: list[Any] = []
    heads = tensor_parts([tensor.part()], body)
    ((part,), _) = read_tensors(heads, memoryview(bytearray(b"".join(body))))
    return pb_utils.Tensor.received(part)


@pytest.mark.parametrize(
    ("array", "number"),
    [
        (np.array([True]), 1),
        (np.arange(3, dtype=np.uint8), 2),
        (np.arange(6, dtype=">i4").reshape(2, 3), 8),
        (np.arange(8, dtype=np.int64)[::2], 9),
        (np.array([1.5], np.float16), 10),
        (np.zeros((0, 4), np.float32), 11),
        (np.array(2.5), 12),
    ],
)
def test_arrays_travel_whole(array: np.ndarray[Any, Any], number: int) -> None:
    tensor = pb_utils.Tensor("t", array)
    assert (tensor.name(), tensor.triton_dtype(), tensor.shape()) == ("t", number, list(array.shape))
    assert sent(tensor).triton_dtype() == number and np.array_equal(sent(tensor).as_numpy(), array)


def test_text_is_bytes_on_the_other_side() -> None:
    for array in (np.array(["ü", b"\0x\0", 7], dtype=object), np.array([b"ab", b"c"])):
        found = sent(pb_utils.Tensor("t", array)).as_numpy()
        expected = [each if isinstance(each, bytes) else str(each).encode() for each in array.tolist()]
        assert found.dtype == object and found.tolist() == expected
    with pytest.raises(pb_utils.TritonModelException, match="use dtype np.object_ for text"):
        pb_utils.Tensor("t", np.array(["text"]))
    with pytest.raises(pb_utils.TritonModelException, match="complex128"):
        pb_utils.Tensor("t", np.array([1j]))


def test_numpy_has_no_bf16() -> None:
    tensor = pb_utils.Tensor.received(("t", "BF16", np.array([16256], np.uint16)))
    with pytest.raises(pb_utils.TritonModelException, match="'t' is BF16, which numpy does not have"):
        tensor.as_numpy()
    assert tensor.triton_dtype() == 14 and sent(tensor).triton_dtype() == 14


def test_tensors_cross_to_other_frameworks_without_a_copy() -> None:
    array = np.arange(4, dtype=np.float32)
    given = pb_utils.Tensor.from_dlpack("t", array)
    assert np.shares_memory(given.as_numpy(), array)
    assert np.shares_memory(np.from_dlpack(given), array)
    assert np.array_equal(pb_utils.Tensor.from_dlpack("u", given.to_dlpack()).as_numpy(), array)
    with pytest.raises(pb_utils.TritonModelException, match="not contiguous"):
        pb_utils.Tensor.from_dlpack("t", np.arange(6.0).reshape(2, 3).T)


def test_types_have_their_names_and_numbers() -> None:
    assert pb_utils.triton_string_to_numpy("TYPE_STRING") is np.object_
    assert pb_utils.triton_string_to_numpy("TYPE_FP16") is np.float16
    assert pb_utils.triton_to_numpy_type(pb_utils.numpy_to_triton_type(np.int8)) is np.int8
    with pytest.raises(KeyError):
        pb_utils.triton_string_to_numpy("TYPE_BF16")


def test_what_is_not_there_says_so() -> None:
    with pytest.raises(AttributeError, match="pb_utils.TRITONSERVER_TELEPORT is not supported by this server"):
        pb_utils.TRITONSERVER_TELEPORT  # noqa: B018
    with pytest.raises(pb_utils.TritonModelException, match="only the code of a model that the server runs"):
        pb_utils.InferenceRequest(model_name="m").exec()
    with pytest.raises(pb_utils.TritonModelException, match="CPU's memory"):
        pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_GPU, 0)
    with pytest.raises(pb_utils.TritonModelException, match="only requests that execute was given"):
        pb_utils.InferenceRequest().set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)


def test_a_configuration_is_completed_and_not_contradicted() -> None:
    given = {"max_batch_size": 4, "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}], "output": []}
    config = pb_utils.ModelConfig(json.dumps(given))
    config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": (4,), "optional": True})
    config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    found = config.as_dict()
    assert found["input"][0]["optional"] and found["max_batch_size"] == 8 and found["dynamic_batching"] == {}
    assert pb_utils.get_output_config_by_name(found, "y")["dims"] == [-1]
    assert pb_utils.get_input_config_by_name(found, "z") is None
    for wrong in (
        lambda: config.add_input({"name": "x", "data_type": "TYPE_INT8", "dims": [4]}),
        lambda: config.add_output({"name": "y", "dims": [4]}),
        lambda: config.set_max_batch_size(2),
        lambda: config.set_model_transaction_policy({"coupled": True}),
    ):
        with pytest.raises(pb_utils.TritonModelException):
            wrong()
    assert not pb_utils.using_decoupled_model_transaction_policy(config.as_dict())
    config.set_model_transaction_policy({"decoupled": True})
    assert pb_utils.using_decoupled_model_transaction_policy(config.as_dict())


class Asked:
    """A runtime that keeps what is asked of it, and where the answer goes."""

    executing = True

    def ask(self, make: Callable[[int], Infer], body: Any, inbox: Any) -> int:
        self.asked, self.inbox = make(1), inbox
        return 1


def test_names_and_texts_may_be_bytes_as_tensors_of_text_have_them() -> None:
    """Bytes as the name of a model ended the process of the model that called it."""
    asking = pb_utils.InferenceRequest(
        model_name=b"target", request_id=b"id", requested_output_names=[b"y"], parameters={b"a": np.int64(3), "b": b"c"}
    )
    assert (asking.model_name(), asking.request_id(), asking.requested_output_names()) == ("target", "id", ["y"])
    assert json.loads(asking.parameters()) == {"a": 3, "b": "c"}
    response = pb_utils.InferenceResponse([pb_utils.Tensor(b"y", np.ones(1, np.float32))])
    assert pb_utils.get_output_tensor_by_name(response, b"y") is response.output_tensors()[0]
    for wrong in ({"model_name": 5}, {"model_name": b"\xff"}, {"timeout": "soon"}, {"requested_output_names": "y"}):
        with pytest.raises(pb_utils.TritonModelException, match=next(iter(wrong))):
            pb_utils.InferenceRequest(**wrong)


def test_an_answer_to_a_closed_event_loop_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the thread that all later answers, and all cancellations, come through."""
    runtime = Asked()
    monkeypatch.setattr(runtime_module, "_current", runtime)

    async def give_up() -> None:
        asking = asyncio.create_task(pb_utils.InferenceRequest(model_name="m").async_exec())
        await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(give_up())
    runtime.inbox(Inferred(1, ResultHead(), True), memoryview(b""))
    assert runtime.asked.model == "m"


def test_texts_are_written_behind_their_lengths() -> None:
    array = np.array([[b"hi", "\u00fc"], [b"", 7]], dtype=object)
    written = pb_utils.serialize_byte_tensor(array)
    assert written == b"\2\0\0\0hi\2\0\0\0\xc3\xbc\0\0\0\0\1\0\0\0" + b"7"
    for given in (written, np.frombuffer(written, np.uint8), memoryview(written)):
        assert pb_utils.deserialize_bytes_tensor(given).tolist() == [b"hi", "\u00fc".encode(), b"", b"7"]
    assert pb_utils.serialize_byte_tensor(np.array([], object)) == b""
    for wrong in (b"\1", b"\5\0\0\0hi"):
        with pytest.raises(pb_utils.TritonModelException, match="deserialize_bytes_tensor: .* for inference data"):
            pb_utils.deserialize_bytes_tensor(wrong)
    with pytest.raises(pb_utils.TritonModelException, match="serialize_byte_tensor"):
        pb_utils.serialize_byte_tensor(np.ones(3, np.float32))
