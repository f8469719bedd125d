"""Finds stop strings in text that arrives in pieces."""

from collections.abc import Sequence


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
