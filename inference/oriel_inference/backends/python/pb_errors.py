"""The errors that a model may raise or return, and the checks of values that user code gives: whatever they are, they
raise in the user's code or can be sent to the server.
"""

from typing import Any


class TritonModelException(Exception):
    """An error raised by `initialize`, `execute` or `finalize`; its text is meant for people."""

    def __init__(self, msg: object = "") -> None:
        super().__init__(msg)

    def message(self) -> str:
        return str(self)


class NotThere(TritonModelException, AttributeError):
    """A name of `pb_utils` that this server does not have."""


def checked_text(value: object, what: str) -> str:
    """Return a text that may be given as bytes too. Raises TritonModelException for others, and for no UTF-8."""
    try:
        if isinstance(value, bytes):
            return str(value, "utf-8")
        if isinstance(value, str):
            return str(str.encode(value), "utf-8")
    except UnicodeError as error:
        raise TritonModelException(f"{what} is not valid UTF-8") from error
    raise TritonModelException(f"{what} must be text, not {type(value).__name__}")


def checked_number(value: Any, what: str) -> int:
    """Return a whole number of 64 bits, with or without a sign. Raises TritonModelException for others."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TritonModelException(f"{what} must be a whole number") from error
    if not -(2**63) <= number < 2**64:
        raise TritonModelException(f"{what} does not fit into 64 bits")
    return number


def printed(value: object) -> str:
    """Return any object as text that can be sent; never raises, because it reports errors."""
    try:
        return str(value).encode(errors="replace").decode()
    except Exception:
        return f"an object of type {type(value).__name__} without text"


class TritonError:
    """The error of one response."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: object = "", code: int = INTERNAL) -> None:
        self._message = printed(message)
        self._code = int(code) if isinstance(code, int) and 0 <= code <= 7 else TritonError.UNKNOWN

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message
