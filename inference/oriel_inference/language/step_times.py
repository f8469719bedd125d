"""Learned times of the steps of a language model, from its reports: the basis of all predictions of its order.

A step takes as long as its decoding sequences and its prompt tokens take together. Times are seconds, lengths tokens.
"""

from oriel_policies.waiting.batch import ServiceCurve
from oriel_policies.waiting.feasibility import LowQuantile

SAMPLES = 20  # steps and answers that must have been seen before anybody is refused by them
SHARE = 0.1  # the weight of one sample


class StepTimes:
    """The learned times of one model. Single writer: its scheduler.

    answer: mean length of answers. quick: length that nine of ten answers exceed.
    prompt_s: seconds of a prompt token that is computed. fresh: share of a prompt that is not cached; most prompts
    exceed it.
    """

    __slots__ = ("_answers", "_curve", "_steps", "answer", "fresh", "prompt_s", "quick")

    def __init__(self) -> None:
        self._curve = ServiceCurve()
        self._steps = self._answers = 0
        self.answer = self.prompt_s = 0.0
        self.quick, self.fresh = LowQuantile(step=0.05), LowQuantile(step=0.5)

    @property
    def known(self) -> bool:
        """Return whether enough was seen to refuse a call."""
        return self._steps >= SAMPLES and self._answers >= SAMPLES

    def stepped(self, seconds: float, sequences: int, prompt_tokens: int) -> None:
        """Learn from a step. sequences: number of those that got a token."""
        self._steps += 1
        if not prompt_tokens:
            self._curve.observe(max(1, sequences), seconds)
        else:
            each_s = max(0.0, seconds - self.step_s(sequences)) / prompt_tokens
            self.prompt_s += (each_s - self.prompt_s) * (SHARE if self.prompt_s else 1.0)

    def reading_s(self, tokens: int) -> float:
        """Return the seconds that a prompt takes if it is cached as well as the better ones."""
        return tokens * self.prompt_s * min(1.0, self.fresh.value)

    def ended(self, tokens: int) -> None:
        """Learn the length of an answer that has ended by itself."""
        self._answers += 1
        self.answer += (tokens - self.answer) * max(SHARE, 1.0 / self._answers)
        self.quick.observe(tokens)

    def step_s(self, sequences: int) -> float:
        """Return the time of a step without prompts; 0.0 while nothing is known."""
        return self._curve.predict(max(1, sequences))

    def sequences_within(self, seconds: float, most: int) -> int:
        """Return with how many sequences, `most` at most, a step mostly ends within `seconds`; 0 if not even one
        does.
        """
        return self._curve.rows_within(seconds, most)
