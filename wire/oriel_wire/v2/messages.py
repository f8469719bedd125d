"""The values of one inference, which every v2 transport decodes to and encodes from."""

from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import (
    Datatype,
    decode_raw,
    element_count,
    lookup,
    name_of,
    quoted,
    to_bytes_array,
    wrong_size,
)

Array = NDArray[Any]
# More would block the loop, and no model needs more.
MAX_TENSORS = 1024
MAX_PARAMETERS = 1024
ParameterValue = bool | int | float | str


class Tensor(msgspec.Struct, gc=False):
    """A named array.

    `array` has `shape` and the dtype that `datatypes.DATATYPES[datatype]` names: BYTES is an object
    array of `bytes`, BF16 a uint16 array of its bits. Decoded binary tensors are read-only views of the
    body they came in; such a view is not always aligned (`array.flags.aligned`), so copy it before handing
    its address to a runtime. `parameters` are the tensor's own, without those of the transport.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    array: Array
    parameters: dict[str, ParameterValue] = {}


class SharedBytes(msgspec.Struct, frozen=True, gc=False):
    """The bytes of one tensor in shared memory. region: registered name. offset: in bytes from the region's start."""

    region: str
    offset: int
    size_bytes: int


# Returns a copy of such bytes. Raises BadMessage or an error of the server's own.
ReadShared = Callable[[SharedBytes], bytes | memoryview]


class RequestedOutput(msgspec.Struct, gc=False):
    """An output that the client requests. classification: number of top classes to return; 0 for the tensor. shared:
    the place in shared memory where the client wants it; None for the answer. kept: a server's regions, which live as
    long as the output is wanted.
    """

    name: str
    binary: bool = False
    classification: int = 0
    parameters: dict[str, ParameterValue] = {}
    shared: SharedBytes | None = None
    kept: object = None


class InferRequest(msgspec.Struct, kw_only=True, gc=False):
    """An inference request. outputs: requested outputs; None for all. binary_default: True if HTTP sends outputs that
    it does not name as binary data.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: dict[str, ParameterValue] = {}
    inputs: list[Tensor] = []
    outputs: list[RequestedOutput] | None = None
    binary_default: bool = False


class InferResponse(msgspec.Struct, kw_only=True, gc=False):
    """The answer of an inference. in_shared_memory: names of outputs that are described without their data."""

    model_name: str
    model_version: str = ""
    id: str = ""
    parameters: dict[str, ParameterValue] = {}
    outputs: list[Tensor] = []
    in_shared_memory: Collection[str] = ()


def tensor(name: str, array: Array | Sequence[Any], datatype: str = "") -> Tensor:
    """A tensor around `array`; the datatype follows from its dtype unless given.

    Lists take the dtype of the datatype given, arrays must have it (BF16: uint16 bits or an ml_dtypes array).
    Text and bytes become BYTES (text as UTF-8). Raises BadMessage for anything else.
    """
    what = f"tensor {quoted(name)}"
    if not isinstance(array, np.ndarray):
        kind = lookup(datatype, what).dtype if datatype and datatype != "BF16" else None
        try:
            values = np.array(array, dtype=kind)
            # numpy's own byte strings lose trailing zero bytes
            array = np.array(array, dtype=object) if values.dtype.kind in "SU" else values
        except (ValueError, TypeError, OverflowError) as error:
            raise BadMessage(f"{what}: its values are not {datatype or 'an array'}: {str(error)[:160]}") from error
    datatype = datatype or name_of(array.dtype)
    entry = lookup(datatype, what)
    if datatype == "BYTES":
        array = to_bytes_array(array, what)
    elif datatype == "BF16" and array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    elif array.dtype.newbyteorder("<") != entry.dtype:
        raise BadMessage(f"{what}: {datatype} needs an array of {entry.dtype.name}, not {array.dtype}")
    else:
        array = array.astype(entry.dtype, copy=False)
    return Tensor(name, datatype, array.shape, array)


def too_many(found: Sized, limit: int, what: str) -> BadMessage:
    """The refusal of more than `limit`; what: "request: parameters"."""
    return BadMessage(f"{what}: {len(found)} are given, at most {limit} are accepted")


def take_classes(parameters: dict[str, ParameterValue], what: str) -> int:
    """Remove `classification` from an output's parameters and return it (0 if absent). Raises BadMessage."""
    classes = parameters.pop("classification", 0)
    if type(classes) is not int or not 0 <= classes < 2**31:
        raise BadMessage(f"{what}: classification must be the number of classes wanted")
    return classes


def take_shared(
    parameters: dict[str, ParameterValue], what: str, *, allowed: bool, classes: int = 0
) -> SharedBytes | None:
    """Remove the parameters of shared memory from a tensor's, and return the bytes they name; None if there are none.

    allowed: False refuses them. classes: number of top classes to return of an output. Raises BadMessage.
    """
    region = parameters.pop("shared_memory_region", None)
    if region is None:
        return None
    size, offset = parameters.pop("shared_memory_byte_size", None), parameters.pop("shared_memory_offset", 0)
    if not allowed:
        raise BadMessage(f"{what}: shared memory is not supported, exchange the data in request and answer")
    if classes:
        raise BadMessage(f"{what}: classes are not written to shared memory, leave out one of the two")
    if type(region) is not str or type(size) is not int or type(offset) is not int or size < 0 or offset < 0:
        raise BadMessage(
            f"{what}: shared_memory_region must be a name, shared_memory_byte_size and shared_memory_offset whole "
            "numbers of bytes"
        )
    return SharedBytes(region, offset, size)


def shared_array(
    shared: SharedBytes, read: ReadShared | None, entry: Datatype, shape: tuple[int, ...], what: str
) -> Array:
    """Copy an input from shared memory. read: None if `take_shared` has refused it. Raises BadMessage."""
    assert read is not None
    if entry.size and (needed := element_count(shape, what) * entry.size) != shared.size_bytes:
        raise wrong_size(what, needed, shared.size_bytes)
    return decode_raw(read(shared), 0, shared.size_bytes, entry, shape, what)
