"""Arrays against a model's metadata: what fits, and a sentence that names the tensor if it does not."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from oriel_logic.errors import ModelFailed, ModelInputWrong
from oriel_logic.models import ArrayLike, ModelSpec, TensorSpec
from oriel_logic.narrowing import numbers_as
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import DATATYPES, name_of
from oriel_wire.v2.messages import Tensor, tensor

__all__ = ["check_inputs", "check_outputs", "parse_metadata"]


class Metadata(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def parse_metadata(model: str, body: bytes) -> ModelSpec:
    """`GET /v2/models/<model>` as a spec. Raises ModelFailed if it is none."""
    try:
        found = msgspec.json.decode(body, type=Metadata)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelFailed(f"the inference server's metadata of model '{model}' cannot be read") from error
    return ModelSpec(
        name=model,
        inputs={each.name: each for each in found.inputs},
        outputs={each.name: each for each in found.outputs},
    )


def check_inputs(spec: ModelSpec, inputs: Mapping[str, ArrayLike]) -> list[Tensor]:
    """`inputs` as tensors for the wire. Arrays are never cast; plain lists and numbers take the model's dtype.

    Inputs that are not given are left to the server: a model may have optional ones.
    Raises ModelInputWrong.
    """
    if not inputs:
        raise ModelInputWrong(f"model '{spec.name}' needs inputs: {listed(spec.inputs)}")
    return [check_input(spec, name, value) for name, value in inputs.items()]


def check_input(spec: ModelSpec, name: str, value: ArrayLike) -> Tensor:
    what = f"input '{name}' of model '{spec.name}'"
    expected = spec.inputs.get(name)
    if expected is None:
        raise ModelInputWrong(f"model '{spec.name}' has no input '{name}': it has {listed(spec.inputs)}")
    if expected.datatype not in DATATYPES:
        raise ModelFailed(f"{what} has datatype {expected.datatype}, which this server does not know")
    array = value if isinstance(value, np.ndarray | np.generic) else converted(what, expected, value)
    array = np.asarray(array)
    if array.dtype.name == "bfloat16":
        array = array.view(np.uint16)
    check_dtype(what, expected, array)
    check_shape(what, expected, array)
    try:
        return tensor(name, array.astype(array.dtype.newbyteorder("="), copy=False), expected.datatype)
    except BadMessage as error:
        raise ModelInputWrong(f"{what}: {error.message}") from error


def converted(what: str, expected: TensorSpec, value: Any) -> np.ndarray[Any, Any]:
    """Raises ModelInputWrong, also for numbers that would become others (narrowing.py says which)."""
    dtype = DATATYPES[expected.datatype].dtype
    try:
        return np.asarray(value, dtype=dtype) if expected.datatype == "BYTES" else numbers_as(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelInputWrong(f"{what} takes {expected.datatype} values, the given ones are not: {error}") from error


def check_dtype(what: str, expected: TensorSpec, array: np.ndarray[Any, Any]) -> None:
    wanted = DATATYPES[expected.datatype].dtype
    if expected.datatype == "BF16":
        fits = array.dtype == np.uint16
    else:
        try:
            fits = name_of(array.dtype) == expected.datatype
        except BadMessage:
            fits = False
    if not fits:
        mend = "" if expected.datatype == "BYTES" else f": use .astype(np.{wanted.name})"
        raise ModelInputWrong(f"{what} takes {expected.datatype}, the array is {array.dtype.name}{mend}")


def check_shape(what: str, expected: TensorSpec, array: np.ndarray[Any, Any]) -> None:
    wanted, given = expected.shape, array.shape
    if len(wanted) == len(given) and all(w in (-1, g) for w, g in zip(wanted, given, strict=True)):
        return
    mend = ""
    if len(given) == len(wanted) - 1 and wanted[0] == -1:
        mend = "; the batch axis is missing: use array[np.newaxis]"
    raise ModelInputWrong(f"{what} takes shape {list(wanted)} (-1: any), the array has {list(given)}{mend}")


def listed(tensors: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"'{each.name}' {each.datatype} {list(each.shape)}" for each in tensors.values()) or "none"


def check_outputs(spec: ModelSpec, outputs: Mapping[str, ArrayLike]) -> dict[str, np.ndarray[Any, Any]]:
    """What stands in for a model's answer, by the same rules as inputs. Raises ValueError: the stand-in is wrong."""
    turned = ModelSpec(name=spec.name, inputs=spec.outputs, outputs=spec.outputs)
    try:
        return {each.name: each.array for each in check_inputs(turned, outputs)}
    except ModelInputWrong as error:
        raise ValueError(error.message.replace("input '", "output '").replace(" takes ", " gives ")) from error
