"""The errors that a model may raise or return."""


class TritonModelException(Exception):
    """An error raised by `initialize`, `execute` or `finalize`; its text is meant for people."""

    def __init__(self, msg: object = "") -> None:
        super().__init__(msg)

    def message(self) -> str:
        return str(self)


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
        self._message = str(message)
        self._code = code if isinstance(code, int) and 0 <= code <= 7 else TritonError.UNKNOWN

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code

    def __str__(self) -> str:
        return self._message
