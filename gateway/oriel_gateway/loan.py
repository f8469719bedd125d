"""The permit of a stream that waits for its client.

A permit stands for work upstream. A client that does not read, or a gRPC stream whose messages have all been answered,
would keep others from it for nothing: twelve such streams of the lowest tier could hold all permits of a pool. So the
permit is lent to whoever waits, and that time is neither charged nor a sample of how long calls take.

After LENT_AFTER_S anybody may have it. A more urgent call, or one of another tenant, gets a reader's at once if it
would have to wait: 200 who asked for 8 MiB and read nothing kept all others waiting for that time, 16 after 16.
Calls of the reader's own tenant do not, or the upstream would hold an answer for every one of them.
"""

import asyncio
from time import monotonic

from oriel_gateway.pools import PoolGate
from oriel_policies.documents import Tenant

__all__ = ["LENT_AFTER_S", "Loan"]

LENT_AFTER_S = 0.5


class Loan:
    """One call's permit, as long as it is the call's. lent: somebody else has it. On the loop; `end` it once.

    tenant: of a reader, None for a gRPC stream.
    """

    __slots__ = ("_gate", "_lent_s", "_since_s", "_timer", "_total_s", "tenant")

    def __init__(self, gate: PoolGate, tenant: Tenant | None = None) -> None:
        self._gate = gate
        self.tenant = tenant
        self._since_s = 0.0  # waits for the client since then
        self._lent_s = 0.0
        self._total_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def lent(self) -> bool:
        """Somebody else may have the permit."""
        return self._lent_s > 0.0

    def held_until_s(self, now: float) -> float:
        """`now`, or when the permit was lent."""
        return self._lent_s or now

    def idle(self) -> None:
        """The stream waits for its client from now on. Cheap: one timer per half a second, not per message."""
        gate = self._gate
        if not self._since_s:
            self._since_s = monotonic()
            if self.tenant is not None and not self.lent:
                gate.unread[self] = None
                if gate.admission.queue.items:
                    gate.pump()
        if self._timer is None and not self.lent:
            self._timer = asyncio.get_running_loop().call_later(LENT_AFTER_S, self._look)

    def busy(self) -> None:
        """It goes on, and takes its permit back at once: for a while more than the pool's may be out."""
        self._since_s = 0.0
        self._gate.unread.pop(self, None)
        if self.lent:
            self._gate.admission.inflight += 1
            self.regained()

    def lend(self) -> None:
        """Somebody else has the permit from now on; whoever calls this sees to it."""
        self._gate.unread.pop(self, None)
        self._lent_s = monotonic()
        self._gate.admission.inflight -= 1

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
        if not self._since_s or self.lent:
            return
        left_s = self._since_s + LENT_AFTER_S - monotonic()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
            return
        self.lend()
        self._gate.pump()
