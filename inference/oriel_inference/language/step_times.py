"""Learned times of the steps of a language model, from its reports: the basis of all predictions of its order.

A step takes as long as its decoding sequences and its prompt tokens take together. Times are seconds, lengths tokens.
"""

from oriel_policies.waiting.batch import ServiceCurve
from oriel_policies.waiting.feasibility import LowQuantile

SAMPLES = 20  # steps and answers that must have been seen before anybody is refused by them
SHARE = 0.1  # the weight of one sample
_RESUME_STEPS = 2.0  # the cost of a resume, in steps, until one was measured


class StepTimes:
    """The learned times of one model. Single writer: its scheduler.

    answer: mean length of answers. quick: length that nine of ten answers exceed.
    prompt_s: seconds of a prompt token.
    resume_s: seconds from adding a paused sequence again to its next token.
    """

    __slots__ = ("_answers", "_curve", "_steps", "answer", "prompt_s", "quick", "resume_s")

    def __init__(self) -> None:
        self._curve = ServiceCurve()
        self._steps = self._answers = 0
        self.answer = self.prompt_s = self.resume_s = 0.0
        self.quick = LowQuantile(step=0.05)

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

    def ended(self, tokens: int) -> None:
        """Learn the length of an answer that has ended by itself."""
        self._answers += 1
        self.answer += (tokens - self.answer) * max(SHARE, 1.0 / self._answers)
        self.quick.observe(tokens)

    def resumed(self, seconds: float) -> None:
        """Learn that a paused sequence had its next token `seconds` after it was added again."""
        self.resume_s += (seconds - self.resume_s) * (SHARE if self.resume_s else 1.0)

    def step_s(self, sequences: int) -> float:
        """Return the time of a step without prompts; 0.0 while nothing is known."""
        return self._curve.predict(max(1, sequences))

    def sequences_within(self, seconds: float, most: int) -> int:
        """Return with how many sequences, `most` at most, a step mostly ends within `seconds`; 0 if not even one
        does.
        """
        return self._curve.rows_within(seconds, most)

    def resume_tokens(self, sequences: int) -> float:
        """Return the tokens that a sequence could make in the time that a resume costs."""
        step_s = self.step_s(sequences)
        return self.resume_s / step_s if self.resume_s and step_s else _RESUME_STEPS
