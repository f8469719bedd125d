"""The states of the artefact of one model version in one server, and the events that change them.

While the state is not SERVING, the reference serves: the model as its owner uploaded it. The table has no way to
SERVING that does not lead through CHECKING and AGREED, and every fault of an artefact ends in REFUSED.
"""

from enum import Enum


class ArtefactState(Enum):
    """The states."""

    ABSENT = "absent"  # this server has none for this fingerprint, and does not build it now
    BUILDING = "building"
    CHECKING = "checking"  # its files and its outputs
    READY = "ready"  # to be swapped in
    SERVING = "serving"
    REFUSED = "refused"  # for this fingerprint
    RETIRED = "retired"  # the version that it belonged to has left


class ArtefactEvent(Enum):
    """What happens to an artefact."""

    BUILD_BEGUN = "build begun"
    FOUND = "found"  # in the folder already
    BUILT = "built"
    BUILD_FAILED = "build failed"
    INTERRUPTED = "interrupted"  # for a reason that says nothing about the artefact
    DAMAGED = "damaged"  # its files are not those that were built: it is removed and built again
    AGREED = "agreed"  # its outputs are those of the reference
    DISAGREED = "disagreed"
    NOT_OPENED = "not opened"
    SWAPPED_IN = "swapped in"
    FAILED = "failed"  # a run that the reference could do
    REFUSAL_FOUND = "refusal found"  # remembered in the folder
    LEFT = "left"  # the model version is replaced or unloaded


_S, _E = ArtefactState, ArtefactEvent
_TABLE: dict[ArtefactState, dict[ArtefactEvent, ArtefactState]] = {
    _S.ABSENT: {
        _E.BUILD_BEGUN: _S.BUILDING,
        _E.FOUND: _S.CHECKING,
        _E.REFUSAL_FOUND: _S.REFUSED,
    },
    _S.BUILDING: {_E.BUILT: _S.CHECKING, _E.BUILD_FAILED: _S.REFUSED, _E.INTERRUPTED: _S.ABSENT},
    _S.CHECKING: {
        _E.AGREED: _S.READY,
        _E.DISAGREED: _S.REFUSED,
        _E.DAMAGED: _S.ABSENT,
        _E.INTERRUPTED: _S.ABSENT,
    },
    _S.READY: {_E.SWAPPED_IN: _S.SERVING, _E.NOT_OPENED: _S.REFUSED, _E.INTERRUPTED: _S.ABSENT},
    _S.SERVING: {_E.FAILED: _S.REFUSED},
    _S.REFUSED: {},
    _S.RETIRED: {},
}


class ArtefactLife:
    """The life of one artefact. Single writer: whoever brings it into service.

    compiler: as configurations name it.
    reason: why it is refused, or absent after an interruption.
    note: what was found in the check of its outputs.
    fingerprint: "" until it is known.
    """

    __slots__ = ("compiler", "fingerprint", "note", "reason", "state")

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler
        self.state = ArtefactState.ABSENT
        self.fingerprint = ""
        self.reason = ""
        self.note = ""

    def happened(self, event: ArtefactEvent, reason: str = "") -> ArtefactState:
        """Change the state; return the new one. Raises ValueError, and changes nothing, if `event` cannot happen
        now.
        """
        self.state = following(self.state, event)
        self.reason = reason
        return self.state

    @property
    def text(self) -> str:
        """Return the state as one sentence."""
        why = self.reason or self.note
        return f"compiled by {self.compiler}: {self.state.value}{f', {why}' if why else ''}"


def following(state: ArtefactState, event: ArtefactEvent) -> ArtefactState:
    """Return the state after `event`. Raises ValueError if it cannot happen in `state`."""
    if event is ArtefactEvent.LEFT:
        return ArtefactState.RETIRED
    after = _TABLE[state].get(event)
    if after is None:
        raise ValueError(f"an artefact that is {state.value} cannot be {event.value}")
    return after
