"""One execution of a decoupled model: a session that yields any number of responses, and a reader that may be slow.

The worker iterates the session and hands every response to the loop. At most AHEAD of them are handed over and not yet
consumed; then the worker waits, and with it the session. A call that ends otherwise (its caller left, its deadline
passed) closes the relay: the session sees it at `cancelled()` and at its next response.

A call's deadline is for its first response. Each response then moves it to IDLE_S from there if that is later, and the
whole takes at most MAX_S: a reader that stops reading is given up on like a session that hangs.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import closing

from oriel_inference.backends import DecoupledSession
from oriel_inference.batching.assemble import Outcome, concatenate, reshaped
from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.clock import Clock
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_inference.model import ModelSpec
from oriel_wire.v2.messages import Array

__all__ = ["IDLE_S", "MAX_S", "Relay", "deliver", "execute_stream"]

_log = logging.getLogger(__name__)

AHEAD = 16
IDLE_S = 30.0
MAX_S = 600.0


class Relay:
    """From one worker to the loop. fail: ends the call with an error, on the loop."""

    def __init__(self, call: Call, clock: Clock, fail: Callable[[Call, InferenceError], None]) -> None:
        self._call = call
        self._clock = clock
        self._fail = fail
        self._condition = threading.Condition()
        self._ahead = 0
        self._closed = False

    # The worker's side ------------------------------------------------------------------------------------------

    def cancelled(self) -> bool:
        """Nobody waits for more."""
        return self._closed

    def send(self, outputs: Sequence[Array]) -> bool:
        """Hand one response over, waiting for room; False if nobody wants it any more."""
        with self._condition:
            self._condition.wait_for(lambda: self._ahead < AHEAD or self._closed)
            if self._closed:
                return False
            self._ahead += 1
        self._clock.call_from_thread(lambda: self._deliver(outputs))
        return True

    # The loop's side --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """The call has ended."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def _consumed(self) -> None:
        with self._condition:
            self._ahead -= 1
            self._condition.notify()

    def _deliver(self, outputs: Sequence[Array]) -> None:
        deliver(self._call, outputs, self._consumed, self._clock.now(), self._fail)


def deliver(
    call: Call,
    outputs: Sequence[Array],
    consumed: Callable[[], None],
    now: float,
    fail: Callable[[Call, InferenceError], None],
) -> None:
    """Hand one response to the caller, who has time for the next one from here; on the loop."""
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
    names: Sequence[str],
    call: Call,
    relay: Relay,
    now: Callable[[], float],
) -> Outcome:
    """Run `call` and relay its responses; blocks, never raises. The outcome has no rows, they were sent."""
    started = now()
    try:
        batch = concatenate([call.inputs], spec.inputs, batched=spec.batched)
        assembled = now()
        with closing(session.stream(batch, names, relay.cancelled)) as responses:
            for arrays in responses:
                outputs = [
                    reshaped(array, output, array.shape[0] if spec.batched else 0)
                    for array, output in zip(arrays, spec.outputs, strict=True)
                ]
                if not relay.send(outputs):
                    break
    except InferenceError as error:
        return error
    except Exception:
        # The instance must live on, whatever a runtime throws.
        _log.exception("model %s: a stream failed unexpectedly", spec.name)
        return BackendFailed("the model failed inside the server")
    ended = now()
    return [[]], BatchTimes(started, assembled, ended, ended, call.rows)
