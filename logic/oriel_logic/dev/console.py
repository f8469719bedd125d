"""The output of `oriel logic dev`: addresses of services, how to call them, and the result of each save. Pure."""

import logging
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from oriel_logic.dev.beside import Listed
from oriel_logic.dev.curl import curl_line
from oriel_logic.errors import HandlerFailed
from oriel_logic.services.definition import Definition


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """One service. file, sample: paths for the shell, "" for no sample; problem: why it cannot run."""

    name: str
    file: str
    definition: Definition | None = None
    sample: str = ""
    problem: str = ""


def banner(url: str, services: Sequence[Shown], models: str) -> str:
    """Return the lines at the start. url: the server's URL, without a path; models: their source."""
    width = max([6, *(len(each.name) for each in services)])
    lines = [line for each in services for line in service_lines(url, each, width)]
    lines.append(f"{'models':<{width}}  {models}")
    lines.append(f"{'docs':<{width}}  {url}/docs")
    return "\n".join([*lines, "Save a file to reload it; Ctrl-C ends."])


def service_lines(url: str, service: Shown, width: int = 0) -> list[str]:
    """Describe how to call one service, or why it cannot be called."""
    place = f"{url}/v1/services/{service.name}"
    if service.definition is None or service.problem:
        return [f"{service.name:<{width}}  cannot run: {place_of(service.problem, service.file)}"]
    schemas, options = service.definition.schemas, service.definition.options
    sample = None if isinstance(options.sample, bytes) else options.sample
    line = curl_line(place, schemas.input, schemas.components, sample=sample, file=service.sample)
    return [f"{service.name:<{width}}  POST {place}", f"  {line}"]


def model_lines(found: Sequence[Listed], where: str) -> str:
    """List the models that can be called, and one line for each that cannot."""
    names = sorted({each.name for each in found if each.state == "READY"})
    broken = {
        # A reason that begins with a file of the model names it already.
        f"  cannot be loaded: {'' if each.reason.startswith(f'{each.name}/') else f'{each.name}: '}{each.reason}": None
        for each in found
        if each.state != "READY"
    }
    return "\n".join([f"{', '.join(names) or 'none'} at {where}", *broken])


def shown_path(path: Path) -> str:
    """Return a path as a person in this folder would type it: relative unless it leads upwards."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


class TracebackOfOwnFiles(logging.Formatter):
    """Formats log records for the service's author: short lines, and tracebacks of the author's own files."""

    def __init__(self, root: Path) -> None:
        """Set the root: the author's file or folder."""
        super().__init__("%(levelname)s %(message)s")
        self._root = str(root)

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        return "" if ei[1] is None else explain(ei[1], self._root)


def explain(error: BaseException, root: str) -> str:
    """Describe what a handler raised, with its frames below `root`, or with all frames if there are none."""
    while isinstance(error, HandlerFailed) and error.__cause__ is not None:
        error = error.__cause__
    found = traceback.TracebackException.from_exception(error)
    own = [frame for frame in found.stack if frame.filename.startswith(root)]
    if own or isinstance(error, SyntaxError):
        found.stack = traceback.StackSummary.from_list(own)
    return "".join(found.format(chain=False)).rstrip()


def place_of(problem: str, file: str) -> str:
    """Write a problem's "line 3: X" as "file:3: X", which editors follow, with a fix if one is known."""
    found = re.match(r"(?:(.*?): )?line (\d+): (.*)", problem, re.DOTALL)
    if found is None:
        return f"{file}: {problem}"
    context = f" ({found[1]})" if found[1] else ""
    return f"{file}:{found[2]}: {found[3]}{context}{remedy(found[3])}"


def remedy(text: str) -> str:
    missing = re.search(r"No module named '([A-Za-z0-9_]+)", text)
    if missing:
        return f": install it (python -m pip install {missing[1]})"
    return ": is an `await` missing?" if "coroutine" in text else ""
