"""Reads one sampled row: its values, what is odd among them, and its classes. Pure."""

import numpy as np

from oriel_wire.v2.messages import Array

MAX_VALUES = 4096  # of one tensor of one row; of a larger one, values at even distances
SUM_ERROR = 1e-3  # by which the sum of a distribution may differ from 1


def part_of(array: Array, row: int | None) -> Array:
    """Return a copy of up to MAX_VALUES values of one row, in one dimension. row: None without a batch dimension."""
    one = array if row is None else array[row]
    flat = np.asarray(one).flat
    return flat[:: max(1, -(-one.size // MAX_VALUES))]


def numbers(values: Array, datatype: str) -> Array:
    """Return the values as FP64; BF16 travels as its bits."""
    if datatype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def probabilities(values: Array, *, logits: bool) -> Array | None:
    """Return the distribution over classes that a row of an output is, None if it is none.

    values: FP64, at least two, all finite. A row of values from 0 to 1 whose sum is 1 is a distribution; with `logits`
    every other row becomes one by softmax.
    """
    if float(values.min()) >= 0.0 and abs(float(values.sum()) - 1.0) <= SUM_ERROR:
        return values
    if not logits:
        return None
    powers = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())


def entropy(distribution: Array) -> float:
    """Return the entropy of a distribution in parts of the largest one that as many classes can have: 0 to 1."""
    positive = distribution[distribution > 0.0]
    found = -float((positive * np.log(positive)).sum()) / float(np.log(distribution.size))
    return min(1.0, max(0.0, found))
