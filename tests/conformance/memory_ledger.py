"""The ledger in memory with what Redis has to know beside it: gateways that fall silent, and clocks that are set."""

from collections.abc import Callable
from time import monotonic

from oriel_gateway.limits import memory_ledger
from oriel_gateway.limits.ledger import MISSED_S, PRESENCE_S, STEP_S, WHOLE_SHARE, Ledger, Presence
from oriel_policies.bounds.ledger_rules import Record, judge

__all__ = ["MemoryLedger", "Record", "judge"]


class MemoryLedger(memory_ledger.MemoryLedger):
    """clock: the clock of the gateways, in seconds."""

    def __init__(self, now_us: Callable[[], float], *, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(now_us)
        self.clock = clock

    def seat(self, holder: str) -> Ledger:
        return _Seat(self, holder)


class _Seat(memory_ledger.Seat):
    def __init__(self, ledger: MemoryLedger, holder: str) -> None:
        super().__init__(ledger, holder)
        self._clock = ledger.clock
        self._heard_s: float | None = None

    async def hello(self, share: float) -> Presence:
        ledger = self._ledger
        now_us = ledger.now_us()
        now_s = self._clock()
        jump_us, own = 0.0, ledger.present.get(self._holder)
        if own is not None and self._heard_s is not None:
            jump_us = now_us - own[0] - (now_s - self._heard_s) * 1e6
        self._heard_s = now_s
        for name, (at, others) in ledger.present.items():
            if abs(jump_us) >= STEP_S * 1e6:
                ledger.present[name] = (min(at + jump_us, now_us), others)
            elif at > now_us + STEP_S * 1e6:
                ledger.present[name] = (now_us, others)
        await super().hello(share)
        ledger.present = {n: last for n, last in ledger.present.items() if now_us - last[0] <= MISSED_S * 1e6}
        silent = [
            share for at, share in ledger.present.values() if now_us - at > PRESENCE_S * 1e6 and share < WHOLE_SHARE
        ]
        return Presence(len(ledger.present), len(silent), sum(silent))
