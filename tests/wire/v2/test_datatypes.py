import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import datatypes
from oriel_wire.v2.messages import tensor
from oriel_wire.v2.proto import model_config_pb2


def test_every_configuration_datatype_has_a_v2_name() -> None:
    named = {name for name in model_config_pb2.DataType.keys() if name != "TYPE_INVALID"}
    assert {entry.config_name for entry in datatypes.DATATYPES.values()} == named
    for name in datatypes.DATATYPES:
        assert datatypes.from_config_name(datatypes.to_config_name(name)) == name


def test_sizes() -> None:
    assert {name: entry.size for name, entry in datatypes.DATATYPES.items()} == {
        "BOOL": 1,
        "UINT8": 1,
        "UINT16": 2,
        "UINT32": 4,
        "UINT64": 8,
        "INT8": 1,
        "INT16": 2,
        "INT32": 4,
        "INT64": 8,
        "FP16": 2,
        "FP32": 4,
        "FP64": 8,
        "BF16": 2,
        "BYTES": 0,
    }


def test_names_of_dtypes() -> None:
    for name, entry in datatypes.DATATYPES.items():
        assert datatypes.name_of(entry.dtype) == ("UINT16" if name == "BF16" else name)
    with pytest.raises(BadMessage, match="complex128 have no v2 datatype"):
        datatypes.name_of(np.dtype(complex))
    with pytest.raises(BadMessage, match="TYPE_INVALID"):
        datatypes.from_config_name("TYPE_INVALID")


@given(st.lists(st.binary(max_size=9)))
def test_bytes_elements_survive(elements: list[bytes]) -> None:
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    wire = datatypes.serialize_bytes(array, "t")
    assert datatypes.deserialize_bytes(wire, len(elements), "t").tolist() == elements


@given(st.binary(max_size=64), st.integers(0, 70))
def test_any_bytes_are_elements_or_refused(data: bytes, count: int) -> None:
    try:
        elements = datatypes.deserialize_bytes(data, count, "t").tolist()
    except BadMessage:
        return
    assert b"".join(len(each).to_bytes(4, "little") + each for each in elements) == data


@given(st.lists(st.integers(0, 2**70), max_size=34))
def test_element_count_is_exact_or_refused(shape: list[int]) -> None:
    try:
        count = datatypes.element_count(shape, "t")
    except BadMessage:
        return
    assert np.broadcast_to(np.zeros((), np.uint8), shape).size == count


def test_tensor_takes_the_datatype_of_its_array() -> None:
    assert tensor("t", np.zeros(1, np.float16)).datatype == "FP16"
    assert tensor("t", [1.5, 2], "FP32").array.dtype == np.float32
    assert tensor("t", np.zeros(1, ">f4")).array.dtype == np.dtype("<f4")
    text = tensor("t", np.array([["a", "\u00e9"]]))
    assert (text.datatype, text.shape, text.array.tolist()) == ("BYTES", (1, 2), [[b"a", "\u00e9".encode()]])
    assert tensor("t", [b"a\x00"]).array.tolist() == [b"a\x00"]


@pytest.mark.parametrize(
    ("array", "datatype", "hint"),
    [
        (np.zeros(1), "FP32", "FP32 needs an array of float32, not float64"),
        (np.zeros(1), "BF16", "BF16 needs an array of uint16"),
        (np.zeros(1, complex), "", "no v2 datatype"),
        ([300], "INT8", "its values are not INT8"),
        (["a"], "FP32", "its values are not FP32"),
        ([[1], [1, 2]], "", "its values are not an array"),
        ([1], "FP31", "'FP31' is not one of"),
        (np.array([object()]), "", "element 0 is neither"),
        (np.array(["\ud800"], dtype=object), "", "not valid Unicode"),
    ],
)
def test_tensor_refuses_what_the_wire_cannot_say(array: object, datatype: str, hint: str) -> None:
    with pytest.raises(BadMessage, match=hint):
        tensor("t", array, datatype)  # type: ignore[arg-type]
