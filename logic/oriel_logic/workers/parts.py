"""A batch in a worker: the rows of several callers go through the function together, and each gets its own back."""

from collections.abc import Callable, Sequence
from typing import Any

from oriel_logic.batching import merge, rows_in, split
from oriel_logic.workers.frames import Kind

__all__ = ["run_together"]

Attempt = Callable[[Callable[[], Any]], tuple[Kind, Any]]


def run_together(function: Callable[[Any], Any], parts: Sequence[Any], attempt: Attempt) -> list[tuple[Kind, Any]]:
    """What became of each part, in their order: (RESULT, its rows), (REFUSED, facts) or (FAILED, description).

    attempt: calls what it is given and says what became of it. Where all parts fail together each is tried alone.
    """

    def together() -> list[Any]:
        return split(function(merge(parts)), [rows_in(part) for part in parts])

    def alone(part: Any) -> Any:
        return split(function(part), [rows_in(part)])[0]

    kind, found = attempt(together)
    if kind is Kind.RESULT:
        return [(Kind.RESULT, rows) for rows in found]
    if len(parts) == 1:
        return [(kind, found)]
    return [attempt(lambda part=part: alone(part)) for part in parts]  # type: ignore[misc]
