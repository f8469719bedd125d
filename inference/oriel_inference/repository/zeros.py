"""One row of nothing, for first runs."""

from collections.abc import Sequence

import numpy as np

from oriel_inference.model import TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

__all__ = ["row_of_zeros", "zeros"]


def row_of_zeros(inputs: Sequence[TensorInfo]) -> dict[str, Array]:
    """Zeros for every input that has to be given."""
    return {info.name: zeros(info) for info in inputs if not info.optional}


def zeros(info: TensorInfo) -> Array:
    """A tensor of zeros (empty texts) for an input, 1 where a dimension varies."""
    shape = [1 if dim < 0 else dim for dim in info.shape]
    if info.datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, DATATYPES[info.datatype].dtype)
