"""A batch on a session that takes its requests one by one and answers later: Python models.

Owner: the loop. The batch holds its instance until the session calls `returned`, and counts as running until every call
of it is finished.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from oriel_inference.backends import Outputs, Request, RequestSession
from oriel_inference.batching.assemble import Outcome, Results, concatenate, reshaped_if_it_fits
from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.device import Device, DeviceTime
from oriel_inference.batching.statistics import Responses, Statistics
from oriel_inference.clock import Clock
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_inference.model import ModelSpec
from oriel_policies.metering.shares import split
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)

IDLE_S = 30.0
MAX_S = 600.0


class Ends(NamedTuple):
    """The callbacks of one execution.

    finish: receives the results of some of the calls, and whether they are the last.
    free: called when the instance is idle again.
    fail: ends a call with an error.
    """

    finish: Callable[[Results, bool], None]
    free: Callable[[], None]
    fail: Callable[[Call, InferenceError], None]


class RequestBatch:
    """The Execution of `calls`.

    statistics: counts the responses of a decoupled model.
    device: the device that the session runs on. The calls that are not answered yet share its time by their rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        session: RequestSession,
        calls: Sequence[Call],
        clock: Clock,
        ends: Ends,
        statistics: Statistics,
        device: Device,
    ) -> None:
        self._device = device
        self._device_time = DeviceTime(device)
        self._charged_ns = 0
        self._charges = [0] * len(calls)
        self._open = list(range(len(calls)))
        self._spec = spec
        self._session = session
        self._calls = calls
        self._clock = clock
        self._finish, self._free, self._fail = ends
        self._results: list[Outputs | InferenceError | None] = [None] * len(calls)
        self._unanswered = len(calls)
        self._started = self._began = self._computed = clock.now()
        self._responses = [Responses(statistics, call.arrived_s) for call in calls] if spec.decoupled else []
        self._since = [self._started] * len(calls)
        self.requests: Sequence[Request] = ()

    def start(self) -> None:
        """Give the requests to the session."""
        try:
            self.requests = [self._request(call) for call in self._calls]
        except InferenceError as error:
            for index in range(len(self._calls)):
                self.answer(index, error)
            self.returned()
            return
        for index, call in enumerate(self._calls):
            call.on_early_end = partial(self._session.caller_left, self, index)
        self._session.execute(self)

    # Callbacks of the session ---------------------------------------------------------------------------------------

    def computing(self, began_s: float, ended_s: float) -> None:
        now = self._clock.now()
        # The model's process may send anything, even NaN; as the second of two compared values it is dropped.
        self._computed = max(self._started, min(now, ended_s))
        self._began = max(self._started, min(self._computed, began_s))
        self._share_time()  # once, because the answers follow together

    def answer(self, index: int, result: Outputs | InferenceError | None) -> None:
        call = self._calls[index]
        call.on_early_end = None
        self._charge(index, failed=not isinstance(result, Outputs) and not (self._spec.decoupled and result is None))
        self._results[index] = result
        self._unanswered -= 1
        if self._spec.decoupled:
            failed = isinstance(result, InferenceError)
            self._responses[index].finished(self._lap(index), failed=failed, cancelled=call.finished)
        if self._spec.decoupled and self._unanswered:
            self._finish([self._ended(call, result)], False)
        elif self._spec.decoupled:
            self._finish([self._ended(call, result)], True)
        elif not self._unanswered:
            self._finish(self._all(), True)

    def respond(self, index: int, outputs: Outputs, consumed: Callable[[], None]) -> None:
        call = self._calls[index]
        infer_s = self._lap(index)
        if self._responses and not call.finished:
            self._responses[index].sent(self._since[index], infer_s, 0.0)
        _deliver(call, self._shaped(outputs), consumed, self._since[index], self._fail)

    def _lap(self, index: int) -> float:
        """Return the seconds since the call's last response, or since its batch began."""
        before, self._since[index] = self._since[index], self._clock.now()
        return self._since[index] - before

    def returned(self) -> None:
        self._free()

    def _charge(self, index: int, *, failed: bool) -> None:
        """Charge the time since the last answer to the calls that were open; call `index` is not any more."""
        goes_on = self._share_time()
        self._open.remove(index)
        if failed:
            self._device.write_off(self._charges[index], "failed")
            self._charges[index] = 0
        if self._open and goes_on:
            self._device_time.resume()

    def _share_time(self) -> bool:
        """Charge the open calls for the time since the last answer, and stop the clock. Returns whether it ran."""
        if not self._device_time.runs:
            return False
        used_ns = self._device_time.pause()
        shares = split(used_ns - self._charged_ns, [self._calls[each].rows for each in self._open])
        self._charged_ns = used_ns
        for each, share in zip(self._open, shares, strict=True):
            self._charges[each] += share
        return True

    # Values ---------------------------------------------------------------------------------------------------------

    def _request(self, call: Call) -> Request:
        client_request, context = call.source or (None, None)
        names = [output.name for output in self._spec.outputs]
        if client_request is not None and client_request.outputs is not None:
            names = [output.name for output in client_request.outputs]
        return Request(
            inputs=concatenate([call.inputs], self._spec.inputs, batched=self._spec.batched),
            outputs=names,
            deadline=call.deadline,
            ends=call.arrived_s + MAX_S,
            idle_s=IDLE_S,
            client_request=client_request,
            context=context,
        )

    def _shaped(self, outputs: Outputs) -> Outputs:
        """Return the outputs with the configuration's `reshape` undone where they fit it.

        The request is the only one that has them, so shapes that the configuration does not name are passed on.
        """
        arrays = [
            None if array is None else reshaped_if_it_fits(array, spec, batched=self._spec.batched)
            for array, spec in zip(outputs, self._spec.outputs, strict=True)
        ]
        return Outputs(arrays, outputs.parameters, datatypes=outputs.datatypes, last=outputs.last, again=outputs.again)

    def _all(self) -> Results:
        """Return the results: the calls that have rows are one batch, the others fail one by one."""
        good: list[Call] = []
        shares: list[list[Array]] = []
        results: Results = []
        device_ns = 0
        for call, result, charge_ns in zip(self._calls, self._results, self._charges, strict=True):
            if result is None:
                result = BackendFailed("the model did not answer")
            if isinstance(result, InferenceError):
                results.append(((call,), result))
                continue
            shares.append(self._shaped(result))
            good.append(call)
            device_ns += charge_ns
        if good:
            results.append((good, (shares, self._times(sum(call.rows for call in good), device_ns))))
        return results

    def _ended(self, call: Call, result: Outputs | InferenceError | None) -> tuple[Sequence[Call], Outcome]:
        if isinstance(result, InferenceError):
            return (call,), result
        self._computed = self._clock.now()
        return (call,), ([result or []], self._times(call.rows, self._charges[self._calls.index(call)]))

    def _times(self, rows: int, device_ns: int) -> BatchTimes:
        return BatchTimes(self._started, self._began, self._computed, self._clock.now(), rows, device_ns)


def _deliver(
    call: Call,
    outputs: Sequence[Array],
    consumed: Callable[[], None],
    now: float,
    fail: Callable[[Call, InferenceError], None],
) -> None:
    """Pass one response to the caller, and extend the deadline for the next one; on the loop."""
    if call.finished or call.emit is None:
        return
    call.deadline = max(call.deadline, min(call.arrived_s + MAX_S, now + IDLE_S))
    try:
        call.emit(outputs, consumed)
    except InferenceError as error:
        fail(call, error)
    except Exception:
        _log.exception("a response could not be delivered")
        fail(call, BackendFailed("the server failed on this response"))
