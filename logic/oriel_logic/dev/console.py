"""What `oriel logic dev` says: where the services are, how to call them, what became of a save. The texts are pure."""

import logging
import os
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oriel_logic.definition import Definition
from oriel_logic.dev.curl import curl_line

__all__ = ["Shown", "TracebackOfOwnFiles", "banner", "shown_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One service. sample: path of its sample file, as the shell finds it; problem: why it cannot run."""

    name: str
    definition: Definition | None = None
    sample: str = ""
    problem: str = ""


def banner(url: str, services: Sequence[Shown], models: str) -> str:
    """The lines at the start. url: of the server, without a path; models: where they come from."""
    width = max([6, *(len(each.name) for each in services)])
    lines = []
    for each in services:
        place = f"{url}/v1/services/{each.name}"
        if each.definition is None or each.problem:
            lines.append(f"{each.name:<{width}}  cannot run: {each.problem}")
            continue
        schemas, options = each.definition.schemas, each.definition.options
        sample = None if isinstance(options.sample, bytes) else options.sample
        lines.append(f"{each.name:<{width}}  POST {place}")
        lines.append(f"  {curl_line(place, schemas.input, schemas.components, sample=sample, file=each.sample)}")
    lines.append(f"{'models':<{width}}  {models}")
    lines.append(f"{'docs':<{width}}  {url}/docs")
    return "\n".join([*lines, "Save a file to reload it; Ctrl-C ends."])


def shown_path(path: Path) -> str:
    """As a person in this folder would type it: relative if that goes without climbing."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class TracebackOfOwnFiles(logging.Formatter):
    """Records for whoever writes the service: short lines, and of a traceback what lies below our own frames."""

    def __init__(self) -> None:
        super().__init__("%(levelname)s %(message)s")

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        error = ei[1]
        if error is None:
            return ""
        return explain(error)


OURS = os.sep + os.path.join("oriel_logic", "")


def explain(error: BaseException) -> str:
    """The innermost cause with its frames that are not ours; all of them if all are."""
    while error.__cause__ is not None:
        error = error.__cause__
    found = traceback.TracebackException.from_exception(error)
    own = [frame for frame in found.stack if OURS not in frame.filename and "asyncio" not in frame.filename]
    if own:
        found.stack = traceback.StackSummary.from_list(own)
    return "".join(found.format(chain=False)).rstrip()
