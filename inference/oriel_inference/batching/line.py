"""`preserve_ordering`: answers leave in the order in which their calls came.

One line per tier and tenant: a line over all of them would let one tier's slow call hold another's answers. Only
answers stand in line. A call that fails, expires or leaves goes at once, and whoever waits behind it moves up. An
answer that reaches its own deadline in the line is too late: its caller is told so on time.
"""

from collections import OrderedDict
from collections.abc import Callable

from oriel_inference.batching.call import Answer, Call
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import DeadlineExceeded, InferenceError

__all__ = ["AnswerLine"]


class _Held:
    __slots__ = ("answer", "timer")

    def __init__(self, answer: Answer, timer: Timer) -> None:
        self.answer = answer
        self.timer = timer


class AnswerLine:
    """answer: delivers to the caller; fail: ends a call, which has to come back as `left`. Single writer: the loop."""

    def __init__(
        self,
        clock: Clock,
        answer: Callable[[Call, Answer], None],
        fail: Callable[[Call, InferenceError], None],
    ) -> None:
        self._clock = clock
        self._answer = answer
        self._fail = fail
        self._lines: dict[tuple[int, str], OrderedDict[Call, _Held | None]] = {}

    def enter(self, call: Call) -> None:
        """A call has arrived."""
        key = (call.ticket.band, call.ticket.tenant)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = OrderedDict()
        line[call] = None

    def answered(self, call: Call, answer: Answer) -> None:
        """A call has its rows: deliver them as soon as nobody is before it."""
        key = (call.ticket.band, call.ticket.tenant)
        line = self._lines[key]
        if next(iter(line)) is call:
            del line[call]
            self._answer(call, answer)
        else:
            call.inputs = {}
            line[call] = _Held(answer, self._clock.call_at(call.deadline, lambda: self._late(call)))
        self._advance(key, line)

    def left(self, call: Call) -> None:
        """A call has ended otherwise; it need not be in the line."""
        key = (call.ticket.band, call.ticket.tenant)
        line = self._lines.get(key)
        if line is None or call not in line:
            return
        held = line.pop(call)
        if held is not None:
            held.timer.cancel()
        self._advance(key, line)

    def _late(self, call: Call) -> None:
        self._fail(call, DeadlineExceeded("order"))

    def _advance(self, key: tuple[int, str], line: OrderedDict[Call, _Held | None]) -> None:
        while line:
            call = next(iter(line))
            held = line[call]
            if held is None:
                return
            del line[call]
            held.timer.cancel()
            self._answer(call, held.answer)
        if self._lines.get(key) is line:  # an answer may have brought the next call, and that one a new line
            del self._lines[key]
