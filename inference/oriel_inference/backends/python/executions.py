"""The batches that the process of a Python model works on: sends them, and handles the messages about them.

Responses of decoupled requests are limited by credit: the child sends AHEAD of them and one more for each that was
consumed, so a slow reader delays only the thread that produces for it. At most MAX_OPEN batches are in progress.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oriel_inference.backends import Execution, Outputs, Request
from oriel_inference.backends.python.frames import read_tensors, tensor_parts
from oriel_inference.backends.python.launch import Launch
from oriel_inference.backends.python.messages import (
    Answers,
    Cancel,
    Credit,
    Execute,
    Message,
    RequestHead,
    Respond,
    ResultHead,
    Returned,
)
from oriel_inference.backends.python.outcomes import error_of
from oriel_inference.backends.python.process import ModelProcess
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_wire.errors import BadMessage
from oriel_wire.observe.trace import format_traceparent
from oriel_wire.process.messages import ALIGN, Buffer, FrameError
from oriel_wire.v2.messages import Array

MAX_OPEN = 1024
# Parameters that have a meaning of their own in the v2 protocol.
_RESERVED = frozenset(("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output"))


@dataclass(slots=True, eq=False)
class _Open:
    """A batch in the child.

    first: id of its first request.
    members: indexes of the requests that were sent.
    waiting: the requests that have no answer yet.
    """

    execution: Execution
    first: int
    members: Sequence[int]
    waiting: set[int]
    caller_left: set[int] = field(default_factory=set)
    returned: bool = False
    timer: asyncio.TimerHandle | None = None


class Executions:
    """The executions of one process.

    grace_s: seconds that a batch may run on after all its callers have left.
    progressed: called when a batch has returned.
    """

    def __init__(
        self, launch: Launch, process: ModelProcess[Message], *, grace_s: float, progressed: Callable[[], None]
    ) -> None:
        self._launch = launch
        self._process = process
        self._grace_s = grace_s
        self._progressed = progressed
        self._loop = asyncio.get_running_loop()
        self._input_types = {info.name: info.datatype for info in launch.inputs}
        self._batches: dict[int, _Open] = {}
        self._by_request: dict[int, _Open] = {}
        self._held: list[Execution] = []  # returned while MAX_OPEN batches were in progress
        self._numbers = 0

    def begin(self, execution: Execution, members: Sequence[int]) -> None:
        """Send these requests of an execution; the others have their answers already. Requests that cannot be sent are
        refused.
        """
        first = self._numbers
        self._numbers += len(execution.requests)
        body: list[Buffer] = []
        try:
            heads = [self._head(first + i, execution.requests[i], body) for i in members]
            self._process.send(Execute(first, heads), body)
        except (FrameError, BadMessage, ValueError, OverflowError) as error:
            refuse(execution, BackendFailed(f"the batch cannot be sent to the model: {error}"), members)
            return
        opened = _Open(execution, first, members, set(members))
        self._batches[first] = opened
        self._by_request.update((first + i, opened) for i in members)

    def caller_left(self, execution: Execution, index: int) -> None:
        """Report that the caller of this request has left."""
        opened = next((each for each in self._batches.values() if each.execution is execution), None)
        if opened is None or index not in opened.waiting:
            return
        self._process.tell(Cancel(opened.first + index))
        opened.caller_left.add(index)
        if opened.returned and self._launch.decoupled:
            # Further messages of the model about it are dropped, so nothing waits for them.
            self._answer(opened, index, None)
        elif opened.caller_left == opened.waiting and opened.timer is None:
            why = "it kept running after all its callers had left"
            opened.timer = self._loop.call_later(self._grace_s, self._process.kill, why)

    def waiting_requests(self) -> Sequence[Request]:
        """Return the requests that the process works on and whose callers still wait."""
        return [each.execution.requests[i] for each in self._batches.values() for i in each.waiting - each.caller_left]

    def answers(self, message: Answers, body: memoryview) -> None:
        opened = self._batches.get(message.batch)
        if opened is None or len(message.results) != len(opened.members):
            self._process.kill("it answered a request that it did not have")
            return
        opened.execution.computing(message.began, message.ended)
        self._returned(opened)  # the next batch starts before the answers of this one are written
        at = 0
        for index, head in zip(opened.members, message.results, strict=True):
            result, at = self._result(head, body, at)
            self._answer(opened, index, result)

    def respond(self, message: Respond, body: memoryview) -> None:
        opened = self._by_request.get(message.request)
        if opened is None:
            return
        index = message.request - opened.first
        if message.result is not None:
            result, _ = self._result(message.result, body, 0)
            if isinstance(result, InferenceError):
                if not message.final:
                    self._process.tell(Cancel(message.request))
                self._answer(opened, index, result)
                return
            if result.again:
                self._answer(opened, index, result)
                return
            result.last = message.final
            opened.execution.respond(index, result, lambda: self._consumed(message.request))
        if message.final:
            self._answer(opened, index, None)

    def _consumed(self, request: int) -> None:
        if request in self._by_request:
            self._process.tell(Credit(request, 1))

    def _result(self, head: ResultHead, body: memoryview, at: int) -> tuple[Outputs | InferenceError, int]:
        try:
            parts, at = read_tensors(head.tensors, body, at)
        except (FrameError, BadMessage) as error:
            after = at + sum(each.size + -each.size % ALIGN for each in head.tensors)  # the next result begins there
            return BackendFailed(f"the model's answer cannot be read: {error}"), after
        if head.error is not None:
            return error_of(*head.error), at
        if head.again:
            return Outputs([None] * len(self._launch.outputs), again=True), at
        found = {name: (datatype, array) for name, datatype, array in parts}
        arrays: list[Array | None] = []
        others: dict[int, str] = {}
        for number, info in enumerate(self._launch.outputs):
            datatype, array = found.get(info.name, (info.datatype, None))
            if datatype != info.datatype:
                others[number] = datatype
            arrays.append(array)
        return Outputs(arrays, head.parameters, datatypes=others), at

    def _answer(self, opened: _Open, index: int, result: Outputs | InferenceError | None) -> None:
        if index not in opened.waiting:
            return
        opened.waiting.discard(index)
        opened.caller_left.discard(index)
        del self._by_request[opened.first + index]
        opened.execution.answer(index, result)
        self._forget(opened)

    def returned(self, message: Returned) -> None:
        """Handle the return of `execute` of a decoupled model."""
        opened = self._batches.get(message.batch)
        if opened is not None:
            self._returned(opened)

    def _returned(self, opened: _Open) -> None:
        if opened.returned:
            return
        self._progressed()
        opened.returned = True
        if opened.timer is not None:
            opened.timer.cancel()
        for index in tuple(opened.caller_left) if self._launch.decoupled else ():
            self._answer(opened, index, None)
        self._held.append(opened.execution)
        self._forget(opened)

    def _forget(self, opened: _Open) -> None:
        """Forget a batch that has returned and has no request left; that makes room for another one."""
        if opened.returned and not opened.waiting:
            self._batches.pop(opened.first, None)
        while self._held and len(self._batches) < MAX_OPEN:
            self._held.pop().returned()

    def fail_all(self, error: InferenceError) -> list[Execution]:
        """Fail every request because the process is gone. Returns the executions that had not returned."""
        batches, self._batches = list(self._batches.values()), {}
        self._by_request.clear()
        stuck, self._held = self._held, []
        for opened in batches:
            if opened.timer is not None:
                opened.timer.cancel()
            for index in sorted(opened.waiting):
                opened.execution.answer(index, error)
            if not opened.returned:
                stuck.append(opened.execution)
        return stuck

    def _head(self, number: int, request: Request, body: list[Buffer]) -> RequestHead:
        client_request = request.client_request
        parameters = client_request.parameters if client_request is not None else {}
        sequence, timeout = parameters.get("sequence_id", 0), parameters.get("timeout", 0)
        if isinstance(sequence, int):
            sequence %= 1 << 64  # gRPC clients send the upper half of these numbers as negative ones
        return RequestHead(
            id=number,
            request_id=client_request.id if client_request is not None else "",
            correlation=sequence if isinstance(sequence, int | str) else 0,
            flags=bool(parameters.get("sequence_start")) + 2 * bool(parameters.get("sequence_end")),
            timeout_us=timeout if isinstance(timeout, int) else 0,
            parameters={key: value for key, value in parameters.items() if key not in _RESERVED} if parameters else {},
            outputs=list(request.outputs),
            deadline=request.deadline,
            ends=request.ends,
            idle_s=request.idle_s,
            inputs=tensor_parts(
                [(name, self._input_types[name], array) for name, array in request.inputs.items()], body
            ),
            traceparent=format_traceparent(request.context.trace) if request.context is not None else "",
        )


def refuse(execution: Execution, error: InferenceError, members: Sequence[int]) -> None:
    """End an execution that did not begin, with an error for these of its requests."""
    for index in members:
        execution.answer(index, error)
    execution.returned()
