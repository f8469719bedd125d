"""Streamed answers: encodes values as pieces, and ends a stream that fails."""

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from oriel_logic.bodies.lines import error_event, line
from oriel_logic.bodies.schemas import EVENTS, NDJSON
from oriel_logic.errors import CallerLeft, HandlerFailed, LogicError, Outcome

_log = logging.getLogger(__name__)
# The last piece of a stream that failed after it began: the error body, as a line or as an event of the name `error`.
ERROR_FRAMES: dict[str, Callable[[bytes], bytes]] = {NDJSON: line, EVENTS: error_event}


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """A streamed answer. pieces: encoded; they raise LogicError only."""

    content_type: str
    pieces: AsyncIterator[bytes]


async def framed(values: AsyncIterator[Any], frame: Callable[[Any], bytes]) -> AsyncIterator[bytes]:
    """Encode each value. Closes `values` at the end. Raises HandlerFailed for a value that has no encoding."""
    try:
        async for value in values:
            try:
                piece = frame(value)
            except (TypeError, ValueError, RecursionError, OverflowError) as error:
                raise HandlerFailed("a piece of the service's answer cannot be sent: its log says why") from error
            yield piece
    finally:
        await close(values)


async def ended_well(
    streamed: Streamed, body_of: Callable[[LogicError], bytes], note: Callable[[Outcome], None], request_id: str
) -> AsyncIterator[bytes]:
    """Yield the pieces; if they fail after the first, yield one more with the error, if the media type has a form for
    it.

    note: called with the outcome then. A failure before the first piece is raised: it can still have a status.
    """
    has_begun = False
    frame = ERROR_FRAMES.get(streamed.content_type)
    try:
        async for piece in streamed.pieces:
            yield piece
            has_begun = True
    except CallerLeft:
        raise
    except LogicError as error:
        if not has_begun or frame is None:
            raise
        note(error.outcome)
        if isinstance(error, HandlerFailed) and error.__cause__ is not None:
            _log.error("request %s: the service failed while it streamed", request_id, exc_info=error)
        yield frame(body_of(error))
    finally:
        await close(streamed.pieces)


class Primed:
    """An iterator whose first piece has been requested, so that an error before it can still be a plain error reply.

    first: None if there are no pieces. Closing it closes the iterator inside, even if nothing was read.
    """

    def __init__(self, first: bytes | None, rest: AsyncIterator[bytes]) -> None:
        self._first = first
        self._rest = rest

    def __aiter__(self) -> "Primed":
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        self._first = None
        await close(self._rest)


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
