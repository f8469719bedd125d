"""Decides when to try again what could not be read. Pure; its owner admits one thread at a time."""

from collections.abc import Collection

PAUSE_S = 30.0
MAX_PAUSE_S = 600.0


class Retries:
    """The failures by digest. A digest that is tried again has another name from then on, see `named`."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}
        self._due_s: dict[str, float] = {}

    def failed(self, look: str, now_s: float, *, outage: bool) -> None:
        """Record a failure.

        outage: it says nothing about the files, so the next listing that succeeds may try again. Otherwise the first
        listing after it may, then one after 30 s, and so on, doubling to ten minutes.
        """
        tries = self._tries.get(look, 0)
        pause_s = 0.0 if outage or not tries else min(PAUSE_S * 2 ** min(tries - 1, 10), MAX_PAUSE_S)
        self._due_s[look] = now_s + pause_s

    def looked(self, looks: Collection[str], now_s: float) -> None:
        """Record that the store was listed, with these digests."""
        self._tries = {look: tries for look, tries in self._tries.items() if look in looks}
        for look, due_s in list(self._due_s.items()):
            if look not in looks:
                del self._due_s[look]
            elif now_s >= due_s:
                self._tries[look] = self._tries.get(look, 0) + 1
                del self._due_s[look]

    def waits(self, look: str) -> bool:
        """Return whether it failed and was not tried again since."""
        return look in self._due_s

    def named(self, look: str) -> str:
        """Return another name for each further try."""
        tries = self._tries.get(look, 0)
        return f"{look}.{tries}" if tries else look
