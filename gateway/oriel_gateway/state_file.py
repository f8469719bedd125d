"""An SQLite file of what a gateway counts, which survives a restart.

SQLite keeps it, because only changes have to be written, and a write is complete or absent. One process has the file
for itself; another process with the same file counts in memory and logs that. An unreadable file is moved aside, one
of a later version of Oriel stays as it is. No failure of the file ever fails a call.
"""

import logging
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import time_ns
from typing import Any

_log = logging.getLogger(__name__)

Work = Callable[[sqlite3.Connection], None]
FORM = 1  # of the tables, written into each file; a version that changes one of them takes the next number


class LaterForm(Exception):
    """A file is of a form that only a later version of Oriel reads. The text says which, and what to do."""


class StateFile:
    """The file of one process. Its methods block; one thread at a time may be in them.

    path: the file's path; None keeps nothing.
    holds: the name of its contents in messages ("quota counters").
    database: the open database; None while nothing is kept.
    """

    def __init__(self, path: Path | None, schema: str, *, holds: str) -> None:
        self._path = path
        self._schema = schema
        self._holds = holds
        self.database: sqlite3.Connection | None = None

    @property
    def exists(self) -> bool:
        """Return whether the file is there."""
        return self._path is not None and self._path.exists()

    def open(self, read: Work) -> None:
        """Open the file, and let `read` take what it holds. If it cannot be used, this is logged and nothing is kept.

        read: raises sqlite3.DatabaseError if the file holds what no gateway has written. It is called again for the
        empty file that then takes its place.
        """
        path = self._path
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connect(path, read)
        except sqlite3.DatabaseError as error:
            self.close()
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_BUSY:
                _log.warning(
                    "another process uses %s: the %s of this one are lost when it ends; give it a file of its own",
                    path.name,
                    self._holds,
                )
                return
            self._begin_anew(path, error, read)
        except LaterForm as later:
            self.close()
            _log.error("%s: the %s of this gateway begin at 0, and are lost when it ends", later, self._holds)
        except OSError as error:
            _log.warning("%s are not kept over a restart: %s", self._holds, error.strerror)

    def change(self, work: Work) -> None:
        """Do `work` in one transaction. Raises sqlite3.Error; then nothing was changed."""
        database = self.database
        assert database is not None
        database.execute("BEGIN IMMEDIATE")
        try:
            work(database)
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Close the file, which crashes SQLite during a write."""
        if self.database is not None:
            self.database.close()
            self.database = None

    def _connect(self, path: Path, read: Work) -> None:
        database = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        self.database = database
        form = check_form(database, path)  # before anything is changed
        # The lock excludes other processes from the first write on; it also keeps the log's index out of shared memory.
        database.execute("PRAGMA locking_mode = EXCLUSIVE")
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = FULL")
        database.execute(self._schema)
        database.execute("BEGIN IMMEDIATE")
        if form != FORM:
            database.execute(f"PRAGMA user_version = {FORM}")
        database.execute("COMMIT")
        read(database)

    def _begin_anew(self, path: Path, error: sqlite3.DatabaseError, read: Work) -> None:
        aside = path.with_name(f"{path.name}.corrupt-{time_ns() // 1_000_000_000}")
        _log.error("%s is damaged (%s): moved aside as %s, %s begin at 0", path, error, aside.name, self._holds)
        try:
            os.replace(path, aside)
            for suffix in ("-wal", "-shm"):
                beside = path.with_name(path.name + suffix)
                if beside.exists():
                    os.replace(beside, aside.with_name(aside.name + suffix))
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
            self._connect(path, read)
        except (OSError, sqlite3.DatabaseError) as again:
            _log.warning("%s are not kept over a restart: %s", self._holds, again)
            self.close()


def check_form(database: sqlite3.Connection, path: Path) -> int:
    """Return the form of a file; 0 of one that is new. path: its path. Raises LaterForm."""
    (form,) = database.execute("PRAGMA user_version").fetchone()
    if form > FORM:
        raise LaterForm(
            f"{path} is of form {form}, of a later version of Oriel, and stays as it is, because this one reads "
            f"form {FORM}: start that version again, or move the file away"
        )
    return int(form)


def read_copy(path: Path, table: str) -> list[tuple[Any, ...]]:
    """Return the rows of a table of a file, by their key, also while a gateway writes the file. Raises LaterForm,
    OSError and sqlite3.Error.

    A gateway has the file for itself, so a copy is read. SQLite changes the file only when it moves pages from its log
    there, and begins the log anew only afterwards: a log that was read between two equal reads of the file belongs to
    it.
    """
    log, data, written = path.with_name(f"{path.name}-wal"), b"", b""
    while (now := path.read_bytes()) != data:
        data = now
        written = log.read_bytes() if log.exists() else b""
    with TemporaryDirectory(prefix="oriel-state-") as folder:
        copy = Path(folder, path.name)
        copy.write_bytes(data)
        copy.with_name(log.name).write_bytes(written)
        with closing(sqlite3.connect(copy)) as database:
            check_form(database, path)
            return database.execute(f"SELECT * FROM {table}").fetchall()
