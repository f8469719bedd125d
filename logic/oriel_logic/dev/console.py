"""What `oriel logic dev` says: where the services are, how to call them, what became of a save. The texts are pure."""

import logging
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oriel_logic.definition import Definition
from oriel_logic.dev.beside import Listed
from oriel_logic.dev.curl import curl_line
from oriel_logic.errors import HandlerFailed

__all__ = ["Shown", "TracebackOfOwnFiles", "banner", "model_lines", "place_of", "service_lines", "shown_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One service. file, sample: paths as the shell finds them, "" for no sample; problem: why it cannot run."""

    name: str
    file: str
    definition: Definition | None = None
    sample: str = ""
    problem: str = ""


def banner(url: str, services: Sequence[Shown], models: str) -> str:
    """The lines at the start. url: of the server, without a path; models: where they come from."""
    width = max([6, *(len(each.name) for each in services)])
    lines = [line for each in services for line in service_lines(url, each, width)]
    lines.append(f"{'models':<{width}}  {models}")
    lines.append(f"{'docs':<{width}}  {url}/docs")
    return "\n".join([*lines, "Save a file to reload it; Ctrl-C ends."])


def service_lines(url: str, service: Shown, width: int = 0) -> list[str]:
    """How to call one service, or why it cannot be called."""
    place = f"{url}/v1/services/{service.name}"
    if service.definition is None or service.problem:
        return [f"{service.name:<{width}}  cannot run: {place_of(service.problem, service.file)}"]
    schemas, options = service.definition.schemas, service.definition.options
    sample = None if isinstance(options.sample, bytes) else options.sample
    line = curl_line(place, schemas.input, schemas.components, sample=sample, file=service.sample)
    return [f"{service.name:<{width}}  POST {place}", f"  {line}"]


def model_lines(found: Sequence[Listed], where: str) -> str:
    """Which models can be called; those that cannot have a line each."""
    names = sorted({each.name for each in found if each.state == "READY"})
    broken = {
        # A reason that begins with a file of the model's says its name already.
        f"  cannot be loaded: {'' if each.reason.startswith(f'{each.name}/') else f'{each.name}: '}{each.reason}": None
        for each in found
        if each.state != "READY"
    }
    return "\n".join([f"{', '.join(names) or 'none'} at {where}", *broken])


def shown_path(path: Path) -> str:
    """As a person in this folder would type it: relative if that goes without climbing."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class TracebackOfOwnFiles(logging.Formatter):
    """Records for whoever writes the service: short lines, and of a traceback what lies in their own files."""

    def __init__(self, root: Path) -> None:
        """root: the file or folder that is theirs."""
        super().__init__("%(levelname)s %(message)s")
        self._root = str(root)

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "" if ei[1] is None else explain(ei[1], self._root)


def explain(error: BaseException, root: str) -> str:
    """What a handler raised, with those of its frames that lie below `root`; with all of them if none does."""
    while isinstance(error, HandlerFailed) and error.__cause__ is not None:
        error = error.__cause__
    found = traceback.TracebackException.from_exception(error)
    own = [frame for frame in found.stack if frame.filename.startswith(root)]
    if own or isinstance(error, SyntaxError):
        found.stack = traceback.StackSummary.from_list(own)
    return "".join(found.format(chain=False)).rstrip()


def place_of(problem: str, file: str) -> str:
    """A problem with its "line 3: X" as "file:3: X", as editors follow it; with a mend where one is known."""
    found = re.match(r"(?:(.*?): )?line (\d+): (.*)", problem, re.DOTALL)
    if found is None:
        return f"{file}: {problem}"
    context = f" ({found[1]})" if found[1] else ""
    return f"{file}:{found[2]}: {found[3]}{context}{mend(found[3])}"


def mend(text: str) -> str:
    missing = re.search(r"No module named '([A-Za-z0-9_]+)", text)
    if missing:
        return f": install it (python -m pip install {missing[1]})"
    return ": is an `await` missing?" if "coroutine" in text else ""
