"""The models of a `fakes.py` in place of inference servers; the file is read again when it was saved."""

import logging
from pathlib import Path

from oriel_logic.dev.console import shown_path
from oriel_logic.loading import one_line
from oriel_logic.stages import Ledger
from oriel_logic.testing.fakes_file import load_fakes
from oriel_logic.testing.models import BoundFakes
from oriel_wire.context import CallContext
from oriel_wire.errors import StartFailed

__all__ = ["FakeServers"]

_log = logging.getLogger(__name__)


class FakeServers:
    """Stands where `InferenceServers` stands. path: a file with a FakeModels `models`; it runs in this process."""

    def __init__(self, path: Path) -> None:
        """Raises StartFailed with the place in the file."""
        self._path = path
        self._stamp = stamp(path)
        try:
            self._models = load_fakes(path)
        except (Exception, SystemExit) as error:  # user code
            raise StartFailed(f"{shown_path(path)}: {one_line(error, path)}") from error

    @property
    def names(self) -> list[str]:
        """Of the models that are faked."""
        return sorted(self._models.models)

    @property
    def servers(self) -> "FakeServers":
        return self

    async def start(self) -> None:
        """There is nothing to look up."""

    async def close(self) -> None:
        """There is nothing to close."""

    def bind(self, call: CallContext, ledger: Ledger) -> BoundFakes:
        found = stamp(self._path)
        if found != self._stamp:
            self._stamp = found
            try:
                self._models = load_fakes(self._path)
                _log.info("%s: read again", shown_path(self._path))
            except (Exception, SystemExit) as error:  # user code
                _log.error("%s: %s: the old fakes stay", shown_path(self._path), one_line(error, self._path))
        return self._models.bind(call, ledger)


def stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
