"""Matches a stream's answers with its messages, to know whether the server may still be working on the stream. Pure.

A message may have one answer, none, or many (a decoupled model). An answer names its model. Some servers (Triton, ours)
also mark the last answer to a message, others do not. Hence:

1. An answer belongs to a message for the model that it names. If the stream has sent no message to that model, it
   belongs to the first model, in the order in which the stream used them, that has a message without an answer.
2. A message is finished by the answer that is marked as its last; if answers are not marked, by its first one.
3. If answers are not marked and a model has ever sent more answers than it got messages, more may follow at any time:
   its streams count as busy until some time after their latest answer.
4. For charging, an answer without a model's name finishes a message only if a single model can have sent it. Otherwise
   another model's message might be taken as finished, and its computing would not be charged.
5. A model is assumed to answer each message, until a message has had no answer for some time. From then on it counts as
   one that gathers several messages for an answer, until all messages of a stream are finished.

What is learned of a model is kept per tenant: no tenant can change how another tenant's streams are judged.
"""

from math import inf

MAX_KNOWN = 4096
_PLAIN = (False, False)
MAX_MODELS = 64  # models of one stream that are distinguished at a time


class Habits:
    """Remembers how models answer streams, by (tenant, model). With more than MAX_KNOWN of them the oldest are dropped.

    more: the model has sent more answers than it got messages, without marking the last one; never reset.
    gathers: it leaves messages without an answer, or without the last one, for a long time or for ever.
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
    """The messages and answers of one stream. unanswered: number of messages known to have no answer yet."""

    __slots__ = ("_models", "_habits", "_open", "_talked_s", "_tenant", "unanswered")

    def __init__(self, habits: Habits, tenant: str) -> None:
        self._habits = habits
        self._tenant = tenant
        # model -> number of messages without any answer, of unfinished ones, of those that may be unfinished
        self._models: dict[str, list[int]] = {}
        self._open = 0  # number of unfinished messages
        self._talked_s = -inf
        self.unanswered = 0

    def sent(self, model: str) -> None:
        """Record a message that was sent to the server."""
        if model not in self._models and len(self._models) >= MAX_MODELS:
            self._models = {name: counts for name, counts in self._models.items() if counts[1] or counts[2]}
            if len(self._models) >= MAX_MODELS:
                model = ""
        counts = self._models.setdefault(model, [0, 0, 0])
        for each in range(3):
            counts[each] += 1
        self._open += 1
        self.unanswered += 1

    def answered(self, model: str, final: bool | None, now: float) -> None:
        """Record an answer. final: whether it is the last one to its message; None if it does not say."""
        counts = self._models.get(model) if model else None
        if final is not False:
            sure = [counts] if counts is not None else [each for each in self._models.values() if each[2]]
            if len(sure) == 1 and sure[0][2]:
                sure[0][2] -= 1
        if counts is None:
            first = next(((name, each) for name, each in self._models.items() if each[0]), None)
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
        """Record that messages have been unfinished for so long that nothing should wait for them any more."""
        for model, counts in self._models.items():
            if counts[1]:
                self._habits.note(self._tenant, model, gathers=True)

    def silent(self) -> None:
        """Record that the server has been silent for so long that every message it has begun to answer is finished."""
        if self.unanswered:
            self.held()
            return
        for counts in self._models.values():
            counts[1] = counts[2] = 0
        self._open = 0

    def rests(self, now: float, after_s: float) -> bool:
        """Return whether nothing of the stream is being computed.

        after_s: the longest pause, in seconds, of a model that marks no last answer.
        """
        return not self._open and now - self._talked_s >= after_s

    @property
    def ends(self) -> bool:
        """Return whether every unfinished message is expected to end soon, with an answer that shows its end."""
        habits, tenant = self._habits, self._tenant
        return not any(any(habits.of(tenant, model)) for model, counts in self._models.items() if counts[1])

    @property
    def at_work(self) -> list[str]:
        """The models that may still be computing, because a message to them may be unfinished."""
        return [model for model, counts in self._models.items() if counts[2]]
