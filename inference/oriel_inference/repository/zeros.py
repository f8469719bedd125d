"""One row of nothing, for first runs."""

import numpy as np

from oriel_inference.model import TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

__all__ = ["zeros"]


def zeros(info: TensorInfo) -> Array:
    """A tensor of zeros (empty texts) for an input, 1 where a dimension varies."""
    shape = [1 if dim < 0 else dim for dim in info.shape]
    if info.datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, DATATYPES[info.datatype].dtype)
