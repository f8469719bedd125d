import pytest

from oriel_inference.backends import TensorInfo
from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.config import parse
from oriel_inference.repository.spec import check_against_file

SCALAR = (TensorInfo(name="x", datatype="FP32", shape=()),)


@pytest.mark.parametrize("dims", ["[ 1 ]", "[ 1, 1 ]"])
def test_a_tensor_without_dimensions_may_have_dims_of_one(dims: str) -> None:
    config = parse(f'input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}', "m/config.pbtxt")
    check_against_file(config, SCALAR, (), "m/config.pbtxt")
    assert config.input[0].HasField("reshape") and list(config.input[0].reshape.shape) == []


@pytest.mark.parametrize(("dims", "rows"), [("[ 2 ]", 0), ("[ -1 ]", 0), ("[ 1 ]", 4)])
def test_a_tensor_without_dimensions_has_neither_several_elements_nor_rows(dims: str, rows: int) -> None:
    text = f'max_batch_size: {rows} input {{ name: "x" data_type: TYPE_FP32 dims: {dims} }}'
    with pytest.raises(ConfigInvalid, match="does not fit the model file's"):
        check_against_file(parse(text, "m/config.pbtxt"), SCALAR, (), "m/config.pbtxt")
