"""Scans: one call that runs a sequence model over a leading time axis, with its states fed back at the server.

A scan is a sequence of its own: it waits for a slot and holds it to its end. Its steps run in rounds. A round goes
through the queue of the model like any other call, so scans and steps of several callers take turns by tier, tenant and
deadline, and scans that wait at the same time run their steps in one batch. Within a round the steps follow each other
without a queue between them, for at most ROUND_S or one step.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from oriel_inference.backends import Outputs, RequestSession, Session
from oriel_inference.batching.call import Answer, BatchTimes, Call
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, RequestTooLarge
from oriel_inference.model import ModelSpec, SequenceRules, TensorSpec
from oriel_inference.sequences.controls import CURSOR, SLOT, Controls, PaddedSession, visible_and_states
from oriel_inference.sequences.flags import Flags
from oriel_wire.v2.messages import Array, ParameterValue

PARAMETER, STREAMED = "scan", "stream"
MAX_STEPS = 1 << 16
MAX_OUTPUT_BYTES = 256 << 20
ROUND_S = 0.002


def is_scan(parameters: Mapping[str, ParameterValue]) -> bool:
    """Return whether a request asks for a scan. Raises InvalidRequest for an unknown value of the parameter."""
    value = parameters.get(PARAMETER, False)
    if value is not True and value is not False and value != STREAMED:
        raise InvalidRequest(f"parameter {PARAMETER!r} must be true, false or {STREAMED!r}")
    return bool(value)


def is_streamed(spec: ModelSpec, parameters: Mapping[str, ParameterValue]) -> bool:
    """Return whether a request gets any number of responses."""
    return spec.decoupled or (spec.sequences is not None and parameters.get(PARAMETER) == STREAMED)


class ScanRules:
    """The facts shared by all scans of one model. spec: the model as its batchers see it."""

    def __init__(
        self, spec: ModelSpec, rules: SequenceRules, visible: Sequence[TensorSpec], controls: Controls
    ) -> None:
        self.batched = spec.batched
        self.controls = controls
        self.outputs = visible_and_states(replace(spec, outputs=tuple(visible)), rules)
        self.visible = len(visible)
        names = [output.name for output in self.outputs]
        self.states = [(state.tensor.name, names.index(state.output.name)) for state in rules.states]
        self.engine_dims = {each.name: each.engine_dims for each in spec.inputs if each.engine_dims is not None}


class Scan:
    """One scan in progress. The loop and the session that runs it use it in turn.

    call: the caller's own call, and not that of a round: a round's inputs hold the scan in an array, and the garbage
    collector finds no cycle that goes through one.
    done, sent: steps that have run, and steps whose outputs the caller has.
    last_steps: steps of the last round.
    state: the tensors for the next step. error: ends the scan, though its steps succeeded.
    """

    __slots__ = (
        "_began_s", "_buffers", "_controls", "_cost_us", "_device_ns", "_fixed", "_rules", "_varying", "_wanted",
        "call", "done", "error", "last_steps", "sent", "shapes", "state", "steps",
    )  # fmt: skip

    def __init__(self, call: Call, rules: ScanRules) -> None:
        self.call = call
        self._rules = rules
        self.steps = max([len(array) for array in call.inputs.values()])
        self.state = dict(rules.controls.initial)
        self._varying: dict[str, Array] = {}
        self._fixed: dict[str, Array] = {}
        for name, array in call.inputs.items():
            dims = rules.engine_dims.get(name)
            if dims is not None:
                array = array.reshape((len(array), *dims))
            if not array.flags.aligned:
                array = array.copy()
            if name in self.state:
                self.state[name] = array if rules.batched else array[0]
            elif len(array) > 1:
                self._varying[name] = array
            else:
                self._fixed[name] = array if rules.batched else array[0]
        requested = call.source[0].outputs if call.source is not None else None
        names = None if requested is None else {output.name for output in requested}
        self._wanted = [
            index < rules.visible if names is None else output.name in names
            for index, output in enumerate(rules.outputs)
        ]
        self._buffers: dict[int, Array] = {}
        last = self.steps - 1
        self._controls = [
            rules.controls.of(Flags(0, start, end)) for start, end in ((True, not last), (False, False), (False, True))
        ]
        self.shapes = tuple([(name, array.shape[1:]) for name, array in (self._varying | self._fixed).items()])
        self.done = self.sent = self.last_steps = self._cost_us = self._device_ns = 0
        self._began_s = 0.0
        self.error: InferenceError | None = None

    def placed(self, row: int) -> None:
        """Record the number of the slot that the scan holds."""
        self._fixed[SLOT.name] = np.array([row])

    def round(self) -> dict[str, Array]:
        """Return the inputs of the scan's next round: the scan itself, which `ScanSession` reads."""
        found = np.empty(1, object)
        found[0] = self
        return {CURSOR.name: found}

    @property
    def signature(self) -> tuple[object, ...]:
        """Return a value that is equal for scans whose next steps can share a batch."""
        return PARAMETER, self.shapes, *[array.shape for array in self.state.values()]

    # In the session -----------------------------------------------------------------------------------------------

    def feeds(self) -> dict[str, Array]:
        """Return the inputs of the next step, without its states."""
        at, batched = self.done, self._rules.batched
        found = {**self._fixed, **self._controls[0 if not at else 2 if at == self.steps - 1 else 1]}
        for name, array in self._varying.items():
            found[name] = array[at : at + 1] if batched else array[at]
        return found

    def take(self, arrays: Sequence[Array], row: int) -> None:
        """Keep the outputs of a step. row: its row in the batch."""
        for index in range(self._rules.visible):
            if not self._wanted[index]:
                continue
            part = arrays[index][row] if self._rules.batched else arrays[index]
            buffer = self._buffers.get(index)
            if buffer is None:
                buffer = self._allocated(index, part)
                if buffer is None:
                    return
            elif buffer.shape[1:] != part.shape:
                name = self._rules.outputs[index].name
                self.error = BackendFailed(
                    f"output {name[:64]!r} has another shape at step {self.done}, so the steps cannot be joined"
                )
                return
            buffer[self.done] = part
        self.done += 1

    def pauses(self, now: float) -> bool:
        """Return whether the scan ends its round now: all steps have run, it failed, or no caller waits for it."""
        call = self.call
        return self.done == self.steps or self.error is not None or call.finished or call.deadline <= now

    def _allocated(self, index: int, part: Array) -> Array | None:
        size = self.steps * part.nbytes + self.size_bytes
        if size > MAX_OUTPUT_BYTES:
            self.error = RequestTooLarge(
                f"the outputs of this scan have {size >> 20} MiB, at most {MAX_OUTPUT_BYTES >> 20}: send it in parts, "
                "each with the last state of the one before"
            )
            return None
        shape = (self.steps, *part.shape)
        self._buffers[index] = found = (
            np.full(shape, b"", object) if part.dtype.kind == "O" else np.empty(shape, part.dtype)
        )
        return found

    # On the loop --------------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Return the size of the outputs that the scan has collected, in bytes."""
        return sum([array.nbytes for array in self._buffers.values()])

    def held(self) -> dict[str, Array]:
        """Return the arrays that stay in memory until the scan ends, by unique names."""
        return {**self.state, **{f"\0{index}": array for index, array in self._buffers.items()}}

    def outputs(self) -> Outputs:
        """Return the outputs of the steps that ran since the previous call of `outputs`. The final states are added
        once the last step has run. An output that the caller did not request is None.
        """
        found: list[Array | None] = []
        begin, end, self.sent = self.sent, self.done, self.done
        of_output = {index: name for name, index in self._rules.states}
        for index, spec in enumerate(self._rules.outputs):
            if not self._wanted[index]:
                found.append(None)
            elif index < self._rules.visible:
                part = self._buffers[index][begin:end]
                found.append(part if spec.engine_dims is None else part.reshape((len(part), *spec.dims)))
            elif end < self.steps:
                found.append(None)
            else:
                state = self.state[of_output[index]]
                found.append(state if self._rules.batched else state[np.newaxis])
        return Outputs(found)

    def charge(self, answer: Answer) -> None:
        """Add the cost of one round to the cost of the scan."""
        self._began_s = self._began_s or answer.times.started_s
        self.last_steps = answer.times.steps
        self._cost_us += answer.cost_us
        self._device_ns += answer.device_ns

    def answer(self, last: Answer) -> Answer:
        """Return the answer of the scan. last: the answer of its last round."""
        began, ended = self._began_s, last.times.split_s
        return Answer(
            self.outputs(),
            BatchTimes(began, began, ended, ended, last.times.rows),
            self._cost_us,
            self._device_ns,
            last.usage,
        )


