"""The end of a sequence that follows from the error of one of its steps, and the reason that later steps are given."""

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


def why_lost(how: End, idle_s: float) -> str:
    """Return why a sequence was lost. idle_s: the seconds after which a sequence without steps ends."""
    return {
        End.IDLE: f"no step came for {idle_s:g} s",
        End.EXPIRED: "a step of it was not done by its deadline",
        End.LEFT: "the caller of a step left",
        End.REFUSED: "the queue had no place for a step of it, or the memory none for its state",
        End.STOPPED: "the server stops",
        End.DIED: "the model's process died",
    }.get(how, "a step of it failed")
