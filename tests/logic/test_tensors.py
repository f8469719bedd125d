import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oriel_logic.client.models import ModelSpec, TensorSpec
from oriel_logic.client.tensors import check_inputs, parse_metadata
from oriel_logic.errors import ModelFailed, ModelInputWrong


def spec(*inputs: tuple[str, str, tuple[int, ...]]) -> ModelSpec:
    return ModelSpec(name="m", inputs={each[0]: TensorSpec(*each) for each in inputs}, outputs={})


IMAGE = spec(("image", "FP32", (-1, 64)))


def test_what_fits_is_passed_on_uncopied() -> None:
    array = np.zeros((3, 64), np.float32)
    (tensor,) = check_inputs(IMAGE, {"image": array})
    assert (tensor.name, tensor.datatype, tensor.shape) == ("image", "FP32", (3, 64))
    assert np.shares_memory(tensor.array, array)


def test_lists_and_text_take_the_models_datatype() -> None:
    found = check_inputs(spec(("a", "INT64", (-1,)), ("b", "BYTES", (1,))), {"a": [1, 2], "b": ["text"]})
    assert found[0].array.dtype == np.int64
    assert list(found[1].array) == [b"text"]


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, r"model 'm' needs inputs: 'image' FP32 \[-1, 64\]"),
        ({"img": np.zeros((1, 64))}, r"model 'm' has no input 'img': it has 'image' FP32 \[-1, 64\]"),
        (
            {"image": np.zeros((1, 64))},
            r"input 'image' of model 'm' takes FP32, the array is float64: use .astype\(np.float32\)",
        ),
        (
            {"image": np.zeros(64, np.float32)},
            r"takes shape \[-1, 64\] \(-1: any\), the array has \[64\]; .* array\[np.newaxis\]",
        ),
        ({"image": np.zeros((2, 63), np.float32)}, r"the array has \[2, 63\]$"),
        ({"image": "text"}, "input 'image' of model 'm' takes FP32 values"),
        ({"image": [[1, 2], [3]]}, "input 'image' of model 'm' takes FP32 values"),
        ({"image": np.zeros((1, 64), np.complex64)}, "takes FP32, the array is complex64"),
    ],
)
def test_what_does_not_fit_is_named(inputs: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelInputWrong, match=sentence):
        check_inputs(IMAGE, inputs)  # type: ignore[arg-type]


def test_bf16_is_its_bits() -> None:
    assert check_inputs(spec(("a", "BF16", (2,))), {"a": np.zeros(2, np.uint16)})[0].datatype == "BF16"
    with pytest.raises(ModelInputWrong):
        check_inputs(spec(("a", "BF16", (2,))), {"a": np.zeros(2, np.float32)})


def test_foreign_byte_order_is_put_right() -> None:
    (tensor,) = check_inputs(spec(("a", "INT32", (2,))), {"a": np.array([1, 2], ">i4")})
    assert tensor.array.tolist() == [1, 2]


@given(hnp.arrays(dtype=hnp.scalar_dtypes(), shape=hnp.array_shapes(max_dims=3, max_side=3)), st.data())
def test_an_array_either_fits_exactly_or_is_refused(array: np.ndarray, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.sampled_from([-1, size, size + 1])) for size in array.shape)
    datatype = data.draw(st.sampled_from(["FP32", "INT64", "BOOL", "UINT8", "BYTES"]))
    try:
        (tensor,) = check_inputs(spec(("a", datatype, shape)), {"a": array})
    except ModelInputWrong as error:
        assert "input 'a' of model 'm'" in error.message
        return
    assert tensor.shape == array.shape and all(w in (-1, g) for w, g in zip(shape, array.shape, strict=True))
    assert tensor.datatype == datatype


def test_metadata_is_read_or_refused() -> None:
    tensors = [{"name": "x", "datatype": "FP32", "shape": [-1], "extra": 1}]
    body = msgspec.json.encode({"name": "m", "versions": ["1"], "platform": "", "inputs": tensors, "outputs": []})
    assert parse_metadata("m", body).inputs["x"].shape == (-1,)
    for broken in (b"", b"{}", b'{"name": 1}', b"\xff"):
        with pytest.raises(ModelFailed):
            parse_metadata("m", broken)


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("FP32", [1e39]),
        ("FP32", [np.float64(-1e39)]),
        ("FP16", [70000]),
        ("FP32", [1.0, None]),
        ("FP32", ["1.5"]),
        ("INT64", [1.5]),
        ("INT32", [2**31]),
        ("INT64", [2**64]),
        ("INT64", [float("nan")]),
        ("UINT8", [-1]),
        ("UINT8", [np.int64(256)]),
        ("BOOL", [2]),
    ],
)
def test_no_list_becomes_other_numbers(datatype: str, value: list[float]) -> None:
    with pytest.raises(ModelInputWrong, match=f"input 'a' of model 'm' takes {datatype} values"):
        check_inputs(spec(("a", datatype, (-1,))), {"a": value})


@pytest.mark.parametrize(
    ("datatype", "value", "wanted"),
    [
        ("FP32", [0.1, 1], [np.float32(0.1), 1]),
        ("FP32", [float("inf"), True], [np.inf, 1]),
        ("INT64", [1.0, True], [1, 1]),
        ("UINT64", [1, 2**64 - 1], [1, 2**64 - 1]),
        ("BOOL", [0, 1.0], [False, True]),
        ("INT32", [], []),
    ],
)
def test_lists_that_mean_the_same_numbers_are_taken(datatype: str, value: list[float], wanted: list[float]) -> None:
    (found,) = check_inputs(spec(("a", datatype, (-1,))), {"a": value})
    assert found.array.tolist() == wanted
