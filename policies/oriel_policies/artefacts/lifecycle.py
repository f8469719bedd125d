"""The states of the artefact of one model version in one server, and which of them may follow which.

While the state is not SERVING, the reference serves: the model as its owner uploaded it. The table has no way to
SERVING that does not lead through CHECKING and READY, and every fault of an artefact ends in REFUSED.
"""

from enum import Enum


class ArtefactState(Enum):
    """The states."""

    ABSENT = "absent"  # this server has none for this fingerprint, and does not build it now
    BUILDING = "building"
    CHECKING = "checking"  # its files and its outputs
    READY = "ready"  # its outputs are those of the reference: to be swapped in
    SERVING = "serving"
    REFUSED = "refused"  # for this fingerprint
    RETIRED = "retired"  # the version that it belonged to has left


_S = ArtefactState
# ABSENT follows a fault that says nothing about the artefact, and damaged files: these are built again.
_FOLLOWING: dict[ArtefactState, tuple[ArtefactState, ...]] = {
    _S.ABSENT: (_S.ABSENT, _S.BUILDING, _S.CHECKING, _S.REFUSED),
    _S.BUILDING: (_S.CHECKING, _S.REFUSED, _S.ABSENT),
    _S.CHECKING: (_S.READY, _S.REFUSED, _S.ABSENT),
    _S.READY: (_S.SERVING, _S.REFUSED, _S.ABSENT),
    _S.SERVING: (_S.REFUSED,),
    _S.REFUSED: (),
    _S.RETIRED: (),
}


class ArtefactLife:
    """The life of one artefact. Single writer: whoever brings it into service.

    compiler: its name in configurations.
    reason: text of why it is refused, or absent after an interruption.
    note: text of what the check of its outputs found.
    fingerprint: "" until it is known.
    """

    __slots__ = ("compiler", "fingerprint", "note", "reason", "state")

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler
        self.state = ArtefactState.ABSENT
        self.fingerprint = ""
        self.reason = ""
        self.note = ""

    def become(self, state: ArtefactState, reason: str = "") -> None:
        """Change the state. Raises ValueError, and changes nothing, if it cannot follow the present one."""
        if state is not ArtefactState.RETIRED and state not in _FOLLOWING[self.state]:
            raise ValueError(f"an artefact that is {self.state.value} cannot become {state.value}")
        self.state, self.reason = state, reason

    @property
    def text(self) -> str:
        """Return the state as one sentence."""
        why = self.reason or self.note
        return f"compiled by {self.compiler}: {self.state.value}{f', {why}' if why else ''}"


class RefusalKind(Enum):
    """Why an artefact does not serve.

    A remembered refusal keeps a server that is restarted from repeating a build that cannot help. Another model file,
    compiler, device or option is another fingerprint, so it needs no rule here.
    """

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
