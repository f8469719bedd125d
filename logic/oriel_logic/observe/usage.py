"""Counts who used the processors of this server, in rows of usage and lines of the usage ledger."""

from functools import partial

from oriel_logic.errors import Outcome
from oriel_logic.observe.stages import Ledger
from oriel_policies.metering.usage import UsageBook, UsageKey, UsageRow, counters
from oriel_wire.context import CallContext
from oriel_wire.usage.lines import UsageLine

UNIT = "logic"
MAX_KNOWN = 4096


class Usage:
    """The book of a logic server. Single writer: the loop."""

    def __init__(self) -> None:
        self.book = UsageBook()
        self._rows: dict[tuple[str, str, str, str], UsageRow] = {}
        self._generation = 0

    def account(
        self, call: CallContext, target: str, outcome: Outcome, ledger: Ledger, bytes_in: int, bytes_out: int
    ) -> None:
        """Count one request that has ended, and what jobs of it use that still run.

        bytes_in, bytes_out: sizes of its body and of its answer's.
        Nobody is charged for a request that failed or whose caller left, nor for such jobs of one that ended well.
        """
        why = call.unbilled
        if not why and outcome is not Outcome.OK:
            why = "left" if outcome in (Outcome.CALLER_LEFT, Outcome.DEADLINE_EXCEEDED) else "failed"
        elif not why and not call.tenant:
            why = "untenanted"
        row = self._row(call.tenant, call.tier, target, why)
        row.cpu_ns += ledger.cpu_ns
        if ledger.lost_ns:
            self._row(call.tenant, call.tier, target, why or "failed").cpu_ns += ledger.lost_ns
        ledger.late = partial(self._late, (call.tenant, call.tier, target, why or "left"))
        if outcome is Outcome.OK:
            row.requests += 1
            row.bytes_in += bytes_in
            row.bytes_out += bytes_out
            row.tokens_in += max(0, ledger.tokens_in - ledger.recorded[0])
            row.tokens_out += max(0, ledger.tokens_out - ledger.recorded[1])

    def added(self, minute: str) -> list[UsageLine]:
        """Return what was used since the last call, as lines of the ledger."""
        return [
            UsageLine(minute=minute, unit=UNIT, **key._asdict(), **counters(values))
            for key, values in self.book.added()
        ]

    def _late(self, key: tuple[str, str, str, str], cpu_us: int) -> None:
        self._row(*key).cpu_ns += cpu_us * 1000

    def _row(self, tenant: str, tier: str, target: str, why: str) -> UsageRow:
        row = self._rows.get((tenant, tier, target, why))
        if row is not None and self._generation == self.book.generation:
            row.touch()
            return row
        if self._generation != self.book.generation or len(self._rows) >= MAX_KNOWN:
            self._rows.clear()
            self._generation = self.book.generation
        row = self._rows[tenant, tier, target, why] = self.book.row(UsageKey(tenant, tier, target, "", "", "", why))
        return row
