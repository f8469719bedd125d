from typing import Any

import numpy as np
import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import grpc
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor, tensor
from oriel_wire.v2.proto import v2_pb2

Input = v2_pb2.ModelInferRequest.InferInputTensor
Contents = v2_pb2.InferTensorContents


def request(*inputs: Input, raw: tuple[bytes, ...] = (), **members: Any) -> v2_pb2.ModelInferRequest:
    return v2_pb2.ModelInferRequest(model_name="m", inputs=inputs, raw_input_contents=raw, **members)


def x(datatype: str = "FP32", shape: tuple[int, ...] = (2,), **contents: Any) -> Input:
    return Input(name="x", datatype=datatype, shape=shape, contents=Contents(**contents) if contents else None)


@pytest.mark.parametrize(
    ("datatype", "contents", "dtype"),
    [
        ("BOOL", {"bool_contents": [True, False]}, np.bool_),
        ("INT8", {"int_contents": [-128, 127]}, np.int8),
        ("INT16", {"int_contents": [-(2**15), 2**15 - 1]}, np.int16),
        ("INT32", {"int_contents": [-(2**31), 2**31 - 1]}, np.int32),
        ("INT64", {"int64_contents": [-(2**63), 2**63 - 1]}, np.int64),
        ("UINT8", {"uint_contents": [0, 255]}, np.uint8),
        ("UINT16", {"uint_contents": [0, 2**16 - 1]}, np.uint16),
        ("UINT32", {"uint_contents": [0, 2**32 - 1]}, np.uint32),
        ("UINT64", {"uint64_contents": [0, 2**64 - 1]}, np.uint64),
        ("FP32", {"fp32_contents": [1.5, float("inf")]}, np.float32),
        ("FP64", {"fp64_contents": [1e300, -0.0]}, np.float64),
        ("BYTES", {"bytes_contents": [b"\xff\x00", b""]}, np.object_),
    ],
)
def test_typed_contents(datatype: str, contents: dict[str, list[Any]], dtype: type) -> None:
    [got] = grpc.decode_infer(request(x(datatype, (2, 1), **contents))).inputs
    assert got.array.dtype == dtype
    assert got.array.shape == got.shape == (2, 1)
    [values] = contents.values()
    assert got.array.reshape(-1).tolist() == values
    answer = v2_pb2.ModelInferResponse(
        model_name="m", outputs=[{"name": "x", "datatype": datatype, "shape": [2], "contents": Contents(**contents)}]
    )
    assert grpc.decode_infer_response(answer).outputs[0].array.tolist() == values


