"""The models of a `fakes.py` in place of inference servers; the file is read again when it was saved."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from oriel_logic.dev.console import shown_path
from oriel_logic.loading import one_line
from oriel_logic.models import ArrayLike, Models, Outputs
from oriel_logic.stages import Ledger
from oriel_wire.context import CallContext
from oriel_wire.errors import StartFailed

__all__ = ["FAKES", "FakeServers"]

FAKES = "fakes.py"
ATTRIBUTE = "models"
STAGE = "infer"
_log = logging.getLogger(__name__)


class FakeServers:
    """Stands where `InferenceServers` stands. path: a file whose `models` has `infer`; it is run in this process."""

    def __init__(self, path: Path) -> None:
        """Raises StartFailed with the place in the file."""
        self._path = path
        self._stamp = stamp(path)
        try:
            self._models = load(path)
        except (Exception, SystemExit) as error:  # user code
            raise StartFailed(f"{shown_path(path)}: {one_line(error, path)}") from error

    @property
    def servers(self) -> "FakeServers":
        return self

    async def start(self) -> None:
        """There is nothing to look up."""

    async def close(self) -> None:
        """There is nothing to close."""

    def bind(self, call: CallContext, ledger: Ledger) -> "BoundFakes":
        found = stamp(self._path)
        if found != self._stamp:
            self._stamp = found
            try:
                self._models = load(self._path)
                _log.info("%s: read again", shown_path(self._path))
            except (Exception, SystemExit) as error:  # user code
                _log.error("%s: %s: the old fakes stay", shown_path(self._path), one_line(error, self._path))
        return BoundFakes(self._models, ledger)


def stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def load(path: Path) -> Models:
    """`models` of the file. Raises what its code raises, and TypeError with what it lacks."""
    module = ModuleType("oriel_fakes")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    found: Any = getattr(module, ATTRIBUTE, None)
    if not hasattr(found, "infer"):
        raise TypeError('there is no `models` in it: write `models = FakeModels({"name": function})`')
    return found  # type: ignore[no-any-return]


class BoundFakes:
    """`Models` for one request; each call is a stage `infer` of it, as with real ones."""

    def __init__(self, models: Models, ledger: Ledger) -> None:
        self._models = models
        self._ledger = ledger

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        with self._ledger.stage(STAGE, kind="client") as stage:
            stage.attributes["oriel.model"] = model
            return await self._models.infer(model, inputs, outputs=outputs, version=version)

    def rebind(self, call: CallContext) -> None:
        """A stream goes on; fakes have no deadline."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._models, name)