class ScanSession(Session):
    """Runs batches of scans, several steps at a time, and every other batch as it is. One run at a time.

    now: the clock of the deadlines.
    """

    def __init__(self, session: Session, rules: SequenceRules, now: Callable[[], float], *, batched: bool) -> None:
        self._session = session
        self._now = now
        self._batched = batched
        self._states = [(state.tensor.name, state.output.name) for state in rules.states]
        self.provider, self.rows = session.provider, session.rows
        self.inputs, self.outputs = session.inputs, session.outputs

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; see `Session`. For scans, returns the outputs of the last step."""
        found = inputs.get(CURSOR.name)
        self.steps = 1
        if found is None:
            return self._session.run(inputs, outputs)
        scans: list[Scan] = list(found)
        states = [(name, outputs.index(output)) for name, output in self._states]
        state = _joined([scan.state for scan in scans])
        ends_s, steps = self._now() + ROUND_S, 0
        try:
            while True:
                arrays = self._session.run(_joined([scan.feeds() for scan in scans]) | state, outputs)
                if self._batched and any(not array.ndim or len(array) != len(scans) for array in arrays):
                    raise BackendFailed(f"an output has not one row for each of the {len(scans)} rows of its batch")
                steps += 1
                state = {name: arrays[index] for name, index in states}
                for row, scan in enumerate(scans):
                    scan.take(arrays, row)
                now = self._now()
                if now >= ends_s or any(scan.pauses(now) for scan in scans):
                    self.steps = steps
                    return arrays
        finally:  # a batch that fails is executed again in parts, from the step that failed
            if steps:
                for row, scan in enumerate(scans):
                    scan.state = state if len(scans) == 1 else {n: a[row : row + 1].copy() for n, a in state.items()}

    def memory_bytes(self) -> int:
        """Return the bytes of memory that the session is known to occupy."""
        return self._session.memory_bytes()

    def close(self) -> None:
        """Do nothing: whoever opened the session closes it."""


def in_slots(sessions: Sequence[Session], spec: ModelSpec, now: Callable[[], float]) -> list[Session]:
    """Return the sessions as the batchers of a sequence model run them. A session that takes requests one by one has no
    rows. now: the clock of the batchers.
    """
    rules = spec.sequences
    assert rules is not None
    found: list[Session] = []
    for session in sessions:
        if not isinstance(session, RequestSession):
            session = PaddedSession(session, rules) if rules.padded else session
            session = ScanSession(session, rules, now, batched=spec.batched) if rules.states else session
        found.append(session)
    return found


def _joined(parts: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    if len(parts) == 1:
        return dict(parts[0])
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
