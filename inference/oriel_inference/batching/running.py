"""A batch on an instance, with the timer that answers its members in time while it runs."""

from collections.abc import Callable, Sequence

from oriel_inference.backends import Session
from oriel_inference.batching.call import Call
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import DeadlineExceeded, InferenceError


class Running:
    """A running batch. fail: ends a call with an error. The timer is set to the earliest deadline of the unfinished
    calls.
    """

    __slots__ = ("_clock", "_fail", "_timer", "calls", "session", "units")

    def __init__(
        self,
        calls: Sequence[Call],
        session: Session,
        units: int,
        clock: Clock,
        fail: Callable[[Call, InferenceError], None],
    ) -> None:
        self.calls = calls
        self.session = session
        self.units = units
        self._clock = clock
        self._fail = fail
        self._timer: Timer | None = None
        self._arm()

    def ended(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        deadline = min((call.deadline for call in self.calls if not call.finished), default=None)
        self._timer = None if deadline is None else self._clock.call_at(deadline, self._late)

    def _late(self) -> None:
        now = self._clock.now()
        for call in self.calls:
            if call.deadline <= now:
                self._fail(call, DeadlineExceeded("compute"))
        self._arm()
