"""Remembers the callers whose calls failed in a model lately. Single writer: the loop.

Their calls share batches only with one another, because a failed batch has to be executed again in parts, which delays
every call in it. A caller is a tenant if a trusted peer named one, else a connection.
"""

import logging
from collections.abc import Callable

from oriel_inference.batching.call import Call
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest
from oriel_inference.model import ModelSpec

_log = logging.getLogger(__name__)

LATELY_S = 10.0
LOG_S = 10.0
MAX_CALLERS = 1024


class FailedCallers:
    """The failed callers of one model version. now: returns monotonic seconds.

    At most MAX_CALLERS are remembered; the one whose last failure is oldest is forgotten first.
    """

    __slots__ = ("_failures", "_logged_s", "_now", "_spec", "_until")

    def __init__(self, spec: ModelSpec, now: Callable[[], float]) -> None:
        self._spec = spec
        self._now = now
        self._until: dict[str, float] = {}  # in the order of their last failures
        self._failures = 0
        self._logged_s = -LOG_S

    def __bool__(self) -> bool:
        """Return whether any caller is remembered."""
        return bool(self._until)

    def lately(self, call: Call) -> bool:
        """Return whether the call's caller failed within LATELY_S."""
        return self._until.get(call.caller, 0.0) > self._now()

    def judge(self) -> Callable[[Call], bool] | None:
        """Forget callers whose last failure is too long ago; return `lately`, or None if no caller is left."""
        now = self._now()
        while self._until and self._until[oldest := next(iter(self._until))] <= now:
            del self._until[oldest]
        return self.lately if self._until else None

    def record_failure(self, call: Call, error: InferenceError) -> None:
        """Record that the model was executed for this call alone and failed; other errors change nothing.

        Logs at most once every LOG_S.
        """
        if not isinstance(error, (InvalidRequest, BackendFailed)):
            return
        now = self._now()
        if call.caller:
            self._until.pop(call.caller, None)
            self._until[call.caller] = now + LATELY_S
            if len(self._until) > MAX_CALLERS:
                del self._until[next(iter(self._until))]
        self._failures += 1
        if now - self._logged_s >= LOG_S:
            _log.warning(
                "model %s version %d: executing it failed for %d request(s), %d caller(s) failed in the last %g s: %s",
                self._spec.name,
                self._spec.version,
                self._failures,
                len(self._until),
                LATELY_S,
                error.detail or error.message,
            )
            self._failures, self._logged_s = 0, now
