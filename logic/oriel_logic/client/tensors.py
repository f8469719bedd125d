"""Checks arrays against a model's metadata, and converts plain numbers to its dtypes.

Decimals are rounded to the nearest value of a float dtype, which is what a JSON number in FP32 means. Every other
change of a number is refused: fractions as integers, integers past the dtype's range, numbers that become infinite,
None as NaN.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from oriel_logic.client.models import ArrayLike, ModelSpec, TensorSpec
from oriel_logic.errors import ModelFailed, ModelInputWrong
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import DATATYPES, name_of
from oriel_wire.v2.messages import Tensor, tensor


class Metadata(msgspec.Struct, frozen=True):
    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


class Parameter(msgspec.Struct, frozen=True):
    string_value: str = ""


class Configuration(msgspec.Struct, frozen=True):
    parameters: dict[str, Parameter] = {}


def parse_parameters(model: str, body: bytes) -> dict[str, str]:
    """Parse the parameters in the body of `GET /v2/models/<model>/config`. Raises ModelFailed."""
    try:
        found = msgspec.json.decode(body, type=Configuration)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelFailed(f"the inference server's configuration of model '{model}' cannot be read") from error
    return {name: each.string_value for name, each in found.parameters.items()}


def parse_metadata(model: str, body: bytes) -> ModelSpec:
    """Parse the body of `GET /v2/models/<model>`. Raises ModelFailed."""
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
    """Convert `inputs` to tensors for the wire. Arrays are never cast; plain lists and numbers take the model's dtype.

    Missing inputs are left to the server, because a model may have optional ones.
    Raises ModelInputWrong.
    """
    if not inputs:
        raise ModelInputWrong(f"model '{spec.name}' needs inputs: {listed(spec.inputs)}")
    return [check_input(spec, name, value) for name, value in inputs.items()]


def over_time(spec: ModelSpec, inputs: Mapping[str, ArrayLike]) -> ModelSpec:
    """Return the metadata with a time axis in front of the inputs. That of a model with a batch axis has it there; an
    array with one axis more is for a model without.
    """
    found = dict(spec.inputs)
    for name, value in inputs.items():
        known = found.get(name)
        if known is not None and np.ndim(value) == len(known.shape) + 1:
            found[name] = TensorSpec(name, known.datatype, (-1, *known.shape))
    return ModelSpec(name=spec.name, inputs=found, outputs=spec.outputs)


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
    """Convert plain numbers to an array. Raises ModelInputWrong, also for numbers that would change (see the
    module).
    """
    dtype = DATATYPES[expected.datatype].dtype
    try:
        return np.asarray(value, dtype=dtype) if expected.datatype == "BYTES" else numbers_as(value, dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelInputWrong(f"{what} takes {expected.datatype} values, the given values are not: {error}") from error


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
        remedy = "" if expected.datatype == "BYTES" else f": use .astype(np.{wanted.name})"
        raise ModelInputWrong(f"{what} takes {expected.datatype}, the array is {array.dtype.name}{remedy}")


def check_shape(what: str, expected: TensorSpec, array: np.ndarray[Any, Any]) -> None:
    wanted, given = expected.shape, array.shape
    if len(wanted) == len(given) and all(w in (-1, g) for w, g in zip(wanted, given, strict=True)):
        return
    remedy = ""
    if len(given) == len(wanted) - 1 and wanted[0] == -1:
        remedy = "; the batch axis is missing: use array[np.newaxis]"
    raise ModelInputWrong(f"{what} takes shape {list(wanted)} (-1: any), the array has {list(given)}{remedy}")


def listed(tensors: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"'{each.name}' {each.datatype} {list(each.shape)}" for each in tensors.values()) or "none"


def check_outputs(spec: ModelSpec, outputs: Mapping[str, ArrayLike]) -> dict[str, np.ndarray[Any, Any]]:
    """Check the answer of a fake model by the rules for inputs. Raises ValueError: the fake is wrong."""
    turned = ModelSpec(name=spec.name, inputs=spec.outputs, outputs=spec.outputs)
    try:
        return {each.name: each.array for each in check_inputs(turned, outputs)}
    except ModelInputWrong as error:
        raise ValueError(error.message.replace("input '", "output '").replace(" takes ", " gives ")) from error


Array = np.ndarray[Any, Any]
NUMBERS = "biuf"


def narrowed(array: Array, target: "np.dtype[Any]") -> Array:
    """Convert an array to another dtype of the same kind, or integers to floats.

    Raises ValueError with the reason if a value does not fit.
    """
    given, wanted = array.dtype.kind, target.kind
    if target == array.dtype or not array.size:
        return array.astype(target, copy=False)
    if wanted in "iu" and given in "iu":
        bounds = np.iinfo(target)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise ValueError(f"a given value is not within {bounds.min} and {bounds.max}")
        return array.astype(target)
    if wanted != given and not (wanted in "fc" and given in "iuf"):
        raise ValueError(f"the given values are {'booleans' if given == 'b' else array.dtype.name}")
    return as_float(array, target)


def numbers_as(value: Any, target: "np.dtype[Any]") -> Array:
    """Convert a handler's lists and numbers to `target`; 1, 1.0 and True are interchangeable. Raises ValueError."""
    natural = np.asarray(value)
    if natural.dtype.kind not in NUMBERS:
        raise ValueError("they are not all numbers, or too large")
    if target == natural.dtype or not natural.size:
        return natural.astype(target, copy=False)
    if target.kind in "fc":
        return as_float(natural, target)
    with np.errstate(invalid="ignore"):
        # numpy makes floats of 1 and 2**64 - 1 together.
        made = np.asarray(value, dtype=target) if natural.dtype.kind == "f" else natural.astype(target)
    if not np.array_equal(natural, made):
        raise ValueError("they would be rounded or cut off")
    return made


def as_float(array: Array, target: "np.dtype[Any]") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(target)
    if not np.can_cast(array.dtype, target) and (np.isinf(made) & np.isfinite(array)).any():
        raise ValueError(f"a given value is larger than the maximum of {np.finfo(target).max:.6g}")
    return made
