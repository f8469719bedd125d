"""The permit of a stream that waits for its client.

A permit stands for work upstream. A client that does not read, or a gRPC stream whose messages have all been answered,
would keep others from it for nothing: twelve such streams of the lowest tier could hold all permits of a pool. So after
LENT_AFTER_S the permit is lent to whoever waits, and that time is neither charged nor a sample of how long calls take.
"""

import asyncio
from time import monotonic

from oriel_gateway.pools import PoolGate

__all__ = ["LENT_AFTER_S", "Loan"]

LENT_AFTER_S = 0.5


class Loan:
    """One call's permit, as long as it is the call's. lent: somebody else has it. On the loop; `end` it once."""

    __slots__ = ("_gate", "_lent_s", "_since_s", "_timer", "_total_s")

    def __init__(self, gate: PoolGate) -> None:
        self._gate = gate
        self._since_s = 0.0  # waits for the client since then
        self._lent_s = 0.0
        self._total_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lent(self) -> bool:
        """Somebody else may have the permit."""
        return self._lent_s > 0.0

    def idle(self) -> None:
        """The stream waits for its client from now on. Cheap: one timer per half a second, not per message."""
        if not self._since_s:
            self._since_s = monotonic()
        if self._timer is None and not self.lent:
            self._timer = asyncio.get_running_loop().call_later(LENT_AFTER_S, self._look)

    def busy(self) -> None:
        """It goes on, and takes its permit back at once: for a while more than the pool's may be out."""
        self._since_s = 0.0
        if self.lent:
            self._gate.admission.inflight += 1
            self.regained()

    def regained(self) -> None:
        """The call queued for a permit and got one."""
        self._since_s = 0.0
        self._total_s += monotonic() - self._lent_s
        self._lent_s = 0.0

    def end(self) -> float:
        """The call is over and will give its permit back: seconds for which it was lent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.busy()
        return self._total_s

    def _look(self) -> None:
        self._timer = None
        if not self._since_s:
            return
        left_s = self._since_s + LENT_AFTER_S - monotonic()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        self._lent_s = monotonic()
        self._gate.admission.inflight -= 1
        self._gate.pump()
