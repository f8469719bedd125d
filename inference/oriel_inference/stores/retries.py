"""When to try again what could not be read. Pure; its owner lets one thread in at a time."""

from collections.abc import Collection

__all__ = ["Retries"]

PAUSE_S = 30.0
MAX_PAUSE_S = 600.0


class Retries:
    """What failed, by look. A look that is tried again has another name from then on: see `named`."""

    def __init__(self) -> None:
        self._tries: dict[str, int] = {}
        self._due_s: dict[str, float] = {}

    def failed(self, look: str, now_s: float, *, outage: bool) -> None:
        """outage: it says nothing about the files, the next look that succeeds may try again.

        Else the first look after it may, the one after 30 s, and so on, doubling to ten minutes.
        """
        tries = self._tries.get(look, 0)
        pause_s = 0.0 if outage or not tries else min(PAUSE_S * 2 ** min(tries - 1, 10), MAX_PAUSE_S)
        self._due_s[look] = now_s + pause_s

    def looked(self, looks: Collection[str], now_s: float) -> None:
        """The store was looked at, and this is what is there."""
        self._tries = {look: tries for look, tries in self._tries.items() if look in looks}
        for look, due_s in list(self._due_s.items()):
            if look not in looks:
                del self._due_s[look]
            elif now_s >= due_s:
                self._tries[look] = self._tries.get(look, 0) + 1
                del self._due_s[look]

    def waits(self, look: str) -> bool:
        """Whether it failed, and was not tried again since."""
        return look in self._due_s

    def named(self, look: str) -> str:
        """Another string for each time it is to be tried."""
        tries = self._tries.get(look, 0)
        return f"{look}.{tries}" if tries else look
