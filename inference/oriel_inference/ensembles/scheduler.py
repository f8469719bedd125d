"""The scheduler of one ensemble version: each call is a flight through the graph.

Rules.
1. A step is handed to its model's own scheduler as soon as the tensors it takes exist; so branches run at the same
   time, and steps of many calls share batches. It carries the call's deadline, band, tenant and level.
2. The ensemble's own bounds admit a call or refuse it; after that no step is refused for a full queue, only for the
   deadline. The bounds count calls and the bytes of their requests and of the tensors they still hold. Three quarters
   are for everybody, the rest for the most urgent band: what was admitted is never displaced.
3. Every call is finished exactly once. Whatever ends it (its answer, a step's failure, its deadline, its caller) ends
   its other steps: they leave their queues, and rows of a running batch are dropped.
4. A call keeps the versions it began with: one that is replaced meanwhile stays open until the call has ended.
5. Tensors are passed on as they are, and a batch whose rows go on together is not gathered anew. They are dropped when
   the last step that takes them has ended.
6. Steps that no requested output needs do not run.

`max_inflight` bounds how often each step runs at once. What is over it waits here, in the usual order.

Owner and single writer: the loop.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from msgspec.structs import replace

from oriel_inference.batching.call import Answer, BatchTimes, Call, StepRun, deliver
from oriel_inference.clock import Clock
from oriel_inference.ensembles.flight import Flight
from oriel_inference.ensembles.graph import Graph, fit_rank
from oriel_inference.ensembles.turnstile import Turnstile
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
from oriel_inference.lifecycle import ServingModel
from oriel_inference.model import ModelSpec
from oriel_inference.statistics import Statistics
from oriel_policies.queue import Ticket
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue, RequestedOutput, Tensor

__all__ = ["Ensemble"]


class Ensemble:
    """max_items, max_bytes: calls under way and what they hold. `bind` comes before the first call.

    statistics: counters to go on with, fresh ones by default.
    """

    units = 0
    is_short = False

    def __init__(
        self,
        spec: ModelSpec,
        *,
        clock: Clock,
        max_items: int = 10_000,
        max_bytes: int = 256 << 20,
        statistics: Statistics | None = None,
    ) -> None:
        self.spec = spec
        self.statistics = statistics or Statistics()
        self.models: tuple[ServingModel, ...] = ()
        self._graph = Graph(spec)
        self._inputs = frozenset(tensor.name for tensor in spec.inputs)
        self._outputs = frozenset(tensor.name for tensor in spec.outputs)
        self._clock = clock
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._flights: dict[Call, Flight] = {}
        self._size_bytes = 0
        self._turnstiles = [Turnstile[Flight](spec.max_inflight) for _ in spec.steps if spec.max_inflight]
        self._closed = False

    def bind(self, models: Sequence[ServingModel]) -> None:
        """What the steps run on from the next call on, in their order. The caller has judged that it fits."""
        self.models = tuple(models)

    @property
    def pending(self) -> int:
        """Steps that wait for their turn."""
        return sum(len(turnstile) for turnstile in self._turnstiles)

    @property
    def running(self) -> int:
        """Calls under way."""
        return len(self._flights)

    def expected_wait_s(self, band: int) -> float | None:
        """Seconds a call of `band` that came now would wait in its steps' queues; None if that is not known."""
        after: dict[int, float] = {}
        for index, makers in self._graph.makers.items():
            wait_s = self.models[index].batcher.expected_wait_s(band)
            if wait_s is None:
                return None
            after[index] = wait_s + max((after[each] for each in makers), default=0.0)
        return max(after.values())

    def submit(self, call: Call) -> None:
        """Take `call`; its reply comes later on the loop, or now if it is refused."""
        now = self._clock.now()
        if self._closed:
            self._refuse(call, ServerStopping())
        elif call.ticket.deadline <= now:
            self._refuse(call, DeadlineExceeded("queue"))
        elif not call.ticket.admitted and self._full(call.ticket):
            self._refuse(call, QueueFull(f"ensemble {self.spec.name!r} has as many requests under way as it may"))
        else:
            self._begin(call)

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Nothing waits at an ensemble itself: what waits stands in its models' queues."""
        return [(0, 0, self.expected_wait_s(0))]

    def leave(self, call: Call) -> bool:
        """The caller went away: no reply. Every step of it leaves at once. False if the call had its reply before."""
        flight = self._flights.get(call)
        if flight is None or call.finished:
            return False
        call.finished = True
        call.forget()
        self._end(flight)
        self.statistics.failed(CallerLeft.outcome, self._clock.now() - call.arrived_s)
        return True

    def close(self) -> None:
        """Fail what is under way. Nothing is taken afterwards."""
        self._closed = True
        for flight in list(self._flights.values()):
            self._fail(flight, ServerStopping())

    # A flight ---------------------------------------------------------------------------------------------------

    def _full(self, ticket: Ticket) -> bool:
        share = 0.75 if ticket.band else 1.0
        return (
            len(self._flights) >= max(1, int(self._max_items * share))
            or self._size_bytes + ticket.size_bytes > self._max_bytes * share
        )

    def _begin(self, call: Call) -> None:
        flight = Flight(call, self.models, self._graph, self._asked(call))
        self._flights[call] = flight
        self._size_bytes += flight.size_bytes
        for model in flight.models:
            model.holds += 1
        batched = self.spec.batched
        ready: list[int] = []
        for tensor in self.spec.inputs:
            array = call.inputs.get(tensor.name)
            if array is not None and tensor.engine_dims is not None:
                array = array.reshape((array.shape[0], *tensor.engine_dims) if batched else tensor.engine_dims)
            ready += self._arrived(flight, tensor.name, array)
        self._start(flight, ready)

    def _asked(self, call: Call) -> frozenset[str]:
        asked = call.source[0].outputs if call.source is not None else None
        return frozenset([output.name for output in asked]) if asked else self._outputs

    def _arrived(self, flight: Flight, tensor: str, array: Array | None) -> list[int]:
        """A tensor exists; the steps that waited for nothing else."""
        flight.tensors[tensor] = array
        ready: list[int] = []
        for index in self._graph.consumers[tensor]:
            flight.missing[index] -= 1
            if not flight.missing[index] and index in flight.needed:
                ready.append(index)
        return ready

    def _start(self, flight: Flight, steps: Sequence[int]) -> None:
        for index in steps:
            if flight.ended:
                return
            if not self._turnstiles or self._turnstiles[index].enter():
                self._run(flight, index)
                continue
            flight.waiting[index] = self._turnstiles[index].wait(flight, flight.call.ticket)
            if flight.timer is None:
                flight.timer = self._clock.call_at(flight.call.deadline, lambda: self._late(flight))

    def _run(self, flight: Flight, index: int) -> None:
        """Hand a step to its model. Its turn is taken."""
        step, model, outer = self.spec.steps[index], flight.models[index], flight.call
        now = self._clock.now()
        try:
            request = self._request(flight, index)
            fitted = model.fitter.fit(request)
        except (InferenceError, BadMessage) as error:
            self._release(index)
            cause = error if isinstance(error, InferenceError) else BackendFailed(error.message)
            self._fail(flight, StepFailed(self.spec.name, step.model, cause))
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
            reply=lambda result: self._replied(flight, index, now, result),
            band=outer.ticket.band,
            tenant=outer.ticket.tenant,
            size_bytes=sum([array.nbytes for array in fitted.inputs.values()]),
            level=fitted.level,
            admitted=True,
            source=self._source(outer, request, step.outputs) if model.wants_source else None,
            request_id=outer.request_id,
            caller=outer.caller,
        )
        flight.running[index] = call
        model.batcher.submit(call)

    def _request(self, flight: Flight, index: int) -> InferRequest:
        """A step as a request of its own, so that its model judges it like any other."""
        spec, step = flight.models[index].spec, self.spec.steps[index]
        tensors: list[Tensor] = []
        for known in spec.inputs:
            source = step.inputs.get(known.name)
            array = None if source is None else flight.tensors[source]
            if source is not None and array is not None:
                if not array.flags.c_contiguous:  # a model may answer with any view of its own
                    array = np.ascontiguousarray(array)
                array = fit_rank(array, known.dims, batched=spec.batched, tensor=source)
                tensors.append(Tensor(known.name, known.datatype, array.shape, array))
        level = flight.call.level
        parameters: dict[str, ParameterValue] = {"priority": level} if level else {}
        return InferRequest(model_name=spec.name, inputs=tensors, parameters=parameters)

    def _source(
        self, outer: Call, request: InferRequest, mapped: Iterable[str]
    ) -> tuple[InferRequest, CallContext] | None:
        """The step as its client's request, for models that want to know on whose behalf they run."""
        if outer.source is None:
            return None
        asked, context = outer.source
        step = replace(
            asked,
            model_name=request.model_name,
            model_version="",
            inputs=request.inputs,
            outputs=[RequestedOutput(name) for name in mapped],
        )
        return step, context

    def _replied(self, flight: Flight, index: int, queued_s: float, result: Answer | InferenceError) -> None:
        ended = flight.running.pop(index)
        if isinstance(result, Answer):
            ended.inputs = {}  # a batch that failed one of its calls may still be reading them
        self._release(index)
        step, model = self.spec.steps[index], flight.models[index]
        if isinstance(result, InferenceError):
            late = isinstance(result, DeadlineExceeded | DeadlineTooShort | ServerStopping)
            self._fail(flight, result if late else StepFailed(self.spec.name, step.model, result))
            return
        flight.todo -= 1
        flight.steps.append(StepRun(step.model, model.version, queued_s, result))
        flight.charge(result)
        for tensor in set(step.inputs.values()):
            self._used(flight, tensor)
        ready: list[int] = []
        for known, array in zip(model.spec.outputs, result.outputs, strict=True):
            tensor = step.outputs.get(known.name, "")
            if tensor and flight.uses[tensor]:
                if array is None:
                    error = BackendFailed(f"it gave no output {known.name[:64]!r}")
                    self._fail(flight, StepFailed(self.spec.name, step.model, error))
                    return
                size = _nbytes(array)
                flight.size_bytes += size
                self._size_bytes += size
                ready += self._arrived(flight, tensor, array)
        if flight.todo:
            self._start(flight, ready)
        else:
            self._answer(flight)

    def _used(self, flight: Flight, tensor: str) -> None:
        flight.uses[tensor] -= 1
        if flight.uses[tensor] or tensor in self._inputs:
            return  # the request holds its own to its end
        size = _nbytes(flight.tensors.pop(tensor))
        flight.size_bytes -= size
        self._size_bytes -= size

    # Endings ----------------------------------------------------------------------------------------------------

    def _answer(self, flight: Flight) -> None:
        call, now = flight.call, self._clock.now()
        try:
            outputs = [
                self._output(flight, number) if output.name in flight.outputs else None
                for number, output in enumerate(self.spec.outputs)
            ]
        except InferenceError as error:
            self._fail(flight, error)
            return
        call.finished = True
        self._end(flight)
        began = min(step.answer.times.started_s for step in flight.steps)
        assembled, computed, split = flight.stages
        stages = BatchTimes(0.0, assembled, assembled + computed, assembled + computed + split, call.rows)
        self.statistics.executed(stages, 1)
        self.statistics.succeeded(queue_s=began - call.arrived_s, total_s=now - call.arrived_s)
        times = BatchTimes(began, began, now, now, call.rows)
        self._reply(call, Answer(cast(list[Array], outputs), times, flight.cost_us, flight.steps))

    def _output(self, flight: Flight, number: int) -> Array:
        spec = self.spec.outputs[number]
        batched = self.spec.batched
        array = flight.tensors[spec.name]
        if array is None:
            raise BackendFailed(f"ensemble {self.spec.name!r} got no output {spec.name[:64]!r}")
        engine_dims = spec.dims if spec.engine_dims is None else spec.engine_dims
        array = fit_rank(array, engine_dims, batched=batched, tensor=spec.name)
        if spec.engine_dims is not None:
            array = array.reshape((array.shape[0], *spec.dims) if batched else spec.dims)
        return array

    def _late(self, flight: Flight) -> None:
        self._fail(flight, DeadlineExceeded("queue" if flight.waiting else "compute"))

    def _fail(self, flight: Flight, error: InferenceError) -> None:
        if flight.ended:
            return
        flight.call.finished = True
        self._end(flight)
        self._failed(flight.call, error)

    def _refuse(self, call: Call, error: InferenceError) -> None:
        call.finished = True
        self._failed(call, error)

    def _failed(self, call: Call, error: InferenceError) -> None:
        self.statistics.failed(error.outcome, self._clock.now() - call.arrived_s)
        self._reply(call, error)

    def _end(self, flight: Flight) -> None:
        """Give everything back that the flight holds; its steps leave."""
        flight.ended = True
        del self._flights[flight.call]
        flight.call.inputs = {}
        flight.tensors = {}
        self._size_bytes -= flight.size_bytes
        if flight.timer is not None:
            flight.timer.cancel()
        waiting, flight.waiting = flight.waiting, {}
        for index, ticket in waiting.items():
            self._turnstiles[index].leave(ticket)
        running, flight.running = flight.running, {}
        for index, call in running.items():
            flight.models[index].batcher.leave(call)
            self._release(index)
        for model in flight.models:
            model.holds -= 1

    def _release(self, index: int) -> None:
        """A step gives its turn back; who waited for it runs later in this turn of the loop."""
        flight = self._turnstiles[index].release() if self._turnstiles else None
        if flight is not None:
            del flight.waiting[index]
            self._clock.call_soon(lambda: self._resume(flight, index))

    def _resume(self, flight: Flight, index: int) -> None:
        if flight.ended:
            self._release(index)
        else:
            self._run(flight, index)

    def _reply(self, call: Call, result: Answer | InferenceError) -> None:
        deliver(call, result, self.spec.name)


def _nbytes(array: Array | None) -> int:
    return 0 if array is None else array.nbytes
