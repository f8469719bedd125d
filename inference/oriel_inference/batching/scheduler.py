"""The interface of everything that runs a model's calls: a batcher, or the scheduler of an ensemble."""

from typing import Protocol

from oriel_inference.backends.device_tensor import Memory
from oriel_inference.batching.call import Call
from oriel_inference.batching.device import Accounts
from oriel_inference.batching.statistics import Statistics


class Scheduler(Protocol):
    """Runs the calls of one model version; used on the loop."""

    @property
    def statistics(self) -> Statistics: ...

    @property
    def accounts(self) -> Accounts:
        """Return the rows of its callers."""
        ...

    @property
    def units(self) -> int:
        """Cores of one run, 0 if it runs nothing itself."""
        ...

    @property
    def share(self) -> float:
        """The share of the server that one run keeps busy, 0 if it runs nothing itself."""
        ...

    @property
    def is_short(self) -> bool:
        """Return whether a call that arrived now would run on the loop."""
        ...

    @property
    def resident(self) -> Memory | None:
        """Return the device whose memory all its sessions take tensors from and leave outputs in; None if there is
        none.
        """
        ...

    @property
    def pending(self) -> int:
        """Return the number of waiting calls."""
        ...

    @property
    def running(self) -> int:
        """Return the number of running batches, or of running calls of an ensemble."""
        ...

    def submit(self, call: Call) -> None:
        """Accept `call`; its reply comes later on the loop, or immediately if it is refused."""
        ...

    def caller_left(self, call: Call) -> bool:
        """Remove a call whose caller went away, without a reply, and free its place. Returns False if the call had its
        reply before.
        """
        ...

    def depths(self) -> list[tuple[int, int, float | None]]:
        """Return (band, waiting calls, expected wait of a new call in seconds or None) for band 0 and every band
        seen.
        """
        ...

    def expected_wait_s(self, band: int) -> float | None:
        """Return how many seconds a new call of `band` would wait; None if unknown."""
        ...

    def close(self) -> None:
        """Fail the waiting calls and accept no more; what runs ends on its own."""
        ...
