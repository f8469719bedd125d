"""Matches the messages of a stream with its answers, and decides whether the server may still be working on it. Pure.

A message may have one answer, none, or many (a decoupled model). An answer names its model; some servers (Triton, ours)
also say whether it is the last to its message, others do not. Hence:

1. An answer is to a message of the model it names; if the stream has asked none of that name, to one of the model that
   was asked first of those without an answer.
2. A message is over with the answer that says so; if answers do not say, with its first.
3. If answers do not say, and a model has once answered more often than it was asked, its streams have been at work
   until some time after its latest answer: more may come.
4. For what is charged, an answer without a name is to a message only if just one model can have been meant: to take it
   for another's would let that one compute for nothing.
5. A model answers each message until one of them has none for some time; then it may be one that gathers messages,
   until all of a stream's have come to their ends.

What is known of a model is learned per tenant: no tenant can change what another's streams are held to.
"""

from math import inf

__all__ = ["MAX_MODELS", "Exchange", "Habits"]

MAX_KNOWN = 4096
_PLAIN = (False, False)
MAX_MODELS = 64  # of one stream that are distinguished at a time


class Habits:
    """How models answer streams, by (tenant, model); of more than MAX_KNOWN the oldest are forgotten.

    more: it has answered more often than it was asked, without saying which answer is the last; never forgotten for
    something better. gathers: it leaves messages without an answer, or the last one, for long or for good.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[bool, bool]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def of(self, tenant: str, model: str) -> tuple[bool, bool]:
        """(more, gathers); both False for an unknown model."""
        return self._known.get((tenant, model), _PLAIN)

    def note(self, tenant: str, model: str, *, more: bool = False, gathers: bool) -> None:
        """Record what was observed of a model."""
        key = (tenant, model)
        before = self._known.get(key, _PLAIN)
        after = (more or before[0], gathers)
        if after == before:
            return
        if after == _PLAIN:
            del self._known[key]
            return
        if key not in self._known and len(self._known) >= MAX_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[key] = after


class Exchange:
    """The messages and answers of one stream. unanswered: messages without any answer, as far as can be known."""

    __slots__ = ("_asked", "_habits", "_open", "_talked_s", "_tenant", "unanswered")

    def __init__(self, habits: Habits, tenant: str) -> None:
        self._habits = habits
        self._tenant = tenant
        # model -> messages without any answer, messages that are not over, messages that are not surely over
        self._asked: dict[str, list[int]] = {}
        self._open = 0  # messages that are not over
        self._talked_s = -inf
        self.unanswered = 0

    def asked(self, model: str) -> None:
        """Record a message that was sent to the server."""
        if model not in self._asked and len(self._asked) >= MAX_MODELS:
            self._asked = {name: counts for name, counts in self._asked.items() if counts[1] or counts[2]}
            if len(self._asked) >= MAX_MODELS:
                model = ""
        counts = self._asked.setdefault(model, [0, 0, 0])
        for each in range(3):
            counts[each] += 1
        self._open += 1
        self.unanswered += 1

    def answered(self, model: str, final: bool | None, now: float) -> None:
        """Record an answer. final: whether it is the last one to its message; None if it does not say."""
        counts = self._asked.get(model) if model else None
        if final is not False:
            sure = [counts] if counts is not None else [each for each in self._asked.values() if each[2]]
            if len(sure) == 1 and sure[0][2]:
                sure[0][2] -= 1
        if counts is None:
            first = next(((name, each) for name, each in self._asked.items() if each[0]), None)
            if first is None:
                if final is None:
                    self._talked_s = now
                return
            model, counts = first
        if counts[0]:
            counts[0] -= 1
            self.unanswered -= 1
        if final is False:
            return
        habits, tenant = self._habits, self._tenant
        if counts[1]:
            counts[1] -= 1
            self._open -= 1
            if not self._open:
                habits.note(tenant, model, gathers=False)
        elif final is None:
            habits.note(tenant, model, more=True, gathers=False)
        if final is None and habits.of(tenant, model)[0]:
            self._talked_s = now

    def held(self) -> None:
        """Record that a message has gone without an end for so long that nothing should wait for it."""
        for model, counts in self._asked.items():
            if counts[1]:
                self._habits.note(self._tenant, model, gathers=True)

    def silent(self) -> None:
        """Record that the server has been silent for so long that every answer it has begun counts as over."""
        if self.unanswered:
            self.held()
            return
        for counts in self._asked.values():
            counts[1] = counts[2] = 0
        self._open = 0

    def rests(self, now: float, after_s: float) -> bool:
        """Whether nothing of the stream is being computed. after_s: the longest pause of a model that marks no last
        answer.
        """
        return not self._open and now - self._talked_s >= after_s

    @property
    def ends(self) -> bool:
        """Whether everything that is being computed will end soon and visibly, as far as is known."""
        habits, tenant = self._habits, self._tenant
        return not any(any(habits.of(tenant, model)) for model, counts in self._asked.items() if counts[1])

    @property
    def at_work(self) -> list[str]:
        """The models that may still compute: a message to them may not be over."""
        return [model for model, counts in self._asked.items() if counts[2]]
