"""`@batched`: combines calls of one function, from many requests, into one call of many rows.

    @batched(max_rows=32, max_delay_ms=5)
    def prepare(pictures: list[bytes]) -> list[np.ndarray]: ...

    rows = await ctx.run(prepare, [request.body])  # this caller's rows; they run together with those of others

The function takes rows and returns as many, in the same order: a list, or an array by its first axis. It runs in a
worker process. A direct call, in a test for example, calls the plain function. It may run twice for the same rows: if a
batch fails, each caller's rows are tried alone, so that only the failing ones get an error.

Without rows the function is not called: `await ctx.run(prepare, [])` returns an empty list at once.

Batches are counted in rows, not in calls: one call may have several.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from oriel_logic.bodies.signature import python_signature

MARK = "__oriel_batched__"
MAX_ROWS = 4096
MAX_DELAY_MS = 1000.0
F = TypeVar("F", bound=Callable[..., Any])


class WrongRows(TypeError):
    """A batched function got or returned something that is not rows; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of a batch.

    max_rows: the most rows of one call of the function.
    max_delay_s: the longest time that the first request of a batch waits for others.
    """

    max_rows: int
    max_delay_s: float


def batched(*, max_rows: int, max_delay_ms: float = 0.0) -> Callable[[F], F]:
    """Let calls by `ctx.run` be combined. max_delay_ms: the longest wait for others; 0 to wait only for a worker.

    A call whose deadline leaves no time does not wait. Raises ValueError or TypeError for invalid arguments.
    """
    if not 1 <= max_rows <= MAX_ROWS:
        raise ValueError(f"@batched: max_rows must lie between 1 and {MAX_ROWS}")
    if not 0 <= max_delay_ms <= MAX_DELAY_MS:
        raise ValueError(f"@batched: max_delay_ms must lie between 0 and {MAX_DELAY_MS:g}")
    limits = BatchLimits(max_rows=max_rows, max_delay_s=max_delay_ms / 1000.0)

    def mark(function: F) -> F:
        if not inspect.isfunction(function) or inspect.iscoroutinefunction(function) or "." in function.__qualname__:
            raise TypeError("@batched goes on a plain function at the top of a file: run it with `await ctx.run(...)`")
        if len(python_signature(function).parameters) != 1:
            raise TypeError(f"@batched: {function.__name__} must take one parameter, the rows")
        setattr(function, MARK, limits)
        return function

    return mark


def limits_of(function: object) -> BatchLimits | None:
    found = getattr(function, MARK, None)
    return found if isinstance(found, BatchLimits) else None


def rows_in(rows: Any) -> int:
    """Return the number of rows in the argument of a batched function. Raises WrongRows."""
    if isinstance(rows, list) or (hasattr(rows, "dtype") and getattr(rows, "ndim", 0) > 0):
        return len(rows)
    raise WrongRows(f"a batched function takes rows, a list or an array, not {type(rows).__name__}: wrap one in a list")


def size_of(rows: Any) -> int:
    """Estimate the bytes of rows, for the bounds on waiting calls."""
    if hasattr(rows, "nbytes"):
        return int(rows.nbytes)
    return sum([len(row) if isinstance(row, bytes | str) else int(getattr(row, "nbytes", 64)) for row in rows])


def group_of(rows: Any) -> tuple[Any, ...]:
    """Return the group of rows; only calls of one group can be combined: lists, or arrays of one dtype and row
    shape.
    """
    return (str(rows.dtype), *rows.shape[1:]) if hasattr(rows, "dtype") else ()


def merge(parts: Sequence[Any]) -> Any:
    """Combine the rows of several callers of one group."""
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "dtype"):
        import numpy as np

        return np.concatenate(parts)
    return [row for part in parts for row in part]


def split(result: Any, sizes: Sequence[int]) -> list[Any]:
    """Divide the result into each caller's rows; undoes `merge`. Raises WrongRows."""
    wanted = sum(sizes)
    if isinstance(result, tuple):
        result = list(result)
    if not isinstance(result, list) and not getattr(result, "ndim", 0):
        raise WrongRows(f"a batched function must give a list or an array of rows, not {type(result).__name__}")
    if len(result) != wanted:
        raise WrongRows(f"a batched function got {wanted} rows and gave {len(result)}: it must give one for each")
    return [result[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
