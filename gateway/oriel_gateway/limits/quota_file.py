"""Keep quota counters on disk: what was used of the present windows survives a restart, but for the last half second.

With 100,000 tenants a file that is replaced whole would be megabytes, twice a second: only changes are written. See
`state_file` for what becomes of the file.
"""

import asyncio
import logging
import sqlite3
from dataclasses import dataclass
from pathlib import Path

from oriel_gateway.limits.meters import QuotaMeter, QuotaRow
from oriel_gateway.state_file import StateFile
from oriel_policies.bounds.calendar import Period
from oriel_policies.bounds.ledger_rules import Record
from oriel_policies.bounds.limits import Bound, Window
from oriel_policies.metering.budgets import is_budget

_log = logging.getLogger(__name__)

SAVE_S = 0.5
RETRY_S = 5.0
MAX_ROWS = 500_000
_SLICE = 2000  # counters written at a time, so that collecting them does not block the loop
SCHEMA = """CREATE TABLE IF NOT EXISTS quotas (
    tenant TEXT NOT NULL, bound TEXT NOT NULL, period TEXT NOT NULL, number INTEGER NOT NULL, used INTEGER NOT NULL,
    PRIMARY KEY (tenant, bound)) WITHOUT ROWID"""
_UPSERT = "INSERT OR REPLACE INTO quotas VALUES (?, ?, ?, ?, ?)"


@dataclass(slots=True, kw_only=True)
class CountedRecord(Record):
    """A ledger's record, which the file keeps if it is one of a calendar window."""

    tenant: str
    key: str
    saved: bool = True

    def row(self) -> QuotaRow:
        """Return the window as a row of the file."""
        return QuotaRow(self.tenant, self.key, self.period.value, self.number, int(self.used))


Counted = QuotaMeter | CountedRecord


class QuotaFile:
    """The quota file of one process, opened on the first use of a quota. Without a path, memory alone.

    Single writer of its state: the loop; rows are written in a thread.
    budgets: the budgets that were in the file when it was opened, as (tenant, name).
    """

    def __init__(self, path: Path | None, *, save_s: float = SAVE_S, max_rows: int = MAX_ROWS) -> None:
        self._file = StateFile(path, SCHEMA, holds="quota counters")
        self._save_s = save_s
        self._max_rows = max_rows
        self._opened = False
        self._known: dict[tuple[str, str], tuple[int, int] | Window] = {}
        self.budgets: set[tuple[str, str]] = set()
        self._unsaved: list[Counted] = []
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._purged: dict[str, int] = {}
        self._failing = False
        self._closing = False

    async def prepare(self) -> None:
        """Open the file before the first call does, which would block the loop: reading half a million counters takes
        0.5 s.

        Does nothing if there is no file yet: it is made when there is a quota to keep.
        """
        if await asyncio.to_thread(lambda: self._file.exists):
            await asyncio.to_thread(self.open)

    def open(self) -> None:
        """Read the file; blocking. If it cannot be used, this is logged and nothing is kept."""
        if self._opened:
            return
        self._opened = True
        self._file.open(self._read)

    def window(self, tenant: str, bound: Bound) -> Window:
        """Return the window that was counted before, or a fresh one."""
        self.open()
        known = self._known.pop((tenant, bound.name), (-1, 0))
        return known if isinstance(known, Window) else Window(*known)

    def known(self, tenant: str, bound: str) -> tuple[int, int]:
        """Return the number of the window and what was used of it when the file was opened; once for each bound."""
        self.open()
        known = self._known.pop((tenant, bound), (-1, 0))
        return (known.number, known.used) if isinstance(known, Window) else known

    def keep(self, tenant: str, bound: Bound, window: Window) -> None:
        """Keep the window of a meter that is dropped; if the meter is made again, it goes on with this window."""
        if len(self._known) < self._max_rows:
            self._known[tenant, bound.name] = window

    def changed(self, meter: Counted) -> None:
        """Save this counter soon."""
        if self._file.database is None:
            meter.saved = True
            return
        self._unsaved.append(meter)
        if self._timer is None and self._writing is None and not self._closing:
            self._timer = asyncio.get_running_loop().call_later(self._save_s, self._save)

    async def close(self) -> None:
        """Save the rest. A write under way is awaited: closing the database during a write crashes SQLite."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is not None:
            await asyncio.wait((self._writing,))
        if self._file.database is not None:
            while self._unsaved:
                try:
                    await asyncio.to_thread(self._write, self._next_rows())
                except sqlite3.Error as error:
                    _log.warning("the last quota counters were not saved: %s", error)
                    break
            self._file.close()

    def _save(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        meters = self._unsaved[:_SLICE]
        rows = self._next_rows()
        self._writing = writing = loop.run_in_executor(None, self._write, rows)
        writing.add_done_callback(lambda done: self._saved(done, meters))

    def _saved(self, done: "asyncio.Future[None]", meters: list[Counted]) -> None:
        self._writing = None
        error = done.exception()
        if error is not None:
            if not self._failing:
                _log.warning("quota counters cannot be saved, trying again every %g s: %s", RETRY_S, error)
            for meter in meters:
                if meter.saved:
                    meter.saved = False
                    self._unsaved.append(meter)
        elif self._failing:
            _log.info("quota counters are saved again")
        self._failing = error is not None
        if self._unsaved and self._timer is None and self._file.database is not None and not self._closing:
            wait_s = RETRY_S if error is not None else 0.0 if len(self._unsaved) >= _SLICE else self._save_s
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._save)

    def _next_rows(self) -> list[QuotaRow]:
        meters, self._unsaved = self._unsaved[:_SLICE], self._unsaved[_SLICE:]
        rows = []
        for meter in meters:
            meter.saved = True
            rows.append(meter.row())
        return rows

    def _read(self, database: sqlite3.Connection) -> None:
        self._known.clear()
        periods = {period.value for period in Period}
        for row in database.execute(
            "SELECT tenant, bound, period, number, used FROM quotas LIMIT ?", (self._max_rows,)
        ):
            tenant, bound, period, number, used = row
            if period not in periods or not (isinstance(number, int) and isinstance(used, int) and used >= 0):
                raise sqlite3.DatabaseError("a row holds a value that no gateway writes")
            self._known[tenant, bound] = (number, used)
        self.budgets = {known for known in self._known if is_budget(known[1])}

    def _write(self, rows: list[QuotaRow]) -> None:
        """Write rows in a thread, one batch at a time."""

        def write(database: sqlite3.Connection) -> None:
            database.executemany(_UPSERT, rows)
            self._purge(database, rows)

        self._file.change(write)

    def _purge(self, database: sqlite3.Connection, rows: list[QuotaRow]) -> None:
        """Delete past windows when a new one has begun, and rows beyond the bound."""
        newest: dict[str, int] = {}
        for row in rows:
            newest[row.period] = max(row.number, newest.get(row.period, 0))
        for period, number in newest.items():
            if number > self._purged.get(period, -1):
                self._purged[period] = number
                database.execute("DELETE FROM quotas WHERE period = ? AND number < ?", (period, number))
                (count,) = database.execute("SELECT count(*) FROM quotas").fetchone()
                if count > self._max_rows:
                    database.execute(
                        "DELETE FROM quotas WHERE (tenant, bound) IN (SELECT tenant, bound FROM quotas "
                        "ORDER BY number, used LIMIT ?)",
                        (count - self._max_rows,),
                    )
