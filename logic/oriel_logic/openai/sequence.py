"""One generated text: its tokens, the text that may be sent, and why it ends."""

from collections.abc import Sequence as Several
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from oriel_logic.openai.detokenize import Detokenizer, Vocabulary
from oriel_logic.openai.sampling import Sampler, Sampling

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The text that one token added to choice `index`. finish: why it was the last, None if it was not."""

    index: int
    text: str
    finish: Finish | None


class Sequence:
    """A sequence of `count` tokens so far, the last one `token`. It has ended once `finish` is not None."""

    __slots__ = ("_ends", "_index", "_most", "_sampler", "_scanner", "_text", "count", "finish", "token")

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        sampling: Sampling,
        *,
        stops: Several[str],
        ends: Set[int],
        most: int,
        choice: int = 0,
    ) -> None:
        """Begin a sequence. ends: tokens that end it and are not shown. most: bound on its tokens, at least 1."""
        self._index = index
        self._ends = ends
        self._most = most
        self._sampler = Sampler(sampling, choice=choice)
        self._scanner = StopScanner(stops)
        self._text = Detokenizer(vocabulary)
        self.token = -1
        self.count = 0
        self.finish: Finish | None = None

    def draw(self, logits: NDArray[Any]) -> Delta:
        """Draw the next token. logits: [vocabulary]. Raises ValueError if none is possible."""
        self.token = self._sampler.draw(logits)
        self.count += 1
        text = ""
        if self.token in self._ends:
            self.finish = "stop"
        else:
            text = self._scanner.feed(self._text.feed(self.token))
            if self._scanner.stopped:
                self.finish = "stop"
            elif self.count >= self._most:
                self.finish = "length"
        if self.finish is not None:
            text += self._scanner.feed(self._text.flush())
            if self._scanner.stopped:
                self.finish = "stop"
            text += self._scanner.flush()
        return Delta(index=self._index, text=text, finish=self.finish)


class StopScanner:
    """Passes text on up to the first stop string, which may span pieces, and holds back what may begin one.

    The stop string that is complete first counts; of two that are complete at the same character the longer one. The
    result does not depend on how the text was split.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Several[str]) -> None:
        """Prepare to scan. stops: none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Add text and return what may be shown now. Once `stopped`, nothing more is returned."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        held = max(beginning(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, after the text has ended."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
