"""The end of a sequence that follows from the error of one of its steps."""

from oriel_inference.errors import (
    BackendFailed,
    CallerLeft,
    DeadlineExceeded,
    DeadlineTooShort,
    InferenceError,
    QueueFull,
    QueueTimeout,
    ServerStopping,
)
from oriel_inference.sequences.table import End

_EXPIRED = (DeadlineExceeded, DeadlineTooShort, QueueTimeout)


class InstanceDied(BackendFailed):
    """The process of an instance has died, and what the model remembered with it."""


def how_ended(error: InferenceError) -> End:
    """Return how a sequence ends whose step had this error."""
    if isinstance(error, _EXPIRED):
        return End.EXPIRED
    if isinstance(error, QueueFull):
        return End.REFUSED
    if isinstance(error, CallerLeft):
        return End.LEFT
    if isinstance(error, InstanceDied):
        return End.DIED
    return End.STOPPED if isinstance(error, ServerStopping) else End.FAILED
