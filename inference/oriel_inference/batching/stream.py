"""One execution of a decoupled model: a session that yields any number of responses, and a reader that may be slow.

The worker iterates over the session and passes every response to the loop. At most AHEAD of them are passed on and not
yet consumed; then the worker waits, and the session with it. A call that ends otherwise (its caller left, its deadline
passed) closes the relay: the session notices that at `cancelled()` and at its next response.

The deadline of a call applies to its first response. Each response extends it to IDLE_S from then if that is later, and
the whole takes at most MAX_S: a reader that stops reading is given up on, like a session that hangs.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from oriel_inference.backends import DecoupledSession
from oriel_inference.batching.assemble import Outcome, concatenate, reshaped
from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.device import Device, DeviceTime
from oriel_inference.batching.statistics import Responses, Statistics
from oriel_inference.clock import Clock
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_inference.model import ModelSpec
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)

AHEAD = 16
IDLE_S = 30.0
MAX_S = 600.0


class Relay:
    """Passes responses from one worker to the loop. fail: ends the call with an error, on the loop."""

    def __init__(
        self, call: Call, clock: Clock, fail: Callable[[Call, InferenceError], None], statistics: Statistics
    ) -> None:
        self._call = call
        self._clock = clock
        self._fail = fail
        self._responses = Responses(statistics, call.arrived_s)
        self._condition = threading.Condition()
        self._ahead = 0
        self._closed = False

    # The worker's side ------------------------------------------------------------------------------------------

    def cancelled(self) -> bool:
        """Return whether the caller no longer waits."""
        return self._closed

    def send(self, outputs: Sequence[Array], infer_s: float, output_s: float) -> bool:
        """Pass one response on, waiting for room; return False if the caller no longer waits.

        infer_s, output_s: time to compute the response and to encode it.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._ahead < AHEAD or self._closed)
            if self._closed:
                return False
            self._ahead += 1
        self._clock.call_from_thread(lambda: self._deliver(outputs, infer_s, output_s))
        return True

    def end(self, infer_s: float, *, failed: bool) -> None:
        """Report that there is no further response, `infer_s` after the last one."""
        ended = self._responses.ended
        self._clock.call_from_thread(lambda: ended(infer_s, failed=failed, cancelled=self._closed))

    # The loop's side --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop relaying, because the call has ended."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def _consumed(self) -> None:
        with self._condition:
            self._ahead -= 1
            self._condition.notify()

    def _deliver(self, outputs: Sequence[Array], infer_s: float, output_s: float) -> None:
        now = self._clock.now()
        if not self._call.finished:
            self._responses.sent(now, infer_s, output_s)
        deliver(self._call, outputs, self._consumed, now, self._fail)


def deliver(
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


def execute_stream(
    session: DecoupledSession,
    spec: ModelSpec,
    call: Call,
    relay: Relay,
    now: Callable[[], float],
    device: Device,
) -> Outcome:
    """Run `call` and relay its responses; blocks and never raises. The outcome has no rows, because they were sent.

    The device is charged for the model's time, not for the time in which the reader is waited for.
    """
    started = since = now()
    used = DeviceTime(device)
    try:
        batch = concatenate([call.inputs], spec.inputs, batched=spec.batched)
        assembled = since = now()
        with closing(session.stream(batch, [output.name for output in spec.outputs], relay.cancelled)) as responses:
            for arrays in responses:
                computed = now()
                used.pause()
                outputs = [
                    reshaped(array, output, array.shape[0] if spec.batched else 0)
                    for array, output in zip(arrays, spec.outputs, strict=True)
                ]
                if not relay.send(outputs, computed - since, now() - computed):
                    break
                since = now()  # waiting for the reader is not time of the model
                used.resume()
    except InferenceError as error:
        used.fail()
        relay.end(now() - since, failed=True)
        return error
    except Exception:
        # The instance must survive any error of a runtime.
        _log.exception("model %s: a stream failed unexpectedly", spec.name)
        used.fail()
        relay.end(now() - since, failed=True)
        return BackendFailed("the model failed inside the server")
    ended = now()
    relay.end(ended - since, failed=False)
    return [[]], BatchTimes(started, assembled, ended, ended, call.rows, used.pause())
