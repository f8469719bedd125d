"""What the shipped services have in common, and what a request of theirs works with."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oriel_logic.errors import ParameterWrong
from oriel_logic.models import ArrayLike, Models, Outputs
from oriel_logic.openai import tokenizer
from oriel_logic.openai.decoder import Steps
from oriel_logic.sources import HandlerFile
from oriel_logic.stages import Ledger

if TYPE_CHECKING:  # handler files are imported by workers as well, which need nothing of HTTP
    from oriel_logic.context import Context
    from oriel_logic.envelope import Visit

__all__ = ["Desk", "Served", "StepModels", "preload", "served_in"]

_log = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """One request's tools. models: timed one by one; steps: for the many calls of a decode loop.

    go_on: a streamed answer has begun, or gone on: from now on the next step has a time of its own.
    """

    visit: "Visit"
    context: "Context"
    models: Models
    steps: Steps
    go_on: Callable[[], None]


class StepModels:
    """Models for a loop: what its calls cost is added up, and nothing is kept of each one."""

    def __init__(self, models: Steps, own: Ledger, ledger: Ledger) -> None:
        """own: the ledger that `models` writes to, nobody else; ledger: the request's."""
        self._models = models
        self._own = own
        self._ledger = ledger

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        try:
            return await self._models.infer(model, inputs, outputs=outputs, version=version)
        finally:
            self._ledger.cost_us += self._own.cost_us
            self._own.cost_us = 0
            self._own.stages.clear()
            self._own.upstream.clear()


class Served:
    """A model under a public name, made in a handler file: `served_in` says in which."""

    file: HandlerFile

    def __init__(self, *, model: str, tokenizer: str | Path, served_as: str = "", version: str = "") -> None:
        """model, version: on the inference servers. tokenizer: a `tokenizer.json`, relative to the handler file."""
        self.served_as = served_as or model
        if NAME.match(self.served_as) is None:
            raise ValueError(
                f"{self.served_as[:64]!r} is no name for a model: letters, digits and ._:/@-, at most 128, "
                "a letter or digit first"
            )
        self.model = model
        self.version = version
        self.tokenizer = Path(tokenizer)

    def locate(self, folder: Path) -> None:
        """Files are named relative to the handler file's folder."""
        self.tokenizer = (folder / self.tokenizer).absolute()

    def problem(self) -> str:
        """Why this cannot be served here, "" if it can."""
        return tokenizer.missing(self.tokenizer)

    async def encode(self, desk: Desk, inputs: Sequence[Any], param: str, *, longest: int = 0) -> list[Any]:
        """Token ids of each input, INT32. Raises ParameterWrong for ids that are none."""
        found = await desk.context.run(tokenizer.encode, str(self.tokenizer), inputs, longest)
        if found.problem:
            raise ParameterWrong(found.problem, param=param)
        return found.rows()


def served_in(files: Iterable[HandlerFile]) -> list[Served]:
    """What these handler files, imported before, have at their top, with their own files found beside them."""
    found: list[Served] = []
    for file in files:
        for value in vars(sys.modules.get(file.module, object)).values():
            if isinstance(value, Served) and value not in found:
                value.file = file
                value.locate(file.folder or Path())
                found.append(value)
    return found


def preload(files: Iterable[HandlerFile]) -> None:
    """Read the tokenizers of these handler files: in the fork server, so that its workers share them.

    What cannot be read is said where it is served.
    """
    for each in served_in(files):
        if not each.problem():
            try:
                tokenizer.loaded(str(each.tokenizer))
            except Exception:  # the library's own: it gives plain Exception for a file it cannot read
                _log.warning("openai: the tokenizer of '%s' cannot be read", each.served_as, exc_info=True)
