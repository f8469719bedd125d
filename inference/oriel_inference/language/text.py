"""The text of one sequence, made of its tokens one by one.

A character whose bytes lie in several tokens comes out once it is whole. A stop string may span tokens: text that may
be the beginning of one is held back until it is not, and nothing of a stop string is ever shown.
"""

import codecs
from collections.abc import Sequence


class GeneratedText:
    """The text of one sequence.

    vocabulary: the bytes of each token by its id; empty for control tokens, which have no text.
    stops: stop strings, none of them empty.
    least: the number of tokens in which no stop string is looked for.
    stopped: True once a stop string was found; then no more text follows.
    """

    __slots__ = ("_decode", "_least", "_scanner", "_vocabulary")

    def __init__(self, vocabulary: Sequence[bytes], stops: Sequence[str] = (), *, least: int = 0) -> None:
        self._vocabulary = vocabulary
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._scanner = StopScanner(stops)
        self._least = least

    @property
    def stopped(self) -> bool:
        """Return whether a stop string was found; then no more text follows."""
        return self._scanner.stopped

    def feed(self, token: int) -> str:
        """Return the text that may be shown now that `token` has come. A token outside the vocabulary has no text;
        bytes that are not UTF-8 become U+FFFD.
        """
        text = self._decode(self._vocabulary[token]) if 0 <= token < len(self._vocabulary) else ""
        if self._least > 0:
            self._least -= 1
            return text
        return self._scanner.feed(text)

    def flush(self) -> str:
        """Return the rest of an ended sequence: an incomplete character becomes U+FFFD, and what was held back is
        shown unless a stop string ends there.
        """
        return self._scanner.feed(self._decode(b"", True)) + self._scanner.flush()


class StopScanner:
    """Passes text on up to the first stop string, which may span pieces, and holds back what may begin one.

    The stop string that is complete first counts; of two that are complete at the same character the longer one. The
    result does not depend on how the text was split.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
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
        held = max(_beginning(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text that was held back, after the text has ended."""
        held, self._held = self._held, ""
        return held


def _beginning(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop` but is not all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
