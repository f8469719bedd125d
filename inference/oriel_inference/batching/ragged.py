"""Batches of requests of unequal shapes: models with ragged inputs get them end to end, and tensors about the batch.

Pure. The kinds are those of `batch_input` and `batch_output` in Triton's model configuration.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from oriel_inference.errors import BackendFailed
from oriel_inference.model import ModelSpec, RaggedRules
from oriel_wire.v2.messages import Array

Shape = tuple[int, ...]


def ragged_inputs(parts: Sequence[Mapping[str, Array]], spec: ModelSpec, rules: RaggedRules) -> dict[str, Array]:
    """Return the ragged inputs as [elements of all requests], and the inputs that describe the batch.

    parts: per request, name -> [rows, ...].
    """
    names = [each.name for each in spec.inputs if each.ragged and each.name in parts[0]]
    found = {name: np.concatenate([part[name].reshape(-1) for part in parts]) for name in names}
    for each in rules.inputs:
        value = _described(each.kind, [part[each.source].shape for part in parts], each.dtype)
        found |= dict.fromkeys(each.targets, value.astype(each.dtype, copy=False))
    return found


def scattered(
    arrays: Sequence[Array],
    spec: ModelSpec,
    rules: RaggedRules,
    parts: Sequence[Mapping[str, Array]],
    rows: Sequence[int],
) -> list[list[Array]]:
    """Return each request's part of every output: its rows, or the elements that the shape of its input asks for.

    rows: number of rows of each request.
    The result holds views. Raises BackendFailed for an output of another size.
    """
    found: list[list[Array]] = [[] for _ in parts]
    for array, output in zip(arrays, spec.outputs, strict=True):
        source = rules.outputs.get(output.name)
        shapes = [(count, *array.shape[1:]) for count in rows]
        if source is not None:
            given = [part[source].shape for part in parts]
            shapes = [(g[0], *[b if a == -1 else a for a, b in zip(output.dims, g[1:], strict=True)]) for g in given]
        ends = list(accumulate(map(math.prod, shapes)))
        if array.size != ends[-1]:
            raise BackendFailed(f"output {output.name[:64]!r} has {array.size} elements for a batch of {ends[-1]}")
        for share, piece, shape in zip(found, np.split(array.reshape(-1), ends[:-1]), shapes, strict=True):
            share.append(piece.reshape(shape if source or output.engine_dims is None else (shape[0], *output.dims)))
    return found


def _described(kind: str, shapes: Sequence[Shape], dtype: str) -> Array:
    """Return the value of a batch input. shapes: of its source in each request."""
    counts = np.array([math.prod(shape) for shape in shapes])
    if kind == "BATCH_ELEMENT_COUNT":
        return counts
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT":
        return counts.cumsum()
    if kind == "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
        return np.concatenate([[0], counts.cumsum()])
    if kind == "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
        return np.zeros(counts.max(), dtype)  # only its shape counts, so its memory stays untouched
    items = np.concatenate([np.tile(shape[1:], (shape[0], 1)) for shape in shapes])
    return items if kind == "BATCH_ITEM_SHAPE" else items.reshape(-1)
