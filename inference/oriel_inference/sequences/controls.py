"""The tensors that a sequence model gets beside those of its client: controls, states and the slot."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from oriel_inference.backends import Session
from oriel_inference.errors import BackendFailed, InvalidRequest
from oriel_inference.model import ControlKind, ModelSpec, SequenceControl, SequenceRules, TensorSpec
from oriel_inference.sequences.flags import Flags
from oriel_inference.sequences.table import Id
from oriel_wire.v2.datatypes import DATATYPES, quoted
from oriel_wire.v2.messages import Array

MAX_PADDED_BYTES = 256 << 20
SLOT = TensorSpec(name="\0slot", datatype="INT64", dims=())  # no model has an input of this name
CURSOR = TensorSpec(name="\0scan", datatype="BYTES", dims=())  # a whole scan, see `sequences.scan`


def engine_spec(spec: ModelSpec, rules: SequenceRules) -> ModelSpec:
    """Return the model as its batchers see it: with its controls and states, and with the number of the slot."""
    hidden = [control.tensor for control in rules.controls] + [state.tensor for state in rules.states]
    return replace(
        spec,
        inputs=(*spec.inputs, *hidden, CURSOR, *([SLOT] if rules.padded else [])),
        outputs=visible_and_states(spec, rules),
        instances=1,
    )


def visible_and_states(spec: ModelSpec, rules: SequenceRules) -> tuple[TensorSpec, ...]:
    """Return the outputs that clients see, and behind them those that only carry a state."""
    visible = {output.name for output in spec.outputs}
    return (*spec.outputs, *(each.output for each in rules.states if each.output.name not in visible))


class Controls:
    """Makes the tensors of one model's steps. batched: the tensors have a batch dimension."""

    def __init__(self, rules: SequenceRules, *, batched: bool) -> None:
        self._batched = batched
        self._corrid = next((each for each in rules.controls if each.kind is ControlKind.CORRID), None)
        flags = [each for each in rules.controls if each.kind is not ControlKind.CORRID]
        self._flags = {
            (start, end): {
                each.tensor.name: self._shaped(each.true if _is_set(each.kind, start, end) else each.false)
                for each in flags
            }
            for start in (False, True)
            for end in (False, True)
        }
        self.initial = {each.tensor.name: self._shaped(each.initial) for each in rules.states}

    @property
    def shows_id(self) -> bool:
        """Return whether the model gets the id."""
        return self._corrid is not None

    def of(self, flags: Flags) -> Mapping[str, Array]:
        """Return the controls of a step. Raises InvalidRequest for an id that the model's control cannot carry."""
        found, control = self._flags[flags.start, flags.end], self._corrid
        if control is None:
            return found
        return {**found, control.tensor.name: self._shaped(corrid(flags.id, control))}

    def _shaped(self, row: Array) -> Array:
        return row.reshape((1, *row.shape)) if self._batched else row


def _is_set(kind: ControlKind, start: bool, end: bool) -> bool:
    return start if kind is ControlKind.START else end if kind is ControlKind.END else True


def corrid(sequence: Id, control: SequenceControl) -> Array:
    """Return one row with the id of a sequence. Raises InvalidRequest if the control has another type."""
    datatype = control.tensor.datatype
    if (datatype == "BYTES") != isinstance(sequence, str):
        wanted = "text" if datatype == "BYTES" else "a number"
        raise InvalidRequest(f"sequence_id {quoted(str(sequence))} must be {wanted} for this model")
    dtype = DATATYPES[datatype].dtype
    if isinstance(sequence, str):
        return np.array([sequence.encode()], dtype)
    bounds = np.iinfo(dtype)
    if datatype == "INT64" and sequence > bounds.max:
        sequence -= 1 << 64
    if not bounds.min <= sequence <= bounds.max:
        raise InvalidRequest(f"sequence_id {sequence} must lie between {bounds.min} and {bounds.max} for this model")
    return np.array([sequence], dtype)


def first_step(spec: ModelSpec, rows: int) -> dict[str, Array]:
    """Return the controls and states of `rows` sequences in their first step, for runs before the model serves."""
    rules = spec.sequences
    if rules is None:
        return {}
    found = {each.tensor.name: each.false if each.kind is ControlKind.END else each.true for each in rules.controls} | {
        each.tensor.name: each.initial for each in rules.states
    }
    if not spec.batched:
        return found
    return {name: np.repeat(row[np.newaxis], max(1, rows), axis=0) for name, row in found.items()}


class PaddedSession(Session):
    """Runs each row of a batch at the number of its slot; the rows between them are not ready.

    A model that gets READY may keep a state of its own for each row, so that a sequence has to stay in its row.
    """

    def __init__(self, session: Session, rules: SequenceRules) -> None:
        self._session = session
        self._empty = {control.tensor.name: control.false for control in rules.controls}
        self.provider = session.provider
        self.inputs, self.outputs = session.inputs, session.outputs

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; see `Session`."""
        rows = inputs[SLOT.name]
        total = int(rows.max()) + 1
        found = {name: array for name, array in inputs.items() if name != SLOT.name}
        if len(np.unique(rows)) != len(rows):
            raise BackendFailed("two steps of a batch have the same slot")
        if total == len(rows) and (rows[:-1] < rows[1:]).all():
            return self._session.run(found, outputs)
        size = total * sum([array[:1].nbytes for array in found.values()])
        if size > MAX_PADDED_BYTES:
            raise BackendFailed(f"a batch of {total} slots needs {size >> 20} MiB, at most {MAX_PADDED_BYTES >> 20}")
        padded = {name: self._padded(name, array, rows, total) for name, array in found.items()}
        return [array[rows] for array in self._session.run(padded, outputs)]

    def memory_bytes(self) -> int:
        """Return the bytes of memory that the session is known to occupy."""
        return self._session.memory_bytes()

    def close(self) -> None:
        """Do nothing: whoever opened the session closes it."""

    def _padded(self, name: str, array: Array, rows: Array, total: int) -> Array:
        empty = self._empty.get(name)
        shape = (total, *array.shape[1:])
        if empty is not None:
            padded = np.broadcast_to(empty, shape).copy()
        else:
            padded = np.full(shape, b"", object) if array.dtype.kind == "O" else np.zeros(shape, array.dtype)
        padded[rows] = array
        return padded
