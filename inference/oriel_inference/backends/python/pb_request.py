"""`pb_utils.InferenceRequest`, `InferenceResponse` and the response sender.

As the documented names require, one class of requests serves two purposes: the requests that `execute` gets
(`ServedRequest`), and those that a model sends to another model (`exec`, `async_exec`).
"""

import asyncio
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

import numpy as np

from oriel_inference.backends.python.frames import read_tensors, tensor_parts
from oriel_inference.backends.python.messages import (
    Cancel,
    Credit,
    Infer,
    Inferred,
    ResultHead,
)
from oriel_inference.backends.python.pb_errors import (
    TritonError,
    TritonModelException,
    checked_number,
    checked_text,
    printed,
)
from oriel_inference.backends.python.pb_tensor import Tensor
from oriel_inference.backends.python.runtime import Pending, Runtime, current
from oriel_wire.errors import BadMessage
from oriel_wire.process.messages import Buffer, FrameError
from oriel_wire.v2.messages import ParameterValue

RESPONSE_COMPLETE_FINAL = 1
SEQUENCE_START, SEQUENCE_END = 1, 2
RELEASE_ALL, RELEASE_RESCHEDULE = 1, 2


class PreferredMemory:
    """The preferred memory of another model's response; here it is always the CPU's memory."""

    def __init__(self, preferred_memory_type: int = 0, preferred_device_id: int = 0) -> None:
        if preferred_memory_type:
            raise TritonModelException("PreferredMemory: tensors are always in the CPU's memory on this server")
        self.preferred_memory_type = preferred_memory_type
        self.preferred_device_id = preferred_device_id


class InferenceResponse:
    """Outputs or an error; if there is an error, the outputs are ignored."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        tensors = list(output_tensors or ())
        if not all(isinstance(each, Tensor) for each in tensors):
            raise TritonModelException("output_tensors must be a list of pb_utils.Tensor")
        if error is not None and not isinstance(error, TritonError):
            error = TritonError(printed(error))
        self._tensors = tensors
        self._error = error
        self._parameters = _checked(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        return json.dumps(self._parameters)


class InferenceTrace:
    """The trace of a request, as `request.trace()` returns it."""

    def __init__(self, traceparent: str = "") -> None:
        self._traceparent = traceparent

    def get_context(self) -> str | None:
        """Return a JSON object with the `traceparent` of the request, as OpenTelemetry's propagators take it."""
        return json.dumps({"traceparent": self._traceparent}) if self._traceparent else None


