"""The scheduler of one ensemble version; each call moves through the graph on its own.

Rules.
1. A step is given to its model's own scheduler as soon as the tensors it takes exist, so branches run at the same time
   and steps of many calls share batches. It carries the call's deadline, band, tenant and level.
2. The ensemble's own bounds admit a call or refuse it. After that no step is refused for a full queue, only for the
   deadline. The bounds count calls, the bytes of their requests and the bytes of the tensors they still hold. Three
   quarters are for all bands, the rest for the most urgent band: an admitted call is never displaced.
3. Every call is finished exactly once. Whatever ends it (its answer, the failure of a step, its deadline, its caller)
   ends its other steps: they leave their queues, and their rows of a running batch are dropped.
4. A call keeps the versions it began with: one that is replaced meanwhile stays open until the call has ended.
5. Tensors are passed on as they are, and a batch whose rows go on together is not assembled anew. A tensor is dropped
   when the last step that takes it has ended. Tensors that only steps on the same device need stay in its memory.
6. Steps that no requested output needs do not run.
7. The steps behind a decoupled one run once for each of its responses, one response after the other, and each of them
   makes a response of the ensemble.

`max_inflight` bounds how often each step runs at once. Further calls wait here in the usual order.

Owner and single writer: the loop.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import cast

import numpy as np
from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.assemble import reshaped_if_it_fits
from oriel_inference.batching.call import NOTHING_KEPT, Answer, BatchTimes, Call, StepRun, deliver
from oriel_inference.batching.device import Accounts
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.requests import IDLE_S, MAX_S
from oriel_inference.batching.statistics import Statistics
from oriel_inference.catalog import ServingModel
from oriel_inference.ensembles.call_state import CallState, Flow, StepLimit
from oriel_inference.ensembles.graph import Graph, fit_rank, origins_of
from oriel_inference.errors import (
    BackendFailed,
    CallerLeft,
    DeadlineExceeded,
    DeadlineTooShort,
    InferenceError,
    QueueFull,
    ServerStopping,
    StepFailed,
)
from oriel_inference.model import ModelSpec
from oriel_inference.sequences.flags import END, ID, START
from oriel_policies.waiting.flows import Ticket
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import quoted
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue, RequestedOutput, Tensor


class Ensemble:
    """Runs the calls of one ensemble version. `bind` is called before the first call.

    machine: its bounds are those of the calls in progress and of the bytes that they hold.
    statistics: counters to continue; new ones by default.
    """

    units = 0
    share = 0.0
    is_short = False
    resident = None

    def __init__(
        self,
        spec: ModelSpec,
        machine: Machine,
        statistics: Statistics | None = None,
    ) -> None:
        self.spec = spec
        self.accounts = Accounts(machine.devices, spec.name, str(spec.version), machine.devices.host)
        self.statistics = statistics or Statistics()
        self.models: tuple[ServingModel, ...] = ()
        self._graph = Graph(spec)
        self._origins: dict[int, int] = {}
        self._last = -1  # the origin of the outputs
        self._inputs = frozenset(tensor.name for tensor in spec.inputs)
        self._outputs = frozenset(tensor.name for tensor in spec.outputs)
        self._clock = machine.clock
        self._max_items = machine.max_items
        self._max_bytes = machine.max_bytes
        self._states: dict[Call, CallState] = {}
        self._size_bytes = 0
        self._limits = [StepLimit(spec.max_inflight) for _ in spec.steps if spec.max_inflight]
        self._closed = False

    def bind(self, models: Sequence[ServingModel]) -> None:
        """Set the models of the steps, in their order, for all further calls. The caller has checked that they fit."""
        self.models = tuple(models)
        self._origins, self._last = origins_of(self.spec, [model.spec for model in models], self.spec.name)

    @property
    def pending(self) -> int:
        """Return the number of steps that wait for the concurrency limit."""
        return sum(len(limit) for limit in self._limits)

    @property
    def running(self) -> int:
        """Return the number of calls in progress."""
        return len(self._states)

    def expected_wait_s(self, band: int) -> float | None:
        """Return how many seconds a new call of `band` would wait in the queues of its steps; None if unknown."""
        after: dict[int, float] = {}
        for index, makers in self._graph.makers.items():
            wait_s = self.models[index].batcher.expected_wait_s(band)
            if wait_s is None:
                return None
            after[index] = wait_s + max((after[each] for each in makers), default=0.0)
        return max(after.values())

    def submit(self, call: Call) -> None:
        """Accept `call`; its reply comes later on the loop, or immediately if it is refused."""
        now = self._clock.now()
        if self._closed:
            self._refuse(call, ServerStopping())
        elif call.ticket.deadline <= now:
            self._refuse(call, DeadlineExceeded("queue"))
        elif not call.ticket.admitted and self._full(call.ticket):
            self._refuse(
                call, QueueFull(f"ensemble {self.spec.name!r} already has its maximum number of requests in progress")
            )
        else:
            self._begin(call)

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Return the expected wait. No call waits at an ensemble itself; its steps wait in the queues of their
        models.
        """
        return [(0, 0, self.expected_wait_s(0))]

    def caller_left(self, call: Call) -> bool:
        """Remove a call whose caller went away, without a reply; all its steps leave at once. Returns False if the call
        had its reply before.
        """
        state = self._states.get(call)
        if state is None or call.finished:
            return False
        call.finished = True
        call.forget()
        self._end(state)
        self.statistics.count_failure(CallerLeft.outcome, self._clock.now() - call.arrived_s)
        return True

    def close(self) -> None:
        """Fail the calls in progress and accept no more."""
        self._closed = True
        for state in list(self._states.values()):
            self._fail(state, ServerStopping())

    # Calls in progress ------------------------------------------------------------------------------------------

    def _full(self, ticket: Ticket) -> bool:
        share = 0.75 if ticket.band else 1.0
        return (
            len(self._states) >= max(1, int(self._max_items * share))
            or self._size_bytes + ticket.size_bytes > self._max_bytes * share
        )

    def _begin(self, call: Call) -> None:
        state = CallState(call, self.models, self._graph, self._requested(call), self._origins, self._last)
        self._states[call] = state
        self._size_bytes += state.size_bytes
        for model in state.models:
            model.holds += 1
        batched = self.spec.batched
        ready: list[int] = []
        for tensor in self.spec.inputs:
            array = call.inputs.get(tensor.name)
            if array is not None and tensor.engine_dims is not None:
                array = array.reshape((array.shape[0], *tensor.engine_dims) if batched else tensor.engine_dims)
            ready += self._arrived(state, tensor.name, array)
        self._start(state, ready)

    def _requested(self, call: Call) -> frozenset[str]:
        requested = call.source[0].outputs if call.source is not None else None
        return frozenset([output.name for output in requested]) if requested else self._outputs

    def _arrived(self, state: CallState, tensor: str, array: Array | None) -> list[int]:
        """Store a tensor; return the steps that waited for nothing else."""
        state.tensors[tensor] = array
        ready: list[int] = []
        for index in self._graph.consumers[tensor]:
            state.missing[index] -= 1
            if not state.missing[index] and index in state.needed:
                ready.append(index)
        return ready

    def _start(self, state: CallState, steps: Sequence[int]) -> None:
        for index in steps:
            if state.ended:
                return
            if not self._limits or self._limits[index].acquire():
                self._run(state, index)
                continue
            state.waiting[index] = self._limits[index].wait(state, state.call.ticket)
            if state.timer is None:
                state.timer = self._clock.call_at(state.call.deadline, lambda: self._late(state))

    def _run(self, state: CallState, index: int) -> None:
        """Give a step to its model. Its place under the concurrency limit is taken."""
        step, model, outer = self.spec.steps[index], state.models[index], state.call
        now = self._clock.now()
        try:
            request = self._request(state, index)
            fitted = model.fitter.fit(request)
        except (InferenceError, BadMessage) as error:
            self._release(index)
            cause = error if isinstance(error, InferenceError) else BackendFailed(error.message)
            self._fail(state, StepFailed(self.spec.name, step.model, cause))
            return
        policy = model.spec.queue.of(fitted.level)
        deadline, give_up_s = policy.limits(now, outer.deadline, None)
        call = Call(
            inputs=fitted.inputs,
            rows=fitted.rows,
            signature=fitted.signature,
            arrived_s=now,
            deadline=deadline,
            give_up_s=give_up_s,
            delays=policy.delays,
            reply=lambda result: self._replied(state, index, now, result),
            band=outer.ticket.band,
            tenant=outer.ticket.tenant,
            size_bytes=sum([array.nbytes for array in fitted.inputs.values()]),
            level=fitted.level,
            admitted=True,
            source=self._source(outer, request, step.outputs) if model.wants_source else None,
            request_id=outer.request_id,
            caller=outer.caller,
            usage=outer.usage,
            keep=self._kept(state, index) if model.batcher.resident else NOTHING_KEPT,
            emit=partial(self._responded, state, index) if model.spec.decoupled else None,
        )
        state.running[index] = call
        model.batcher.submit(call)

    def _kept(self, state: CallState, index: int) -> frozenset[str]:
        """Return the outputs of a step that only steps on the same device need."""
        memory = state.models[index].batcher.resident
        found = []
        for name, tensor in self.spec.steps[index].outputs.items():
            takers = state.needed.intersection(self._graph.consumers[tensor])
            if tensor not in state.outputs and all(state.models[each].batcher.resident == memory for each in takers):
                found.append(name)
        return frozenset(found)

    def _request(self, state: CallState, index: int) -> InferRequest:
        """Build a step's request, so that its model checks it like any other."""
        spec, step = state.models[index].spec, self.spec.steps[index]
        tensors: list[Tensor] = []
        for known in spec.inputs:
            source = step.inputs.get(known.name)
            array = None if source is None else state.tensors[source]
            if source is not None and array is not None:
                if not array.flags.c_contiguous:  # a model may return any view of its own
                    array = np.ascontiguousarray(array)
                if self._is_batched(state, source) != spec.batched:
                    array = fit_rank(array, known.dims, batched=spec.batched, tensor=source)
                tensors.append(Tensor(known.name, known.datatype, array.shape, array))
        level = state.call.level
        parameters: dict[str, ParameterValue] = {"priority": level} if level else {}
        return InferRequest(model_name=spec.name, inputs=tensors, parameters=parameters)

    def _source(
        self, outer: Call, request: InferRequest, mapped: Iterable[str]
    ) -> tuple[InferRequest, CallContext] | None:
        """Return the step as the client's request, for models that take the client's request and its context."""
        if outer.source is None:
            return None
        requested, context = outer.source
        step = replace(
            requested,
            model_name=request.model_name,
            model_version="",
            inputs=request.inputs,
            outputs=[RequestedOutput(name) for name in mapped],
        )
        return step, context

    def _replied(self, state: CallState, index: int, queued_s: float, result: Answer | InferenceError) -> None:
        ended = state.running.pop(index)
        if isinstance(result, Answer):
            ended.inputs = {}  # a batch that failed one of its calls may still be reading them
        self._release(index)
        step, model = self.spec.steps[index], state.models[index]
        if isinstance(result, InferenceError):
            late = isinstance(result, DeadlineExceeded | DeadlineTooShort | ServerStopping)
            self._fail(state, result if late else StepFailed(self.spec.name, step.model, result))
            return
        # The call remembers its steps to its end, which must not keep memory of the device.
        remembered = replace(result, outputs=()) if ended.keep else result
        if state.origins[index] < 0:
            state.steps.append(StepRun(step.model, model.version, queued_s, remembered))
        state.charge(result)
        for tensor in set(step.inputs.values()):
            self._used(state, tensor)
        if index in state.flows:
            state.flows[index].over = True
            self._go_on(state, index)
            return
        state.todo[state.origins[index]] -= 1
        self._made(state, index, result.outputs, state.origins[index])

    def _made(self, state: CallState, index: int, outputs: Sequence[Array], origin: int) -> None:
        """Store the outputs of a step, and start the steps that waited for nothing else, or end their share of the
        graph.
        """
        step, model, ready = self.spec.steps[index], state.models[index], list[int]()
        others = outputs.datatypes if type(outputs) is Outputs else {}
        for number, (known, array) in enumerate(zip(model.spec.outputs, outputs, strict=True)):
            tensor = step.outputs.get(known.name, "")
            if tensor and state.uses[tensor]:
                if array is None or number in others:
                    text = f"it returned no output {quoted(known.name)}"
                    if number in others:
                        text = f"its output {quoted(known.name)} is {others[number]}, not {known.datatype}"
                    self._fail(state, StepFailed(self.spec.name, step.model, BackendFailed(text)))
                    return
                size = _nbytes(array)
                state.size_bytes += size
                self._size_bytes += size
                ready += self._arrived(state, tensor, array)
        if state.todo[origin]:
            self._start(state, ready)
        else:
            self._emit(state, origin)

    def _responded(self, state: CallState, index: int, outputs: Sequence[Array], consumed: Callable[[], None]) -> None:
        """Take a response of a decoupled step."""
        if not state.ended:
            state.flows[index].waiting.append((outputs, consumed))
            self._go_on(state, index)

    def _go_on(self, state: CallState, index: int) -> None:
        """Run the steps behind a decoupled one for its next response; after the last one, end it."""
        flow, origin = state.flows[index], state.origins[index]
        if flow.consumed is not None or state.ended:
            return
        if flow.waiting:
            outputs, flow.consumed = flow.waiting.popleft()
            call, behind = state.call, [each for each in state.needed if state.origins[each] == index]
            call.deadline = max(call.deadline, min(call.arrived_s + MAX_S, self._clock.now() + IDLE_S))
            state.todo[index] = len(behind)
            for each in (index, *behind):
                state.missing[each] = self._graph.needs[each]
                state.uses |= {name: state.all_uses[name] for name in self.spec.steps[each].outputs.values()}
            state.flows |= {each: Flow() for each in behind if each in state.flows}
            self._made(state, index, outputs, index)
        elif flow.over:
            state.todo[origin] -= 1
            if not state.todo[origin]:
                self._emit(state, origin)

    def _emit(self, state: CallState, index: int) -> None:
        """End the way of one response of a decoupled step, which is a response of the ensemble if its outputs come from
        there; or the call, if `index` is the request's own origin.
        """
        if index < 0:
            self._answer(state)
            return
        flow = state.flows[index]
        consumed, flow.consumed = flow.consumed, None
        assert consumed is not None
        if index != state.last:
            consumed()
        elif state.call.emit is not None:
            try:
                found = self._found(state)
                for tensor in state.outputs:
                    self._used(state, tensor)
                state.call.emit(found, consumed)  # may end the call
            except InferenceError as error:
                self._fail(state, error)
        self._go_on(state, index)

    def _used(self, state: CallState, tensor: str) -> None:
        state.uses[tensor] -= 1
        if state.uses[tensor] or tensor in self._inputs:
            return  # the request keeps its own inputs to its end
        size = _nbytes(state.tensors.pop(tensor))
        state.size_bytes -= size
        self._size_bytes -= size

    # Finishing calls --------------------------------------------------------------------------------------------

    def _answer(self, state: CallState) -> None:
        call, now = state.call, self._clock.now()
        try:
            outputs = [] if state.last >= 0 else self._found(state)
        except InferenceError as error:
            self._fail(state, error)
            return
        if call.source is not None and ID in (parameters := call.source[0].parameters):
            # Triton's ensembles answer a step with its flags, whatever models they consist of.
            outputs = Outputs(outputs, {each: parameters.get(each) is True for each in (START, END)})
        call.finished = True
        self._end(state)
        began = min(step.answer.times.started_s for step in state.steps)
        assembled, computed, split = state.stages
        stages = BatchTimes(0.0, assembled, assembled + computed, assembled + computed + split, call.rows)
        self.statistics.executed(stages, 1)
        self.statistics.succeeded(queue_s=began - call.arrived_s, total_s=now - call.arrived_s)
        times = BatchTimes(began, began, now, now, call.rows)
        decoding = next((each.answer.decoding for each in state.steps if each.answer.decoding is not None), None)
        self._reply(call, Answer(outputs, times, state.cost_us, state.device_ns, call.usage, state.steps, decoding))

    def _found(self, state: CallState) -> list[Array]:
        """Return the outputs, None for those that were not requested. Raises InferenceError."""
        found = [
            self._output(state, number) if output.name in state.outputs else None
            for number, output in enumerate(self.spec.outputs)
        ]
        return cast(list[Array], found)

    def _output(self, state: CallState, number: int) -> Array:
        spec = self.spec.outputs[number]
        batched = self.spec.batched
        array = state.tensors[spec.name]
        if array is None:
            raise BackendFailed(f"ensemble {self.spec.name!r} got no output {spec.name[:64]!r}")
        if self._is_batched(state, spec.name) != batched:
            engine_dims = spec.dims if spec.engine_dims is None else spec.engine_dims
            array = fit_rank(array, engine_dims, batched=batched, tensor=spec.name)
        return reshaped_if_it_fits(array, spec, batched=batched)

    def _is_batched(self, state: CallState, tensor: str) -> bool:
        """Return whether what makes a tensor has a batch dimension: the ensemble for its inputs, or a step's model."""
        index = self._graph.made.get(tensor)
        return self.spec.batched if index is None else state.models[index].spec.batched

    def _late(self, state: CallState) -> None:
        if state.call.deadline > self._clock.now():  # its responses have extended it
            state.timer = self._clock.call_at(state.call.deadline, lambda: self._late(state))
        else:
            self._fail(state, DeadlineExceeded("queue" if state.waiting else "compute"))

    def _fail(self, state: CallState, error: InferenceError) -> None:
        if state.ended:
            return
        state.call.finished = True
        self._end(state)
        self._failed(state.call, error)

    def _refuse(self, call: Call, error: InferenceError) -> None:
        call.finished = True
        self._failed(call, error)

    def _failed(self, call: Call, error: InferenceError) -> None:
        self.statistics.count_failure(error.outcome, self._clock.now() - call.arrived_s)
        self._reply(call, error)

    def _end(self, state: CallState) -> None:
        """Release everything that a call holds; its steps leave their queues."""
        state.ended = True
        del self._states[state.call]
        state.call.inputs = {}
        state.tensors = {}
        self._size_bytes -= state.size_bytes
        if state.timer is not None:
            state.timer.cancel()
        waiting, state.waiting = state.waiting, {}
        for index, ticket in waiting.items():
            self._limits[index].leave(ticket)
        running, state.running = state.running, {}
        for index, call in running.items():
            state.models[index].batcher.caller_left(call)
            self._release(index)
        for model in state.models:
            model.holds -= 1

    def _release(self, index: int) -> None:
        """Free a step's place; the call that waited for it runs later in this turn of the loop."""
        state = self._limits[index].release() if self._limits else None
        if state is not None:
            del state.waiting[index]
            self._clock.call_soon(lambda: self._resume(state, index))

    def _resume(self, state: CallState, index: int) -> None:
        if state.ended:
            self._release(index)
        else:
            self._run(state, index)

    def _reply(self, call: Call, result: Answer | InferenceError) -> None:
        deliver(call, result, self.spec.name)


def _nbytes(array: Array | None) -> int:
    return 0 if array is None else array.nbytes
