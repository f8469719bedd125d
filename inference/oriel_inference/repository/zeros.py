"""One row of zeros, for first runs."""

from collections.abc import Sequence

import numpy as np

from oriel_inference.model import TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array


def row_of_zeros(inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """Return zeros for every required input."""
    return {info.name: zeros(info) for info in inputs if not info.optional}


def zeros(info: TensorInfo) -> Array:
    """Return a tensor of zeros (empty texts) for an input, with size 1 where a dimension varies."""
    shape = [1 if dim < 0 else dim for dim in info.shape]
    if info.datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, DATATYPES[info.datatype].dtype)
