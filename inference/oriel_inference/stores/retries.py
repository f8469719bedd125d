"""Decides when files that could not be read are tried again. Pure; its owner admits one thread at a time."""

from collections.abc import Collection

PAUSE_S = 30.0
MAX_PAUSE_S = 600.0


class Retries:
    """The failures by digest. Each further try gives a digest another name (`named`), so that it appears as changed.

    pause_s: seconds before the third try; they double with each further one.
    """

    def __init__(self) -> None:
        self.pause_s = PAUSE_S
        self._tries: dict[str, int] = {}
        self._due_s: dict[str, float] = {}

    def record_failure(self, digest: str, now_s: float, *, outage: bool) -> None:
        """Record a failure.

        outage: the store failed, not the files, so they are tried again at the next listing that succeeds. Other
        failures are tried again at the next listing, then after 30 s, and so on, doubling to ten minutes.
        """
        tries = self._tries.get(digest, 0)
        pause_s = 0.0 if outage or not tries else min(self.pause_s * 2 ** min(tries - 1, 10), MAX_PAUSE_S)
        self._due_s[digest] = now_s + pause_s

    def listed(self, digests: Collection[str], now_s: float) -> None:
        """Record that the store was listed, with these digests."""
        self._tries = {digest: tries for digest, tries in self._tries.items() if digest in digests}
        for digest, due_s in list(self._due_s.items()):
            if digest not in digests:
                del self._due_s[digest]
            elif now_s >= due_s:
                self._tries[digest] = self._tries.get(digest, 0) + 1
                del self._due_s[digest]

    def waits(self, digest: str) -> bool:
        """Return whether the digest failed and has not been tried again since."""
        return digest in self._due_s

    def named(self, digest: str) -> str:
        """Return the digest's name, which is another one for each further try."""
        tries = self._tries.get(digest, 0)
        return f"{digest}.{tries}" if tries else digest
