"""The text of one sequence, made of its tokens one by one.

A character whose bytes lie in several tokens comes out once it is whole. A stop string may span tokens: text that may
be the beginning of one is held back until it is not, and nothing of a stop string is ever shown.
"""

import codecs
from collections.abc import Sequence


class GeneratedText:
    """The text of one sequence, up to the stop string that is complete first, or the longer one of two that are
    complete at the same character.

    vocabulary: the bytes of each token by its id; empty for control tokens, which have no text.
    stops: stop strings, none of them empty.
    least: the number of tokens in which no stop string is looked for.
    stopped: True once a stop string was found; then no more text follows.
    """

    __slots__ = ("_decode", "_held", "_least", "_stops", "_vocabulary", "stopped")

    def __init__(self, vocabulary: Sequence[bytes], stops: Sequence[str] = (), *, least: int = 0) -> None:
        self._vocabulary = vocabulary
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._stops = stops
        self._least = least
        self._held = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """Return the text that may be shown now that `token` has come. A token outside the vocabulary has no text;
        bytes that are not UTF-8 become U+FFFD.
        """
        text = self._decode(self._vocabulary[token]) if 0 <= token < len(self._vocabulary) else ""
        if self._least > 0:
            self._least -= 1
            return text
        return self._scan(text)

    def flush(self) -> str:
        """Return the rest of an ended sequence: an incomplete character becomes U+FFFD, and what was held back is
        shown unless a stop string ends there.
        """
        return self._scan(self._decode(b"", True)) + self._held

    def _scan(self, text: str) -> str:
        """Return what of the text may be shown, and hold back what may begin a stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        begun = [n for stop in self._stops for n in range(1, min(len(text) + 1, len(stop))) if text.endswith(stop[:n])]
        cut = len(text) - max(begun, default=0)
        self._held = text[cut:]
        return text[:cut]
