"""The classification extension: an output as its top classes. Pure."""

import numpy as np

from oriel_inference.errors import InvalidRequest
from oriel_inference.model import TensorSpec
from oriel_wire.v2.messages import Array

__all__ = ["top_classes"]


def top_classes(array: Array, spec: TensorSpec, count: int, *, batched: bool) -> Array:
    """The `count` largest values, largest first, as `value:index` or `value:index:label` (BYTES).

    array: [rows, ...] -> [rows, min(count, values per row)]; without a batch dimension [...] -> [classes].
    Raises InvalidRequest for an output whose elements are not numbers.
    """
    if array.dtype.kind not in "fiu" or spec.datatype == "BF16":
        raise InvalidRequest(f"output {spec.name[:64]!r} has datatype {spec.datatype}, classes need numbers")
    rows = array.reshape(array.shape[0] if batched else 1, -1)
    count = min(count, rows.shape[1])
    # Stable on the reversed order, so equal values keep their index order.
    order = np.argsort(-rows.astype(np.float64), axis=1, kind="stable")[:, :count]
    result = np.empty(order.shape, dtype=object)
    for row, indexes in enumerate(order):
        result[row] = [_class(rows[row, index], int(index), spec.labels) for index in indexes]
    return result if batched else result[0]


def _class(value: float, index: int, labels: tuple[str, ...]) -> bytes:
    text = f"{value:f}:{index}" if isinstance(value, np.floating) else f"{value}:{index}"
    return f"{text}:{labels[index]}".encode() if index < len(labels) else text.encode()
