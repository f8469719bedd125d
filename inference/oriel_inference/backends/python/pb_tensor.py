"""`pb_utils.Tensor`, and the names of the datatypes in both directions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from oriel_inference.backends.python.frames import Part
from oriel_inference.backends.python.pb_errors import TritonModelException, checked_text
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import DATATYPES, deserialize_bytes, name_of, serialize_bytes
from oriel_wire.v2.messages import Array

# In the order of their numbers, from 1. BF16 (14) has no numpy type.
_NAMES = "BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 BYTES BF16".split()
_WIRE = {entry.dtype: name for name, entry in DATATYPES.items() if name not in ("BYTES", "BF16")}
_NUMBERS = {name: number for number, name in enumerate(_NAMES, 1)}
TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    DATATYPES[name].config_name: np.object_ if name == "BYTES" else DATATYPES[name].dtype.type
    for name in _NAMES
    if name != "BF16"
}


class Tensor:
    """A name and an array. Arrays of text must have dtype object (`np.object_`): bytes, or anything that `str`
    accepts.
    """

    def __init__(self, name: str, numpy_array: Array) -> None:
        name = checked_text(name, "the name of a Tensor")
        numpy_array = np.asarray(numpy_array)  # also turns a subclass into a plain array
        self._datatype = _WIRE.get(numpy_array.dtype) or _datatype(numpy_array, name)
        self._name = name
        self._array = numpy_array

    @classmethod
    def received(cls, part: Part) -> "Tensor":
        """Create a tensor from a frame; not one of the documented names."""
        tensor = cls.__new__(cls)
        tensor._name, tensor._datatype, tensor._array = part
        return tensor

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Array:
        """Return the array itself. numpy has no BF16, so tensors of that type raise, and `to_dlpack` is no way around
        it.
        """
        if self._datatype == "BF16" and self._array.dtype.name != "bfloat16":
            raise TritonModelException(f"tensor {self._name!r} is BF16, which numpy does not have")
        return self._array

    def triton_dtype(self) -> int:
        return _NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """Export the tensor to other frameworks without a copy. Not for text and BF16."""
        return self._exported(lambda array: array.__dlpack__())

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """Create a tensor from a DLPack object or capsule on the CPU."""
        if not hasattr(tensor, "__dlpack__"):
            tensor = _Capsule(tensor)
        try:
            array = np.from_dlpack(tensor)
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
            raise TritonModelException(f"tensor {name!r} cannot be taken from DLPack: {error}") from error
        if not array.flags.c_contiguous:
            raise TritonModelException(f"tensor {name!r} is not contiguous in C order")
        return Tensor(name, array)

    def __dlpack__(self, **options: Any) -> Any:
        return self._exported(lambda array: array.__dlpack__(**options))

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def part(self) -> Part:
        """Return the tensor for a frame; not one of the documented names."""
        array = self._array
        if self._datatype == "BYTES":
            if array.dtype.kind != "O":
                array = array.astype(object)
            if any(type(element) is not bytes for element in array.flat):
                array = _as_bytes(array)
        elif self._datatype == "BF16":
            array = array.view(np.uint16)
        elif array.dtype not in _WIRE:
            array = array.astype(DATATYPES[self._datatype].dtype)
        return self._name, self._datatype, array

    def _exported(self, export: Callable[[Array], Any]) -> Any:
        if self._datatype in ("BYTES", "BF16"):
            raise TritonModelException(
                f"tensor {self._name!r} is {self._datatype}, which cannot be exported with DLPack here"
            )
        return export(self._array)


def _datatype(array: Array, name: str) -> str:
    """Return the datatype of an array that is not in the wire format yet."""
    if array.dtype.kind in "UV" and array.dtype.name != "bfloat16":
        raise TritonModelException(
            f"tensor {name!r}: arrays of {array.dtype} are not supported, use dtype np.object_ for text"
        )
    try:
        return name_of(array.dtype)
    except BadMessage as error:
        raise TritonModelException(f"tensor {name!r}: {error.message}") from error


class _Capsule:
    """The methods that numpy needs around a capsule of CPU memory."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _as_bytes(array: Array) -> Array:
    texts = np.empty(array.size, dtype=object)
    texts[:] = [each if type(each) is bytes else str(each).encode() for each in array.flat]
    return texts.reshape(array.shape)


def serialize_byte_tensor(input_tensor: Array) -> bytes:
    """Return the texts of an array in row-major order, each behind its length in 4 bytes."""
    try:
        return serialize_bytes(Tensor("", np.asarray(input_tensor)).part()[2], "the array")
    except BadMessage as error:
        raise TritonModelException(f"serialize_byte_tensor: {error.message}") from error


def deserialize_bytes_tensor(encoded_tensor: Any) -> Array:
    """Return what `serialize_byte_tensor` has written, given as bytes or as an array of them: an array of bytes [n]."""
    data = bytes(encoded_tensor)
    at = count = 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    try:
        return deserialize_bytes(data, count, "data")
    except BadMessage as error:
        raise TritonModelException(f"deserialize_bytes_tensor: {error.message}") from error


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """Convert a name: TYPE_FP32 -> np.float32. Raises KeyError for others, TYPE_BF16 included."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """Convert a number: 11 -> np.float32."""
    return TRITON_STRING_TO_NUMPY[DATATYPES[_NAMES[data_type - 1]].config_name]


def numpy_to_triton_type(data_type: Any) -> int:
    """Convert a type: np.float32 -> 11."""
    return _NUMBERS[name_of(np.dtype(data_type))]
