"""Reasons for which an artefact is refused, and which of them hold when the model is loaded again.

A remembered refusal keeps a server that is restarted from repeating a build that cannot help. Another model file,
compiler, device or option is another fingerprint, so it needs no rule here.
"""

from enum import Enum


class RefusalKind(Enum):
    """Why an artefact does not serve."""

    NOT_COMPILED = "not_compiled"  # the compiler refuses the model
    NOT_OPENED = "not_opened"  # the runtime refuses what the compiler made
    OUTPUTS_DIFFER = "outputs_differ"
    NOT_COMPARED = "not_compared"  # the reference runs with none of the samples
    FAILED = "failed"  # in service, with requests that the reference could answer
    CRASHED = "crashed"  # the process that built or checked it
    TIMED_OUT = "timed_out"
    OUT_OF_MEMORY = "out_of_memory"
    TOO_LARGE = "too_large"
    NO_SPACE = "no_space"  # the folder cannot be written
    CHANGED = "changed"  # the model's files, meanwhile
    STOPPED = "stopped"  # the server, meanwhile
    NOT_INSTALLED = "not_installed"  # the compiler, on this machine


_PASSING = frozenset({RefusalKind.NO_SPACE, RefusalKind.CHANGED, RefusalKind.STOPPED, RefusalKind.NOT_INSTALLED})


def is_remembered(kind: RefusalKind) -> bool:
    """Return whether the refusal holds for the next load too; otherwise that one tries again."""
    return kind not in _PASSING