class InferenceRequest:
    """A request to another model: `exec()` waits for its response, `await async_exec()` does so in an `async def
    execute`.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: object = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._request_id = checked_text(request_id, "request_id")
        check = checked_text if isinstance(correlation_id, str | bytes) else checked_number
        self._correlation_id: int | str = check(correlation_id, "correlation_id")
        self._inputs = list(inputs)
        self._outputs = _names(requested_output_names)
        self._model_name = checked_text(model_name, "model_name")
        self._model_version = checked_number(model_version, "model_version")
        self._flags = checked_number(flags, "flags")
        self._timeout = checked_number(timeout, "timeout")
        self._preferred_memory = preferred_memory or PreferredMemory()
        self._trace = trace
        self._parameters = _checked(parameters)
        if not all(isinstance(each, Tensor) for each in self._inputs):
            raise TritonModelException("inputs must be a list of pb_utils.Tensor")

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def request_id(self) -> str:
        return self._request_id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def model_name(self) -> str:
        return self._model_name

    def model_version(self) -> int:
        return self._model_version

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = checked_number(flags, "flags")

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout

    def preferred_memory(self) -> PreferredMemory:
        return self._preferred_memory

    def trace(self) -> object:
        return self._trace

    def parameters(self) -> str:
        """Return the parameters as a JSON object."""
        return json.dumps(self._parameters)

    def set_release_flags(self, flags: int) -> None:
        if flags != RELEASE_ALL:
            raise TritonModelException("set_release_flags: only requests that execute was given can be rescheduled")

    def is_cancelled(self) -> bool:
        """Return whether the caller no longer waits: it left, or the deadline has passed."""
        return False

    def deadline_remaining_s(self) -> float:
        """Return the seconds until the deadline, negative once it has passed. An addition of Oriel."""
        return math.inf

    def get_response_sender(self) -> "InferenceResponseSender":
        raise TritonModelException("get_response_sender: only the requests that execute was given have one")

    def exec(self, decoupled: bool = False) -> Any:
        """Return one response, or an iterator of responses with `decoupled`. Errors are returned as responses."""
        inbox: SimpleQueue[tuple[Inferred, memoryview]] = SimpleQueue()
        decoupled = bool(decoupled)
        runtime, number = self._ask(decoupled, lambda message, body: inbox.put((message, body)))
        if decoupled:
            return ResponseIterator(runtime, number, inbox)
        return _response(*inbox.get())

    async def async_exec(self, decoupled: bool = False) -> Any:
        """Do what `exec` does without blocking the event loop (with `decoupled`: until the first response)."""
        decoupled, loop = bool(decoupled), asyncio.get_running_loop()
        inbox: SimpleQueue[tuple[Inferred, memoryview]] = SimpleQueue()
        first = asyncio.Event()

        def received(message: Inferred, body: memoryview) -> None:
            inbox.put((message, body))
            with suppress(RuntimeError):  # the model has closed its loop and does not wait any more
                loop.call_soon_threadsafe(first.set)

        runtime, number = self._ask(decoupled, received)
        found = ResponseIterator(runtime, number, inbox) if decoupled else None
        await first.wait()
        return found if found is not None else _response(*inbox.get())

    def _ask(self, decoupled: bool, inbox: Any) -> tuple[Runtime, int]:
        runtime = current()
        if not runtime.executing:
            raise TritonModelException("other models can only be called in execute")
        if not self._model_name:
            raise TritonModelException("InferenceRequest: model_name is missing")
        parameters = dict(self._parameters)
        if self._correlation_id:
            parameters["sequence_id"] = self._correlation_id
            parameters["sequence_start"] = bool(self._flags & SEQUENCE_START)
            parameters["sequence_end"] = bool(self._flags & SEQUENCE_END)
        body: list[Buffer] = []
        try:
            heads = tensor_parts([each.part() for each in self._inputs], body)
            version = "" if self._model_version < 1 else str(self._model_version)
            outputs = _names(self._outputs)  # the model may have changed the list
            number = runtime.ask(
                lambda number: Infer(
                    number,
                    self._model_name,
                    version,
                    self._request_id,
                    parameters,
                    outputs,
                    min(max(self._timeout, 0), 2**63 - 1),
                    decoupled,
                    heads,
                ),
                body,
                inbox,
            )
        except (BadMessage, FrameError) as error:
            raise TritonModelException(f"the request to model {self._model_name!r} cannot be sent: {error}") from error
        return runtime, number


class ResponseIterator:
    """The responses of a decoupled model in order; that model waits while they are not taken.

    The remaining responses are dropped by `cancel`, and when the iterator is deleted.
    """

    def __init__(self, runtime: Runtime, number: int, inbox: "SimpleQueue[tuple[Inferred, memoryview]]") -> None:
        self._runtime = runtime
        self._number = number
        self._inbox = inbox
        self._ended = False

    def __iter__(self) -> "ResponseIterator":
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        message, body = self._inbox.get()
        self._ended = message.final
        if message.result is None:
            raise StopIteration
        if not message.final:
            self._runtime.send(Credit(self._number, 1))
        return _response(message, body)

    def cancel(self) -> None:
        """Request no more responses; those that have arrived can still be taken, then an error ends the iteration."""
        if not self._ended:
            self._runtime.send(Cancel(self._number))

    def __del__(self) -> None:
        if not self._ended:
            # Not sent from here: this may run in any thread, even in the middle of a send of this thread.
            self._runtime.abandoned.put(Cancel(self._number))


class ServedRequest(InferenceRequest):
    """A request that `execute` receives."""

    def __init__(self, pending: Pending, inputs: Sequence[Tensor], model_name: str, model_version: int) -> None:
        head = pending.head
        super().__init__(
            request_id=head.request_id,
            correlation_id=head.correlation,
            inputs=inputs,
            requested_output_names=head.outputs,
            model_name=model_name,
            model_version=model_version,
            flags=head.flags,
            timeout=head.timeout_us,
            trace=InferenceTrace(head.traceparent),
            parameters=head.parameters,
        )
        self.pending = pending

    def set_release_flags(self, flags: int) -> None:
        """Choose what becomes of the request when `execute` returns: its end, or one more execution."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(f"set_release_flags: unknown flags {flags}")
        if flags == RELEASE_RESCHEDULE and not self.pending.runtime.iterative:
            text = "rescheduling needs sequence_batching { iterative_sequence: true } in the configuration"
            raise TritonModelException(f"set_release_flags: {text}")
        self.pending.again = flags == RELEASE_RESCHEDULE

    def is_cancelled(self) -> bool:
        return self.pending.cancelled()

    def deadline_remaining_s(self) -> float:
        return self.pending.remaining_s()

    def get_response_sender(self) -> "InferenceResponseSender":
        return InferenceResponseSender(self.pending)


