"""Keep the error budgets over a restart: changes are written twice a minute, and the rest when the gateway ends.

The file belongs to one process (`state_file`). A gateway that ends without warning loses up to half a minute of calls.
"""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from time import time
from typing import Final

from oriel_gateway.observe.budgets import Key, Row
from oriel_gateway.observe.stats import Stats
from oriel_gateway.state_file import StateFile
from oriel_policies.promise.error_budget import LONG, SHORT

_log = logging.getLogger(__name__)

NAME: Final = "objectives.db"
SAVE_S: Final = 30.0
SCHEMA: Final = """CREATE TABLE IF NOT EXISTS slots (
    tenant TEXT NOT NULL, tier TEXT NOT NULL, target TEXT NOT NULL, width INTEGER NOT NULL, start INTEGER NOT NULL,
    total INTEGER NOT NULL, bad INTEGER NOT NULL, PRIMARY KEY (tenant, tier, target, width, start)) WITHOUT ROWID"""
UPSERT: Final = "INSERT OR REPLACE INTO slots VALUES (?, ?, ?, ?, ?, ?, ?)"
_PURGE: Final = "DELETE FROM slots WHERE width = ? AND start < ?"
_DROP: Final = "DELETE FROM slots WHERE tenant = ? AND tier = ? AND target = ?"
_ROWS: Final = "SELECT tenant, tier, target, width, start, total, bad FROM slots"


class BudgetFile:
    """Reads the file at the start, and writes it while `run` runs.

    path: the file; None keeps budgets in memory. While `run` runs, calls are counted at least every `SAVE_S`.
    """

    def __init__(
        self,
        path: Path | None,
        stats: Stats,
        *,
        clock: Callable[[], float] = time,
    ) -> None:
        self._file = StateFile(path, SCHEMA, holds="error budgets")
        self._stats = stats
        self._clock = clock
        self._purged_s = 0.0
        self._failing = False

    def open(self) -> None:
        """Read the file; blocking. If it cannot be used, this is logged and nothing is kept."""
        self._file.open(self._read)
        self._stats.objectives.budgets.keeps = self._file.database is not None

    async def run(self) -> None:
        """Write changed counts until it is cancelled, then the rest."""
        try:
            while True:
                await asyncio.sleep(SAVE_S)
                await self.save()
        finally:
            await self.save()
            self.close()

    def close(self) -> None:
        """Close the file, which crashes SQLite during a write."""
        self._file.close()

    async def save(self) -> None:
        """Write the counts that have changed. A failure is logged, and the next time tries again."""
        budgets = self._stats.objectives.budgets
        file = self._file
        if file.database is None:
            return
        dropped, rows = budgets.take_unsaved()
        if not rows:
            return
        now = self._clock()
        # Waited for also when the task is cancelled: a file that is closed during a write crashes SQLite.
        writing = asyncio.ensure_future(asyncio.to_thread(self._write, file, dropped, rows, now))
        try:
            await asyncio.shield(writing)
        except asyncio.CancelledError:
            await asyncio.wait((writing,))
            if writing.exception() is not None:
                budgets.give_back(dropped, rows)
            raise
        except sqlite3.Error as error:
            if not self._failing:
                _log.warning("error budgets cannot be saved, trying again every %g s: %s", SAVE_S, error)
            self._failing = True
            budgets.give_back(dropped, rows)
        else:
            self._failing = False

    def _write(self, file: StateFile, dropped: list[Key], rows: list[Row], now: float) -> None:
        def write(database: sqlite3.Connection) -> None:
            database.executemany(_DROP, dropped)
            database.executemany(UPSERT, rows)
            if now - self._purged_s >= SHORT[0]:
                for width_s, count in (SHORT, LONG):
                    database.execute(_PURGE, (width_s, now - width_s * count))
                self._purged_s = now

        file.change(write)

    def _read(self, database: sqlite3.Connection) -> None:
        now, oldest = self._clock(), {width_s: width_s * count for width_s, count in (SHORT, LONG)}

        def rows() -> Iterator[Row]:
            for row in map(Row._make, database.execute(_ROWS)):
                numbers = all(isinstance(each, int) and 0 <= each < 1 << 40 for each in row[3:])
                if not numbers or not all(isinstance(each, str) for each in row[:3]):
                    raise sqlite3.DatabaseError("a row holds a value that no gateway writes")
                if row.width_s in oldest and now - oldest[row.width_s] <= row.start_s <= now + row.width_s:
                    yield row

        self._stats.objectives.budgets.load(rows())
