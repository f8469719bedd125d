"""The base of the OpenAI services, and the objects that one of their requests uses."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oriel_logic.loading.sources import HandlerFile

if TYPE_CHECKING:  # workers import handler files too, and do without the server
    from oriel_logic.server.pipeline import BoundModels
    from oriel_logic.server.visit import Visit
    from oriel_logic.services.context import Context

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """The objects of one request."""

    visit: "Visit"
    context: "Context"
    models: "BoundModels"


class Served:
    """A model under a public name, made in a handler file; `served_in` finds it."""

    file: HandlerFile

    def __init__(self, *, model: str, served_as: str = "", version: str = "") -> None:
        """Describe a model. model, version: on the inference servers."""
        self.served_as = served_as or model
        if NAME.match(self.served_as) is None:
            raise ValueError(
                f"{self.served_as[:64]!r} is not a valid name for a model: letters, digits and ._:/@-, at most 128, "
                "a letter or digit first"
            )
        self.model = model
        self.version = version

    def locate(self, folder: Path) -> None:
        """Resolve file names, which are relative to the handler file's folder."""

    def problem(self) -> str:
        """Return why this cannot be served here, "" if it can."""
        return ""


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
