"""The scheduler of a sequence model: it decides which step runs when, and the batchers behind it run the steps.

Rules.
1. There is one batcher for each instance of the model, because a sequence keeps its instance. At most one step of a
   sequence is in a batcher. `table` decides which sequence has a slot and which step is next.
2. All other steps wait here, in a queue that bounds them as a batcher bounds its calls, and in which they expire.
3. Every call that `submit` accepts is finished exactly once. A step that is not executed ends its sequence: the waiting
   steps fail, and the errors of later steps give the reason.
4. The state of a sequence is kept in `table` between its steps, in memory of its own. The states of a model together
   may have STATE_SHARE times the bytes of the requests that may wait for it.
5. Tenants with the same id have sequences of their own. A model that sees the id itself would mix them up, so there an
   id belongs to the tenant that uses it first.

Owner and single writer: the loop.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count

import numpy as np
from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.call import Answer, Call, deliver, lateness
from oriel_inference.batching.device import Accounts
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.statistics import Statistics
from oriel_inference.clock import Timer
from oriel_inference.errors import (
    CallerLeft,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    QueueFull,
    ServerStopping,
)
from oriel_inference.model import ModelSpec, SequenceRules
from oriel_inference.sequences.controls import SLOT, Controls
from oriel_inference.sequences.endings import InstanceDied, how_ended, why_lost
from oriel_inference.sequences.flags import END as SEQUENCE_END
from oriel_inference.sequences.flags import ID, Flags, read_flags
from oriel_inference.sequences.flags import START as SEQUENCE_START
from oriel_inference.sequences.scan import Scan, ScanRules, is_scan
from oriel_inference.sequences.table import End, Id, Key, OpenSequence, SequenceTable
from oriel_policies.waiting.queue import SlaQueue
from oriel_wire.v2.messages import Array, ParameterValue

MAX_STEPS = 256  # of one sequence that wait
STATE_SHARE = 4  # states of a model beside the bytes that may wait for it: a stream of speech keeps megabytes


class _Step:
    """A step of `sequence`. controls: the tensors that tell the model about it. reply: the call's own reply.

    inner: the call that the batcher gets, which is another one for each execution of an iterative request or a scan.
    late: the timer of a scan that waits for its reader.
    """

    __slots__ = ("call", "controls", "flags", "inner", "key", "late", "reply", "scan", "sequence")

    sequence: "OpenSequence[_Step]"

    def __init__(
        self, call: Call, key: Key, flags: Flags, controls: Mapping[str, Array], scan: Scan | None = None
    ) -> None:
        self.scan = scan
        self.late: Timer | None = None
        self.call = self.inner = call
        self.key = key
        self.flags = flags
        self.controls = controls
        self.reply = call.reply

    def stop_waiting(self) -> bool:
        """Stop waiting for the reader of a scan. Returns whether it was waited for."""
        late, self.late = self.late, None
        if late is not None:
            late.cancel()  # the timer would keep the scan and its request in memory
        return late is not None

    @property
    def runs(self) -> bool:
        """Return whether a batcher has it."""
        return self.sequence.running is self


class SequenceScheduler:
    """Runs the steps of one model version.

    batchers: one for each instance, with `engine_spec`.
    exclusive: the model sees the ids, so that tenants cannot use the same.
    """

    is_short = False
    resident = None

    def __init__(
        self,
        spec: ModelSpec,
        rules: SequenceRules,
        batchers: Sequence[Batcher],
        machine: Machine,
        statistics: Statistics,
        *,
        exclusive: bool,
    ) -> None:
        self.spec = spec
        self.statistics = statistics
        self._rules = rules
        self._batchers = batchers
        self._clock = machine.clock
        self._controls = Controls(rules, batched=spec.batched)
        self.table: SequenceTable[_Step] = SequenceTable(
            instances=len(batchers),
            slots=rules.slots,
            idle_s=rules.idle_s,
            max_bytes=STATE_SHARE * machine.max_bytes,
            ended=statistics.sequences,
            exclusive=exclusive or self._controls.shows_id,
        )
        self._queue = SlaQueue(max_items=machine.max_items, max_bytes=machine.max_bytes)
        self._steps: dict[Call, _Step] = {}
        names = [output.name for output in batchers[0].spec.outputs]
        self._outputs = [(state.tensor.name, names.index(state.output.name)) for state in rules.states]
        self._visible = len(spec.outputs) if len(names) > len(spec.outputs) else None
        self._scans = ScanRules(batchers[0].spec, rules, spec.outputs, self._controls) if rules.states else None
        self._varies = [state.tensor.name for state in rules.states if -1 in state.tensor.dims]
        self._numbers = count(1)  # the ids of iterative requests and scans
        self._no_memory = f"the sequences of model {spec.name!r} have no memory left for another state"
        self._placing = False
        self._closed = False
        self._expiry: Timer | None = None
        self._expiry_at = 0.0
        self._idle: Timer | None = None

    # Scheduler --------------------------------------------------------------------------------------------------

    @property
    def accounts(self) -> Accounts:
        """Return the rows of its callers."""
        return self._batchers[0].accounts

    @property
    def units(self) -> int:
        """Return the cores of one run."""
        return self._batchers[0].units

    @property
    def share(self) -> float:
        """Return the share of the server that one run keeps busy."""
        return self._batchers[0].share

    @property
    def pending(self) -> int:
        """Return the number of waiting steps."""
        return len(self._queue) + sum([each.pending for each in self._batchers])

    @property
    def running(self) -> int:
        """Return the number of running batches."""
        return sum([each.running for each in self._batchers])

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Return (band, waiting steps, expected wait of a step whose sequence has a slot) for every band seen."""
        found = {band: items for band, items, _ in self._queue.depths()}
        for each in self._batchers:
            for band, items, _ in each.depths():
                found[band] = found.get(band, 0) + items
        return [(band, items, self.expected_wait_s(band)) for band, items in sorted(found.items())]

    def expected_wait_s(self, band: int) -> float | None:
        """Return how many seconds a step would wait whose sequence has a slot; None if unknown."""
        waits = [wait_s for each in self._batchers if (wait_s := each.expected_wait_s(band)) is not None]
        return min(waits, default=None)

    def submit(self, call: Call) -> None:
        """Accept `call`; its reply comes later on the loop, or immediately if it is refused."""
        try:
            step = self._step(call)
            flags, key, ticket = step.flags, step.key, call.ticket
            sequence = self.table.join(key, step, ticket, start=flags.start, end=flags.end)
            if sequence is None:
                raise self._not_open(key)
        except InferenceError as error:
            self._fail(call, error)
            return
        step.sequence = sequence
        self._steps[call] = step
        self._place()
        self._advance(sequence)
        if step.runs or call.finished:
            return
        if len(sequence.steps) > MAX_STEPS or (displaced := self._queue.push(ticket)) is None:
            self._lose(sequence, QueueFull(f"the queue of model {self.spec.name!r} is full"), step)
            return
        for loser in displaced:
            text = f"a more urgent request took the place in {self.spec.name!r}'s queue"
            self._lose_waiting(loser.payload, QueueFull(text))
        if self._expiry is None or ticket.deadline < self._expiry_at:
            self._arm_expiry(ticket.deadline)

    def caller_left(self, call: Call) -> bool:
        """Remove a call whose caller went away; its reply is not called. Its sequence ends. Returns False if the call
        had its reply before.
        """
        step = self._steps.get(call)
        if step is None or call.finished:
            return False
        sequence, runs = step.sequence, step.runs
        del self._steps[call]
        step.stop_waiting()
        if runs:
            self._batchers[sequence.instance].caller_left(step.inner)
        call.finished = True
        call.forget()
        if not runs:
            self.statistics.count_failure(CallerLeft.outcome, self._clock.now() - call.arrived_s)
        self._lose(sequence, CallerLeft())
        if runs:
            self._ended(sequence)
        return True

    def instance_died(self, instance: int) -> None:
        """End the sequences of an instance whose process has died. Steps that wait for it fail when it has run."""
        error = InstanceDied("the model's process died")
        for sequence in self.table.sequences():
            if sequence.row >= 0 and sequence.instance == instance:
                self._lose(sequence, error)

    def close(self) -> None:
        """Fail the waiting steps and accept no more; running batches end on their own."""
        self._closed = True
        for sequence in self.table.sequences():
            self._lose(sequence, ServerStopping())
        for batcher in self._batchers:
            batcher.close()
        for timer in (self._expiry, self._idle):
            if timer is not None:
                timer.cancel()

    # Steps ------------------------------------------------------------------------------------------------------

    def _step(self, call: Call) -> _Step:
        """Read what a call says about its sequence. Raises InvalidRequest, ServerStopping."""
        if self._closed:
            raise ServerStopping()
        name = self.spec.name
        parameters: Mapping[str, ParameterValue] = call.source[0].parameters if call.source is not None else {}
        if self._scans is not None and is_scan(parameters):
            flags = Flags(f"\0scan{next(self._numbers)}", True, True)
            return _Step(call, (call.ticket.tenant, flags.id), flags, {}, Scan(call, self._scans))
        if self._rules.iterative:
            flags = Flags(next(self._numbers), True, True)
        else:
            flags = read_flags(parameters, name)
        if call.rows != 1:
            raise InvalidRequest(
                f"inference request to model {name!r} must specify batch-size 1 due to requirements of sequence batcher"
            )
        key = (call.ticket.tenant, flags.id)
        if self.table.is_foreign(key):
            raise InvalidRequest(
                f"sequence {_shown(flags.id)} of model {name!r} is in use by another tenant, and this model tells "
                "sequences apart by their ids alone: use another id, such as a random number"
            )
        shown = flags._replace(end=False) if self._rules.iterative else flags
        return _Step(call, key, flags, self._controls.of(shown))

    def _not_open(self, key: Key) -> InvalidRequest:
        text = (
            f"inference request for sequence {_shown(key[1])} to model {self.spec.name!r} must specify the START flag "
            "on the first request of the sequence"
        )
        how = self.table.lost(key, self._clock.now())
        return InvalidRequest(
            text if how is None else f"{text}: the one before it was lost, because {why_lost(how, self._rules.idle_s)}"
        )

    def _place(self) -> None:
        """Give free slots to waiting sequences, and run their first steps."""
        if self._placing:
            return  # the loop below goes on: what a step does that ends at once must not be nested
        self._placing = True
        try:
            while (sequence := self.table.place()) is not None:
                self._advance(sequence)
        finally:
            self._placing = False

    def _advance(self, sequence: OpenSequence[_Step]) -> None:
        """Run the next step of a sequence, if none of it runs."""
        step = self.table.take(sequence)
        if step is not None:
            self._run(sequence, step)

    def _run(self, sequence: OpenSequence[_Step], step: _Step) -> None:
        call, flags = step.call, step.flags
        if self._queue.remove(call.ticket):
            call.again()
        if step.scan is not None:
            if self._rules.padded:
                step.scan.placed(sequence.row)
            call.inputs = {}
            self._begin_round(step, step.scan)
            return
        state = self._controls.initial if flags.start else sequence.state
        inputs = {**call.inputs, **step.controls, **state}
        if self._rules.padded:
            inputs[SLOT.name] = np.array([sequence.row])
        if self._varies:
            call.signature = (call.signature, *[state[name].shape for name in self._varies])
        call.inputs = inputs
        if self._rules.iterative:
            self._iterate(step, start=True)
            return
        call.reply = partial(self._replied, step)
        self._batchers[sequence.instance].submit(call)

    def _iterate(self, step: _Step, *, start: bool) -> None:
        """Execute an iterative request: for the first time with START, then until the model releases it."""
        call, flags = step.call, step.flags
        assert call.source is not None
        request, context = call.source
        shown: dict[str, ParameterValue] = {ID: flags.id, SEQUENCE_START: start, SEQUENCE_END: False}
        request = replace(request, parameters=request.parameters | shown)
        inputs = call.inputs if start else {**call.inputs, **self._controls.of(Flags(flags.id, False, False))}
        step.inner = replace(
            call,
            inputs=inputs,
            deadline=step.inner.deadline,  # the responses of a decoupled model extend it
            source=(request, context),
            reply=partial(self._replied, step),
        )
        self._batchers[step.sequence.instance].submit(step.inner)

    def _begin_round(self, step: _Step, scan: Scan) -> None:
        """Queue the next round of a scan. Once it has begun, a full queue does not refuse it."""
        call = step.call
        step.inner = replace(
            call,
            inputs=scan.round(),
            signature=scan.signature,
            admitted=call.admitted or scan.done > 0,
            emit=None,
            reply=partial(self._round_ended, step, scan),
        )
        step.inner.ticket.cost = max(1.0, scan.last_steps)
        self._batchers[step.sequence.instance].submit(step.inner)

    def _round_ended(self, step: _Step, scan: Scan, result: Answer | InferenceError) -> None:
        """Take the answer of a round, pass on what is streamed, and begin the next round or end the scan."""
        call, step.late = step.call, None
        if call not in self._steps:
            return
        if scan.error is not None:
            result = scan.error
        if isinstance(result, Answer):
            scan.charge(result)
            if step.sequence.ends is not End.END:
                result = QueueFull(self._no_memory)  # another tenant has taken its room
            else:  # its states may have grown
                result = self._hold(step.sequence, scan.held()) or result
        if isinstance(result, InferenceError):
            self._replied(step, result)
        elif call.emit is not None:
            step.late = self._clock.call_at(
                call.deadline, partial(self._round_ended, step, scan, DeadlineExceeded("compute"))
            )
            call.emit(scan.outputs(), partial(self._go_on, step, scan, result))
        else:
            self._go_on(step, scan, result)

    def _go_on(self, step: _Step, scan: Scan, last: Answer) -> None:
        """Begin the next round of a scan, or answer it."""
        step.stop_waiting()
        if step.call not in self._steps:
            return
        if scan.done < scan.steps:
            self._begin_round(step, scan)
        else:
            self._replied(step, scan.answer(last))

    def _replied(self, step: _Step, result: Answer | InferenceError) -> None:
        """Take the answer of a step from its batcher, run the next step, and pass the answer on."""
        died = step.sequence.ends is End.DIED
        if isinstance(result, Answer) and type(result.outputs) is Outputs and result.outputs.again and not died:
            if step.call in self._steps:
                self._iterate(step, start=False)
            return
        if self._steps.pop(step.call, None) is not None:
            sequence = step.sequence
            if isinstance(result, Answer) and died:
                result = InstanceDied("the model's process died")
            elif isinstance(result, Answer) and step.scan is None:
                result = self._kept(step, result)
            if isinstance(result, InferenceError) and not died:
                self._lose(sequence, result)
            self._ended(sequence)
        if step.inner is not step.call:
            step.call.finished = True
            step.call.forget()
        step.reply(result)

    def _kept(self, step: _Step, answer: Answer) -> Answer | InferenceError:
        """Keep the state that a step leaves; return the answer without it."""
        outputs = answer.outputs
        if self._outputs and not step.flags.end:
            # Copies, because the outputs of a step are views that would keep the whole batch in memory.
            refused = self._hold(step.sequence, {name: outputs[index].copy() for name, index in self._outputs})
            if refused is not None:
                return refused
        return answer if self._visible is None else replace(answer, outputs=outputs[: self._visible])

    def _hold(self, sequence: OpenSequence[_Step], state: dict[str, Array]) -> InferenceError | None:
        """Keep arrays of a sequence, within the budget of all; return the error if there is no room."""
        displaced = self.table.keep(sequence, state)
        if displaced is None:
            return QueueFull(self._no_memory)
        for loser in displaced:
            self._lose(loser, QueueFull(self._no_memory))
        return None

    def _ended(self, sequence: OpenSequence[_Step]) -> None:
        """Handle the end of the running step of a sequence."""
        self.table.finished(sequence, self._clock.now())
        self._advance(sequence)
        self._place()
        if self._idle is None and not self._closed:
            self._arm_idle()

    # Ends -------------------------------------------------------------------------------------------------------

    def _lose(self, sequence: OpenSequence[_Step], error: InferenceError, refused: _Step | None = None) -> None:
        """End a sequence for the error of one of its steps, with all steps that wait. refused: one that gets `error`
        itself.
        """
        how = how_ended(error)
        steps = self.table.lose(sequence, how, self._clock.now())
        for each in steps:
            self._steps.pop(each.call, None)
            self._queue.remove(each.call.ticket)
            if each is refused or isinstance(error, ServerStopping):
                self._fail(each.call, error)
            elif not each.call.finished:
                why = why_lost(how, self._rules.idle_s)
                text = f"sequence {_shown(each.key[1])} of model {self.spec.name!r} was lost, because {why}"
                self._fail(each.call, InvalidRequest(f"{text}: begin it again with the START flag"))
            each.call.inputs = {}
        if (running := sequence.running) is not None and running.stop_waiting():
            self._replied(running, error)
        self._place()

    def _lose_waiting(self, call: Call, error: InferenceError) -> None:
        """End the sequence of a step that waited."""
        step = self._steps.get(call)
        if step is not None:
            self._lose(step.sequence, error, step)

    def _fail(self, call: Call, error: InferenceError) -> None:
        if call.finished:
            call.forget()
            return
        call.finished = True
        self.statistics.count_failure(error.outcome, self._clock.now() - call.arrived_s)
        deliver(call, error, self.spec.name)

    # Timers -----------------------------------------------------------------------------------------------------

    def _on_idle(self) -> None:
        self._idle = None
        self.table.expire(self._clock.now())
        self._place()
        self._arm_idle()

    def _arm_idle(self) -> None:
        at_s = self.table.next_idle_s()
        if at_s is not None:
            self._idle = self._clock.call_at(at_s, self._on_idle)

    def _arm_expiry(self, at_s: float) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry_at = at_s
        self._expiry = self._clock.call_at(at_s, self._on_expiry)

    def _on_expiry(self) -> None:
        self._expiry = None
        for ticket in self._queue.expire(self._clock.now()):
            call = ticket.payload
            if call is not None:
                self._lose_waiting(call, lateness(call))
        following = self._queue.next_deadline()
        if following is not None:
            self._arm_expiry(following)


def _shown(sequence: Id) -> str:
    return sequence[:128] if isinstance(sequence, str) else str(sequence)
