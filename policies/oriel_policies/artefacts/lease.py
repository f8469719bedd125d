"""One build per fingerprint in a group of servers: a lease that its holder renews.

The lease is a small record beside the artefacts, in a folder or an object store that the servers of a group share. It
names its holder and carries a number that the holder raises every BEAT_S, in a store every STORE_BEAT_S. Another server
takes it over when it has seen the same number for EXPIRE_S or STORE_EXPIRE_S of its own clock, so that no two clocks
are ever compared.

The lease saves work; nothing depends on it for correctness. If two servers ever build the same artefact, both build the
same thing, and the first to publish wins.
"""

from dataclasses import dataclass
from enum import Enum

BEAT_S = 5.0
EXPIRE_S = 30.0
STORE_BEAT_S = 20.0
STORE_EXPIRE_S = 90.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The content of a lease."""

    holder: str
    beat: int


class LeaseVerdict(Enum):
    """What a server that wants the artefact does next."""

    TAKE = "take"  # nobody builds
    WAIT = "wait"  # somebody builds
    TAKE_OVER = "take over"  # somebody began, and is gone


class LeaseWatch:
    """One server's view of one lease. now: of its own monotonic clock, never running backwards."""

    def __init__(self, expire_s: float = EXPIRE_S) -> None:
        self._expire_s = expire_s
        self._seen: LeaseRecord | None = None
        self._since_s = 0.0

    def judge(self, found: LeaseRecord | None, now: float) -> LeaseVerdict:
        """Judge what was read just now; None if there is no lease."""
        if found is None:
            self._seen = None
            return LeaseVerdict.TAKE
        if found != self._seen:
            self._seen, self._since_s = found, now
        return LeaseVerdict.TAKE_OVER if now - self._since_s >= self._expire_s else LeaseVerdict.WAIT
