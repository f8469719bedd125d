"""Streamed answers: their end, and what their errors mean."""

from collections.abc import Callable
from typing import Any

from oriel_logic.bodies.lines import error_event, line
from oriel_logic.bodies.schemas import EVENTS, NDJSON
from oriel_logic.errors import HandlerFailed, LogicError

# The last piece of a stream that failed after it began: the error body, as a line or as an event of the name `error`.
ERROR_FRAMES: dict[str, Callable[[bytes], bytes]] = {NDJSON: line, EVENTS: error_event}


async def close(values: Any) -> None:
    """Close a generator that may be suspended."""
    closing = getattr(values, "aclose", None)
    if closing is not None:
        await closing()


def failed(error: BaseException) -> LogicError:
    """Convert what a handler raised to the caller's error: its own refusal, or that of a call in a task group."""
    meant = first_logic_error(error)
    if meant is not None:
        return meant
    made = HandlerFailed("the service failed: its log says why under this request id")
    made.__cause__ = error
    return made


def first_logic_error(error: BaseException) -> LogicError | None:
    """Return the first refusal in an exception group, so that its meaning is not lost."""
    if isinstance(error, LogicError):
        return error
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            found = first_logic_error(inner)
            if found is not None:
                return found
    return None
