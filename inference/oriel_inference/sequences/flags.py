"""Reads the parameters with which v2 clients send the steps of sequences."""

from collections.abc import Mapping
from typing import NamedTuple

from oriel_inference.errors import InvalidRequest
from oriel_inference.sequences.table import Id
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.messages import ParameterValue

ID, START, END = "sequence_id", "sequence_start", "sequence_end"
MAX_ID = 128  # characters


class Flags(NamedTuple):
    """The sequence of a step, and whether the step is its first and its last."""

    id: Id
    start: bool
    end: bool


def read_flags(parameters: Mapping[str, ParameterValue], model: str) -> Flags:
    """Read the flags of a step for a model. Raises InvalidRequest for a request that is no step of a sequence."""
    sequence = parameters.get(ID, 0)
    if isinstance(sequence, bool | float):
        raise InvalidRequest(f"parameter {ID!r} must be a whole number or a text")
    if not sequence:
        raise InvalidRequest(
            f"inference request to model {model!r} must specify a non-zero or non-empty correlation ID"
        )
    if isinstance(sequence, str) and len(sequence) > MAX_ID:
        raise InvalidRequest(f"parameter {ID!r} must have at most {MAX_ID} characters")
    if isinstance(sequence, int):
        sequence %= 1 << 64  # gRPC clients send the upper half of these numbers as negative ones
    return Flags(sequence, flag(parameters, START), flag(parameters, END))


def flag(parameters: Mapping[str, ParameterValue], name: str) -> bool:
    """Return a parameter that is true or false; false if it is missing. Raises InvalidRequest for other values."""
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"parameter {quoted(name)} must be true or false")
    return value