class InferenceResponseSender:
    """Sends the responses of one request, from any thread, also after `execute` has returned."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response; blocks while the reader is behind. flags: TRITONSERVER_RESPONSE_COMPLETE_FINAL with or after
        the last one.
        """
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException("send: the response must be a pb_utils.InferenceResponse")
        if flags not in (0, RESPONSE_COMPLETE_FINAL):
            raise TritonModelException(f"send: unknown flags {flags}")
        result, body = (None, []) if response is None else encode_response(response, self._pending)
        try:
            self._pending.respond(result, body, final=flags == RESPONSE_COMPLETE_FINAL)
        except (ValueError, FrameError) as error:
            raise TritonModelException(f"send: {error}") from error

    def is_cancelled(self) -> bool:
        return self._pending.cancelled()

    def deadline_remaining_s(self) -> float:
        """Return the seconds until the deadline, see InferenceRequest. An addition of Oriel."""
        return self._pending.remaining_s()


def encode_response(response: InferenceResponse, pending: Pending) -> tuple[ResultHead, list[Buffer]]:
    """Encode the requested outputs for a frame; what cannot be sent becomes an error."""
    error = response.error()
    if error is not None:
        return ResultHead(error=(error.code(), error.message()[:2000])), []
    body: list[Buffer] = []
    try:
        parts = [each.part() for each in response.output_tensors() if each.name() in pending.head.outputs]
        heads = tensor_parts(parts, body)
    except BadMessage as bad:
        return ResultHead(error=(TritonError.INTERNAL, bad.message)), []
    return ResultHead(heads, response._parameters), body


def _response(message: Inferred, body: memoryview) -> InferenceResponse:
    result = message.result or ResultHead()
    if result.error is not None:
        code, text = result.error
        return InferenceResponse(error=TritonError(text, code))
    parts, _ = read_tensors(result.tensors, body)
    return InferenceResponse([Tensor.received(part) for part in parts], parameters=result.parameters)


def _names(given: Iterable[object]) -> list[str]:
    if isinstance(given, str | bytes):
        raise TritonModelException("requested_output_names must be a list of names")
    return [checked_text(name, "the name of a requested output") for name in given]


def _checked(parameters: Mapping[str, ParameterValue] | None) -> dict[str, ParameterValue]:
    found: dict[str, ParameterValue] = {}
    for name, value in dict(parameters or {}).items():
        key = checked_text(name, "the name of a parameter")
        plain = value.item() if isinstance(value, np.generic) else value
        match plain:
            case bool() | float():
                found[key] = plain if plain is True or plain is False else float(plain)
            case int():
                found[key] = checked_number(plain, f"parameter {key!r}")
            case str() | bytes():
                found[key] = checked_text(plain, f"parameter {key!r}")
            case _:
                raise TritonModelException(f"parameter {key!r} must have a string, number or boolean")
    return found
