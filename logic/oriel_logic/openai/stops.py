"""Stop strings in text that comes in pieces."""

from collections.abc import Sequence

__all__ = ["StopScanner"]


class StopScanner:
    """Passes text on up to the first stop string, which may lie across pieces, and holds back what may begin one.

    The stop string that is complete first counts; of two that are complete at the same character the longer one. What
    comes out does not depend on how the text was cut.
    """

    __slots__ = ("_held", "_stops", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """stops: none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """What may be shown now. Once `stopped`, nothing more."""
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
        """The text has ended: what was held back began no stop string after all."""
        held, self._held = self._held, ""
        return held


def beginning(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, less than the whole of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
