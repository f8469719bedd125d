"""Loads handler files. Each `*.py` of a services folder is imported once; what `@service` marked in it is served.

A file that fails to import is reported and does not stop the others. Files are imported as
`oriel_services.<stem>`, under the same name in the logic process and in the fork server, so that functions and
values of a handler file travel between them. The folder itself is put last on the import path: a handler may import
a plain helper file that lies beside it.
"""

import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from oriel_logic.definition import Definition, definition_of
from oriel_logic.errors import ServiceBroken, ServiceUnknown

__all__ = ["Loaded", "Registry", "load", "one_line"]

PACKAGE = "oriel_services"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One service, or one file that gave none because of `problem`."""

    name: str
    file: str
    definition: Definition | None = None
    problem: str = ""


def load(folders: Iterable[Path], *, log: bool = True) -> list[Loaded]:
    """Import every handler file of `folders`, in order of folder, then name.

    Runs user code at import. `log` False for the fork server, whose imports repeat those of the logic process.
    """
    found: list[Loaded] = []
    taken: dict[str, Path] = {}
    for folder in folders:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
        for file in sorted(folder.glob("*.py")):
            if file.name.startswith((".", "_")):
                continue
            for loaded in load_file(file, log=log):
                if loaded.definition is not None and taken.setdefault(loaded.name, file) != file:
                    problem = f"the name '{loaded.name}' is taken by {taken[loaded.name].name}"
                    loaded = Loaded(name=loaded.name, file=file.name, problem=problem)
                found.append(loaded)
    return found


def load_file(file: Path, *, log: bool) -> list[Loaded]:
    """The services of one file; a Loaded with `problem` under the file's own name if it cannot be imported."""
    name = f"{PACKAGE}.{file.stem}"
    if name in sys.modules:
        known = getattr(sys.modules[name], "__file__", "") or ""
        if Path(known) != file:
            return [Loaded(name=file.stem, file=file.name, problem="another folder has a file of the same name")]
        return services_of(sys.modules[name], file)
    try:
        module = import_file(name, file)
    except (Exception, SystemExit) as error:  # user code: whatever it raises concerns this file only
        if log:
            _log.error("services: %s cannot be imported and is not served", file.name, exc_info=error)
        return [Loaded(name=file.stem, file=file.name, problem=one_line(error, file))]
    return services_of(module, file)


def import_file(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def services_of(module: ModuleType, file: Path) -> list[Loaded]:
    definitions = [definition_of(value) for value in vars(module).values() if is_own(value, module)]
    unique = {d.name: d for d in definitions if d is not None}
    return [Loaded(name=name, file=file.name, definition=each) for name, each in unique.items()]


def is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def one_line(error: BaseException, file: Path | None = None) -> str:
    """What a service's code raised, for its author: kind, text and, if it lies in `file`, the line."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"[:340]
    if file is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if lines:
            return f"line {lines[-1]}: {text}"
    return text


class Registry:
    """The services of this server and why some cannot run. Single writer: the loop."""

    def __init__(self, loaded: Iterable[Loaded]) -> None:
        everything = list(loaded)
        self._loaded: dict[str, Loaded] = {}
        for each in everything:
            if each.name not in self._loaded or self._loaded[each.name].definition is None:
                self._loaded[each.name] = each
        self._shadowed = [each for each in everything if self._loaded[each.name] is not each]
        self._problems = {each.name: each.problem for each in self._loaded.values() if each.problem}

    def find(self, name: str) -> Definition:
        """Raises ServiceUnknown or ServiceBroken."""
        found = self._loaded.get(name)
        if found is None:
            raise ServiceUnknown(f"there is no service {name[:128]!r}")
        if found.definition is None or name in self._problems:
            raise ServiceBroken(f"the service '{name}' cannot run: GET /v1/services says why")
        return found.definition

    def definitions(self) -> list[Definition]:
        """Every service that could be loaded, whether or not it can run."""
        return [each.definition for each in self._loaded.values() if each.definition is not None]

    def mark_broken(self, name: str, problem: str) -> None:
        """Take `name` out of service; logged the first time. Unknown names are ignored."""
        if name in self._loaded and name not in self._problems:
            self._problems[name] = problem
            _log.error("services: '%s' cannot run: %s", name, problem)

    def describe(self) -> list[dict[str, object]]:
        """For `GET /v1/services`: name, file, state, description, model or problem."""
        shadowed: list[dict[str, object]] = [
            {"name": each.name, "file": each.file, "state": "broken", "problem": each.problem}
            for each in self._shadowed
        ]
        return [self.describe_one(name) for name in sorted(self._loaded)] + shadowed

    def describe_one(self, name: str) -> dict[str, object]:
        """Raises ServiceUnknown."""
        found = self._loaded.get(name)
        if found is None:
            raise ServiceUnknown(f"there is no service {name[:128]!r}")
        problem = self._problems.get(name, "")
        facts: dict[str, object] = {"name": name, "file": found.file, "state": "broken" if problem else "ready"}
        if found.definition is not None:
            facts |= {"path": f"/v1/services/{name}", "description": found.definition.description}
            if found.definition.model:
                facts["model"] = found.definition.model
        if problem:
            facts["problem"] = problem
        return facts
