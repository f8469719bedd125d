"""The base of the OpenAI services, and the objects that one of their requests uses."""

import logging
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oriel_logic.client.models import Models
from oriel_logic.errors import ParameterWrong
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.openai import tokenizer
from oriel_logic.openai.decoder import Infer

if TYPE_CHECKING:  # workers import handler files too, and do without the server
    from oriel_logic.server.visit import Visit
    from oriel_logic.services.context import Context


_log = logging.getLogger(__name__)
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The objects of one request.

    models: each call is timed as a stage.
    steps: makes the many calls of a decode loop, which are one stage together.
    go_on: called when a streamed answer begins or goes on: the next step has its own time limit from then on.
    """

    visit: "Visit"
    context: "Context"
    models: Models
    steps: Infer
    go_on: Callable[[], None]


class Served:
    """A model under a public name, made in a handler file; `served_in` finds it."""

    file: HandlerFile

    def __init__(self, *, model: str, tokenizer: str | Path, served_as: str = "", version: str = "") -> None:
        """Describe a model. model, version: on the inference servers. tokenizer: a `tokenizer.json`, relative to the
        handler file.
        """
        self.served_as = served_as or model
        if NAME.match(self.served_as) is None:
            raise ValueError(
                f"{self.served_as[:64]!r} is not a valid name for a model: letters, digits and ._:/@-, at most 128, "
                "a letter or digit first"
            )
        self.model = model
        self.version = version
        self.tokenizer = Path(tokenizer)

    def locate(self, folder: Path) -> None:
        """Resolve file names, which are relative to the handler file's folder."""
        self.tokenizer = (folder / self.tokenizer).absolute()

    def __oriel_preload__(self, file: HandlerFile) -> None:
        """Read the tokenizer in the fork server, so that its workers share it.

        A tokenizer that cannot be read is reported where the model is served.
        """
        self.locate(file.folder or Path())
        if not self.problem():
            try:
                tokenizer.loaded(str(self.tokenizer))
            except Exception:  # the library raises plain Exception for a file that it cannot read
                _log.warning("openai: the tokenizer of '%s' cannot be read", self.served_as, exc_info=True)

    def problem(self) -> str:
        """Return why this cannot be served here, "" if it can."""
        return tokenizer.missing(self.tokenizer)

    async def encode(self, tools: Tools, inputs: Sequence[Any], param: str, *, longest: int = 0) -> list[Any]:
        """Tokenize each input, as INT32. Raises ParameterWrong for ids that are not tokens."""
        found = await tools.context.run(tokenizer.encode, str(self.tokenizer), inputs, longest)
        if found.problem:
            raise ParameterWrong(found.problem, param=param)
        return found.rows()


def served_in(files: Iterable[HandlerFile]) -> list[Served]:
    """Return the models at the top of these imported handler files, with their file names resolved."""
    found: list[Served] = []
    for file in files:
        for value in vars(sys.modules.get(file.module, object)).values():
            if isinstance(value, Served) and value not in found:
                value.file = file
                value.locate(file.folder or Path())
                found.append(value)
    return found
