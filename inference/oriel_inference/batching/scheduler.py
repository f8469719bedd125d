"""What the rest of the server asks of whatever runs a model's calls: a batcher, or the scheduler of an ensemble."""

from typing import Protocol

from oriel_inference.batching.call import Call
from oriel_inference.statistics import Statistics

__all__ = ["Scheduler"]


class Scheduler(Protocol):
    """Runs the calls of one model version; on the loop."""

    @property
    def statistics(self) -> Statistics: ...

    @property
    def units(self) -> int:
        """Cores of one run, 0 if it runs nothing itself."""
        ...

    @property
    def pending(self) -> int:
        """Calls that wait."""
        ...

    @property
    def running(self) -> int:
        """What is under way: batches, or calls of an ensemble."""
        ...

    def submit(self, call: Call) -> None:
        """Take `call`; its reply comes later on the loop, or now if it is refused."""
        ...

    def leave(self, call: Call) -> bool:
        """The caller went away: no reply. Its place is free at once. False if the call had its reply before."""
        ...

    def depths(self) -> list[tuple[int, int, float | None]]:
        """(band, calls that wait, seconds a new call would wait; None if unknown) of every band seen, and of band 0."""
        ...

    def expected_wait_s(self, band: int) -> float | None:
        """Seconds a call of `band` that came now would wait; None if that is not known."""
        ...

    def close(self) -> None:
        """Fail what waits; what runs ends on its own. Nothing is taken afterwards."""
        ...
