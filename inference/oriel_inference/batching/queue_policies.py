"""Two settings of a model's `dynamic_batching`: the order of its answers, and places per priority level.

`preserve_ordering`: answers are delivered in the order in which their calls arrived.

There is one line per tier and tenant: with a single line, a slow call of one tier would delay the answers of another.
Only answers wait in line. A call that fails, expires or leaves is finished at once, and the calls behind it move up. An
answer that reaches its own deadline in the line is too late, and its caller gets that error in time.

`max_queue_size`: a level is counted per tier, so that a flood in one tier leaves another tier its places.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

from oriel_inference.batching.call import Answer, Call
from oriel_inference.clock import Clock, Timer
from oriel_inference.errors import DeadlineExceeded, InferenceError
from oriel_inference.model import QueueRules


class _Held:
    __slots__ = ("answer", "timer")

    def __init__(self, answer: Answer, timer: Timer) -> None:
        self.answer = answer
        self.timer = timer


class AnswerLine:
    """Holds answers back until it is their turn. Single writer: the loop.

    answer: delivers an answer to the caller.
    fail: ends a call, which has to call `remove` in turn.
    """

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

    def join(self, call: Call) -> None:
        """Add a call that has arrived."""
        key = (call.ticket.band, call.ticket.tenant)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = OrderedDict()
        line[call] = None

    def deliver(self, call: Call, answer: Answer) -> None:
        """Handle the answer of a call: deliver it as soon as no call is before it."""
        key = (call.ticket.band, call.ticket.tenant)
        line = self._lines[key]
        if next(iter(line)) is call:
            del line[call]
            self._answer(call, answer)
        else:
            call.inputs = {}
            line[call] = _Held(answer, self._clock.call_at(call.deadline, lambda: self._late(call)))
        self._advance(key, line)

    def remove(self, call: Call) -> None:
        """Remove a call that has ended otherwise; it need not be in the line."""
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


class LevelBounds:
    """Bounds how many calls wait on each priority level of a model.

    Every call that joined with `join` has to leave with `leave`, once.
    """

    def __init__(self, rules: QueueRules) -> None:
        self._sizes = {level: rules.of(level).max_items for level in rules.levels}
        self._waiting: Counter[tuple[int, int]] = Counter()

    def join(self, call: Call) -> bool:
        """Take a place of the call's level; return False if none is left."""
        if call.ticket.admitted:
            return True
        key = (call.ticket.band, call.level)
        size = self._sizes.get(call.level, 0)
        if size and self._waiting[key] >= size:
            return False
        self._waiting[key] += 1
        return True

    def leave(self, call: Call) -> None:
        """Free the place of a call."""
        if not call.ticket.admitted:
            self._waiting[call.ticket.band, call.level] -= 1
