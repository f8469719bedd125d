"""Refusals of artefacts: which are remembered for a fingerprint, and what makes them void.

A remembered refusal keeps every server of a group from repeating a build that cannot help. Another model file,
compiler, device or option is another fingerprint, so it needs no rule here.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What may change a refusal without changing the fingerprint.

    seconds, memory_bytes, artefact_bytes: the bounds of a build. memory_bytes is 0 without a bound.
    tolerance: the model owner's, as text; "" for the default.
    samples: digest of the configured samples.
    """

    seconds: float
    memory_bytes: int
    artefact_bytes: int
    tolerance: str = ""
    samples: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A refusal as it is remembered."""

    kind: RefusalKind
    reason: str
    under: Circumstances


def is_remembered(kind: RefusalKind) -> bool:
    """Return whether the refusal holds until its circumstances change; otherwise the next load tries again."""
    return kind not in _PASSING


def is_void(refusal: Refusal, now: Circumstances) -> bool:
    """Return whether another try may end differently under these circumstances."""
    before = refusal.under
    match refusal.kind:
        case RefusalKind.TIMED_OUT:
            return now.seconds > before.seconds
        case RefusalKind.OUT_OF_MEMORY:
            return _is_larger(now.memory_bytes, before.memory_bytes)
        case RefusalKind.CRASHED:  # a runtime may crash for want of memory
            return _is_larger(now.memory_bytes, before.memory_bytes)
        case RefusalKind.TOO_LARGE:
            return now.artefact_bytes > before.artefact_bytes
        case RefusalKind.OUTPUTS_DIFFER | RefusalKind.NOT_COMPARED:
            return (now.tolerance, now.samples) != (before.tolerance, before.samples)
        case RefusalKind.NOT_COMPILED | RefusalKind.NOT_OPENED | RefusalKind.FAILED:
            return False
        case _:
            return True


def _is_larger(now: int, before: int) -> bool:
    return before != 0 and (now == 0 or now > before)
