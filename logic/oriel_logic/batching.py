"""`@batched`: calls of one function, from many requests, as one call of many rows.

    @batched(max_rows=32, max_delay_ms=5)
    def prepare(pictures: list[bytes]) -> list[np.ndarray]: ...

    rows = await ctx.run(prepare, [request.body])  # this caller's rows; they run together with those of others

The function takes rows and gives as many, in the same order: a list, or an array by its first axis. It runs in a
worker process. Called directly, in a test for example, it is what it was. It must not mind running twice: where rows
fail together, each caller's rows are tried alone, so that only those fail that are at fault.

Without rows the function is not called: `await ctx.run(prepare, [])` is an empty list at once.

Batches are counted in rows, not in calls: one call may bring several.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from oriel_logic.parameters import python_signature

__all__ = ["BatchLimits", "WrongRows", "batched", "group_of", "limits_of", "merge", "rows_in", "size_of", "split"]

MARK = "__oriel_batched__"
MAX_ROWS = 4096
MAX_DELAY_MS = 1000.0
F = TypeVar("F", bound=Callable[..., Any])


class WrongRows(TypeError):
    """What was given to or by a batched function is not rows; the text says what to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """max_rows: of one call of the function. max_delay_s: how long the first of a batch may wait for others."""

    max_rows: int
    max_delay_s: float


def batched(*, max_rows: int, max_delay_ms: float = 0.0) -> Callable[[F], F]:
    """Let calls by `ctx.run` go together. max_delay_ms: how long a call may wait for others; 0: only for a worker.

    A call that has no time to wait does not wait. Raises ValueError or TypeError for what cannot be.
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
    """How many. Raises WrongRows."""
    if isinstance(rows, list) or (hasattr(rows, "dtype") and getattr(rows, "ndim", 0) > 0):
        return len(rows)
    raise WrongRows(f"a batched function takes rows, a list or an array, not {type(rows).__name__}: wrap one in a list")


def size_of(rows: Any) -> int:
    """Roughly how many bytes they take, for bounds on what waits."""
    if hasattr(rows, "nbytes"):
        return int(rows.nbytes)
    return sum([len(row) if isinstance(row, bytes | str) else int(getattr(row, "nbytes", 64)) for row in rows])


def group_of(rows: Any) -> tuple[Any, ...]:
    """Only calls of one group can go together: lists, or arrays of one dtype and row shape."""
    return (str(rows.dtype), *rows.shape[1:]) if hasattr(rows, "dtype") else ()


def merge(parts: Sequence[Any]) -> Any:
    """The rows of several callers of one group, as one."""
    if len(parts) == 1:
        return parts[0]
    if hasattr(parts[0], "dtype"):
        import numpy as np

        return np.concatenate(parts)
    return [row for part in parts for row in part]


def split(result: Any, sizes: Sequence[int]) -> list[Any]:
    """Give each caller its rows of what the function gave for all; undoes `merge`. Raises WrongRows."""
    wanted = sum(sizes)
    if isinstance(result, tuple):
        result = list(result)
    if not isinstance(result, list) and not getattr(result, "ndim", 0):
        raise WrongRows(f"a batched function must give a list or an array of rows, not {type(result).__name__}")
    if len(result) != wanted:
        raise WrongRows(f"a batched function got {wanted} rows and gave {len(result)}: it must give one for each")
    return [result[start:end] for start, end in pairwise([0, *accumulate(sizes)])]
