"""Makes one vector per text from a model's token vectors."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Pooling = Literal["mean", "cls", "last"]
Floats = NDArray[np.float32]


def pooled(hidden: NDArray[Any], mask: NDArray[Any], how: Pooling) -> Floats:
    """Return one vector per row: the mean of its tokens, its first token or its last.

    hidden: [rows, tokens, width], or [rows, width] if the model has pooled already.
    mask: [rows, tokens], 1 for a token, 0 for padding, which is at the end.
    Raises ValueError for other shapes.
    """
    if hidden.ndim == 2 and hidden.shape[0] == mask.shape[0]:
        return hidden.astype(np.float32, copy=False)
    if hidden.ndim != 3 or hidden.shape[:2] != mask.shape:
        raise ValueError(f"token vectors of shape {list(hidden.shape)} do not fit tokens of shape {list(mask.shape)}")
    if how == "cls":
        return hidden[:, 0].astype(np.float32, copy=False)
    counts = mask.sum(axis=1)
    if how == "last":
        ends: Floats = hidden[np.arange(len(hidden)), np.maximum(counts - 1, 0)].astype(np.float32, copy=False)
        return ends
    hidden = hidden.astype(np.float32, copy=False)
    weights = mask.astype(np.float32)[:, np.newaxis, :]
    sums = np.matmul(weights, hidden)[:, 0]
    means: Floats = sums / np.maximum(counts, 1).astype(np.float32)[:, np.newaxis]
    return means


def normalised(vectors: Floats) -> Floats:
    """Divide each row by its length; a row of zeros stays unchanged."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit: Floats = np.divide(vectors, np.where(lengths == 0, 1, lengths), dtype=np.float32)
    return unit


def shortened(vectors: Floats, dimensions: int | None, *, normalise: bool) -> Floats:
    """Return the first `dimensions` of each row (None: all), normalised again if `normalise`."""
    if dimensions is not None:
        vectors = vectors[:, :dimensions]
    return normalised(vectors) if normalise else vectors


def plan(lengths: Sequence[int], *, max_rows: int, max_tokens: int) -> Iterator[list[int]]:
    """Yield the indices of texts that go to the model together, of similar length, so that little is padded.

    Each batch has at most `max_rows` rows and, padded to its longest, at most `max_tokens` tokens; a longer text goes
    alone. Each index comes once.
    """
    batch: list[int] = []
    longest = 0
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        longest = max(longest, lengths[index])
        if batch and (len(batch) >= max_rows or longest * (len(batch) + 1) > max_tokens):
            yield batch
            batch, longest = [], lengths[index]
        batch.append(index)
    if batch:
        yield batch


def padded(rows: Sequence[NDArray[np.int32]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return token ids of different lengths as (ids, mask), both [rows, longest], padded at the end."""
    lengths = np.array([len(row) for row in rows])
    mask = (np.arange(lengths.max()) < lengths[:, np.newaxis]).astype(np.int64)
    ids = np.zeros(mask.shape, dtype=np.int64)
    ids[mask == 1] = np.concatenate(rows)
    return ids, mask
