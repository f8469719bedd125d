"""A batch on an instance, with the timer that answers its members in time while it runs, and the swap of sessions."""

from collections.abc import Callable, Collection, MutableMapping, Sequence

from oriel_inference.backends import Session
from oriel_inference.batching.call import Call
from oriel_inference.batching.device import Device
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import DeadlineExceeded, InferenceError


class Running:
    """A running batch. fail: ends a call with an error. The timer is set to the earliest deadline of the unfinished
    calls.
    """

    __slots__ = ("_clock", "_fail", "_timer", "calls", "session")

    def __init__(
        self,
        calls: Sequence[Call],
        session: Session,
        clock: Clock,
        fail: Callable[[Call, InferenceError], None],
    ) -> None:
        self.calls = calls
        self.session = session
        self._clock = clock
        self._fail = fail
        self._timer: Timer | None = None
        self._arm()

    def stop_timer(self) -> None:
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


def swap_sessions(
    sessions: Sequence[Session],
    idle: list[Session],
    running: Collection[Running],
    device_of: MutableMapping[int, Device],
    host: Device,
) -> Callable[[], bool]:
    """Give the instances of a model other sessions, one each, on the same devices; between two turns of the loop.

    Executions go on, and their instance has the new session afterwards. Returns a function that tells whether something
    that ran at the swap still does: until then, the sessions of before must stay open. Not for sessions that take
    requests one by one, nor for decoupled models.
    idle, running, device_of: the batcher's own containers, changed in place. host: the device of sessions without one.
    """
    began = list(running)
    before = [*idle, *(batch.session for batch in began)]
    devices = [device_of.get(id(session), host) for session in before]
    device_of.clear()
    device_of.update({id(session): device for session, device in zip(sessions, devices, strict=True)})
    for batch, session in zip(began, sessions[len(idle) :], strict=True):
        batch.session = session
    idle[:] = sessions[: len(idle)]
    return lambda: any(batch in running for batch in began)