@pytest.mark.parametrize("count", [1, 31, 32, 4095, 4096, 600_000])
@pytest.mark.parametrize("field", ["bool_contents", "fp32_contents", "fp64_contents"])
def test_typed_contents_of_fixed_width_of_any_length(field: str, count: int) -> None:
    """What nobody knows, between and behind the numbers, changes nothing."""
    values = np.arange(count) % 7
    datatype, values = {
        "bool_contents": ("BOOL", values % 2 == 0),
        "fp32_contents": ("FP32", values.astype(np.float32) + 0.5),
        "fp64_contents": ("FP64", values.astype(np.float64) + 0.5),
    }[field]
    message = v2_pb2.ModelInferRequest(model_name="m")
    each = message.inputs.add(name="x", datatype=datatype, shape=[count])
    getattr(each.contents, field).extend(values[: count // 2].tolist())
    unknown = b"\xf8\x07\x01"
    rest = v2_pb2.InferTensorContents(**{field: values[count // 2 :].tolist()})
    each.contents.MergeFromString(unknown + rest.SerializeToString() + unknown)
    [got] = grpc.decode_infer(message).inputs
    assert got.array.dtype == values.dtype and np.array_equal(got.array, values)


def test_raw_contents_are_views() -> None:
    data = np.arange(2, dtype=np.float32).tobytes()
    [got] = grpc.decode_infer(request(x(), raw=(data,))).inputs
    assert got.array.tolist() == [0, 1]
    assert got.array.base is not None
    assert got.array.flags.aligned


def test_an_output_requested_twice_is_one_output() -> None:
    found = grpc.decode_infer(request(x(), raw=(b"12345678",), outputs=[{"name": "y"}, {"name": "z"}, {"name": "y"}]))
    assert [output.name for output in found.outputs or ()] == ["y", "z"]


def test_outputs_and_parameters() -> None:
    message = request(parameters={"timeout": {"uint64_param": 2**63}})
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    message.outputs.add(name="a").parameters["classification"].int64_param = 3
    message.outputs.add(name="b").parameters["own"].string_param = "kept"
    got = grpc.decode_infer(message)
    assert got.parameters == {"timeout": 2**63, "triton_enable_empty_final_response": True}
    assert got.outputs == [RequestedOutput("a", True, 3), RequestedOutput("b", True, 0, {"own": "kept"})]
    assert grpc.decode_infer(request()).outputs is None


CONTENTS = "contents field must not be specified when using raw_input_contents for 'x' for model 'm'"


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        (request(x()), "shape [2] has 2 elements, fp32_contents holds 0"),
        (request(x(shape=(2**31, 2**31), fp32_contents=[1])), "larger than any tensor can be"),
        (request(x(shape=(-1, -2), fp32_contents=[1, 2])), "negative dimension"),
        (request(x(shape=(1,) * 33, fp32_contents=[1])), "33 dimensions"),
        (request(x(int_contents=[1, 2])), "FP32 values belong in fp32_contents, found int_contents"),
        (request(x("FP16", fp32_contents=[1, 2])), "FP16 has no typed contents, send it as raw contents"),
        (request(x("INT8", int_contents=[0, 128])), "int_contents has a value outside INT8 (-128 to 127)"),
        (request(x("FP8")), "datatype 'FP8' is not one of"),
        (request(x(fp32_contents=[1, 2]), raw=(b"12345678",)), CONTENTS),
        (request(x(fp32_contents=[1, 2]), x(), raw=(b"12345678",)), CONTENTS),
        (request(x(), x(), raw=(b"12345678",)), "unable to find data for input tensor 'x' for model 'm' in request."),
        (request(x(), raw=(b"1234567",)), "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7"),
        (request(x(), raw=(b"12345678", b"")), "1 inputs have 2 raw contents"),
        (request(x(), x(), raw=(b"12345678", b"12345678")), "input 'x' for model 'm' is given more than once"),
        (
            request(x("BYTES", (1,)), raw=(b"\x05\0\0\0abcd",)),
            "expecting string of length 5 but only 4 bytes available",
        ),
        (request(parameters={"a": {}}), "parameter 'a' has no value"),
        (request(parameters={"triton_x": {"bool_param": True}}), "names that start with triton_ are reserved"),
        (request(outputs=[{"name": "y", "parameters": {"classification": {"bool_param": True}}}]), "number of classes"),
        (
            request(Input(name="x", datatype="FP32", parameters={"shared_memory_region": {"string_param": "r"}})),
            "shared memory is not supported",
        ),
    ],
)
def test_message_is_refused(message: v2_pb2.ModelInferRequest, hint: str) -> None:
    with pytest.raises(BadMessage) as caught:
        grpc.decode_infer(message)
    assert hint in caught.value.message
    assert len(caught.value.message) <= 500


def test_empty_tensors_travel_typed_and_raw() -> None:
    assert grpc.decode_infer(request(x(shape=(0, 3)))).inputs[0].shape == (0, 3)
    assert grpc.decode_infer(request(x(shape=(0, 3)), raw=(b"",))).inputs[0].array.shape == (0, 3)


def test_wrong_arrays_are_not_sent() -> None:
    wrong = Tensor("x", "FP32", (1,), np.zeros(1))
    with pytest.raises(BadMessage, match="FP32 needs an array of float32, not float64"):
        grpc.encode_infer_request(InferRequest(model_name="m", inputs=[wrong]))
    with pytest.raises(BadMessage, match="output 'x'"):
        grpc.encode_infer(InferResponse(model_name="m", outputs=[wrong]))


def test_parameters_beyond_64_bits_are_not_sent() -> None:
    for value in (2**64, -(2**63) - 1):
        with pytest.raises(BadMessage, match="does not fit in 64 bits"):
            grpc.encode_infer(InferResponse(model_name="m", parameters={"p": value}))


def test_response_is_raw() -> None:
    message = grpc.encode_infer(InferResponse(model_name="m", outputs=[tensor("y", np.float32([1, 2]))]))
    assert not message.outputs[0].HasField("contents")
    assert list(message.raw_output_contents) == [np.float32([1, 2]).tobytes()]
