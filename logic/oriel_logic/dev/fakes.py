"""Serves the models of `fakes.py` files in place of inference servers; a file is read again when it was saved."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oriel_logic.client.models import ModelSpec
from oriel_logic.dev.console import shown_path
from oriel_logic.loading.handlers import one_line
from oriel_logic.observe.stages import Ledger
from oriel_logic.testing.models import BoundFakes, FakeModels, load_fakes
from oriel_wire.context import CallContext
from oriel_wire.errors import StartFailed

_log = logging.getLogger(__name__)


class FakeServers:
    """Replaces `Upstreams`. paths: files with a FakeModels `models`, which run in this process.

    If several files fake a model, the first one counts.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        """Load the files. Raises StartFailed with the place in the file."""
        self._paths = paths
        self._stamps = {path: stamp(path) for path in paths}
        self._fakes: dict[Path, FakeModels] = {}
        for path in paths:
            try:
                self._fakes[path] = load_fakes(path)
            except (Exception, SystemExit) as error:  # user code
                raise StartFailed(f"{shown_path(path)}: {one_line(error, path)}") from error
        self._models = together(list(self._fakes.values()))

    @property
    def names(self) -> list[str]:
        """Return the names of the faked models."""
        return sorted(self._models.models)

    async def start(self) -> None:
        """Do nothing: there are no addresses to look up."""

    async def close(self) -> None:
        """Do nothing: there are no connections."""

    def bind(self, call: CallContext, ledger: Ledger) -> BoundFakes:
        for path in self._paths:
            found = stamp(path)
            if found != self._stamps[path]:
                self._stamps[path] = found
                self._read_again(path)
        return self._models.bind(call, ledger)

    def _read_again(self, path: Path) -> None:
        try:
            self._fakes[path] = load_fakes(path)
            self._models = together([self._fakes[each] for each in self._paths])
            _log.info("%s was read again", shown_path(path))
        except (Exception, SystemExit) as error:  # user code
            _log.error("%s: %s: the old fakes stay", shown_path(path), one_line(error, path))


def together(fakes: Sequence[FakeModels]) -> FakeModels:
    """Merge several fakes into one; the first one that has a model counts, with what it says of that model."""
    if len(fakes) == 1:
        return fakes[0]  # its class may be the user's own
    models: dict[str, Any] = {}
    specs: dict[str, ModelSpec] = {}
    takes_s: dict[str, float] = {}
    parameters: dict[str, Mapping[str, str]] = {}
    for each in reversed(fakes):
        for name in each.models:
            specs.pop(name, None)
            takes_s.pop(name, None)
        models |= each.models
        specs |= each.specs
        takes_s |= each.takes_s
        parameters |= each.configured
    clock = next((each.clock for each in fakes if each.clock is not None), None)
    return FakeModels(models, specs=list(specs.values()), takes_s=takes_s, parameters=parameters, clock=clock)


def stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
