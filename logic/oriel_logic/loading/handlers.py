"""Imports handler files and finds the services in them.

A handler is imported under the module name of its `HandlerFile`, the same in every process, so that its functions and
values can be pickled between them. A file that fails to import is reported and stops no other.

**Neighbours.** A handler imports files that lie beside it by their plain names (`import prep`, `from prep import x`),
as a script would. Two services, or two versions of one, may each have a `prep.py`, so a neighbour is imported as a
part of its handler: `oriel_services.digits.beside.prep`, `oriel_services.digits@2.beside.prep`. The import statement
itself does that: a handler and its neighbours are executed with their own `__import__` (`exec` takes the builtins from
the globals that it is given). An installed package goes before a neighbour of the same name: a service called
`redis.py` may import redis. Code that looks modules up by name alone (pickles made elsewhere,
`importlib.import_module("prep")`) finds them through `sys.path`, where the folder is last.

Handlers are compiled on every load and leave no `__pycache__`: a cached file is compared with a newer one only by its
size and the second of its change.
"""

import builtins
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from oriel_logic.loading.sources import PACKAGE, HandlerFile, unfitness
from oriel_logic.services.definition import Definition, definition_of
from oriel_logic.services.serving import Services

BESIDE = "beside"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """One service, or one file that has none because of `problem`."""

    name: str
    file: HandlerFile
    definition: Definition | None = None
    problem: str = ""


def load(files: Iterable[HandlerFile], *, log: bool = True) -> list[Loaded]:
    """Import every file, in the given order; the first file with a service's name and version wins, the next is a
    problem.

    Runs user code at import.
    log: False in the fork server, whose imports repeat those of the logic process.
    """
    found: list[Loaded] = []
    taken: dict[tuple[str, str], HandlerFile] = {}
    for file in files:
        for loaded in load_file(file, log=log):
            first = taken.setdefault((loaded.name, file.version), file) if loaded.definition is not None else file
            if first is not file:
                problem = f"the name '{loaded.name}' is taken by {first.label}"
                loaded = Loaded(name=loaded.name, file=file, problem=problem)
            found.append(loaded)
    return found


def load_file(file: HandlerFile, *, log: bool) -> list[Loaded]:
    """Import one file and return its services, or a Loaded with `problem` under the file's own name."""
    unfit = unfitness(file.path) if file.path is not None else ""
    if unfit:  # opening a pipe would wait for its writer
        return [Loaded(name=file.name, file=file, problem=unfit)]
    try:
        module = sys.modules.get(file.module) or import_file(file)
        return services_of(module, file)
    except (Exception, SystemExit) as error:  # user code: whatever it raises concerns this file only
        if log:
            _log.error("services: %s cannot be imported and is not served", file.label, exc_info=error)
        return [Loaded(name=file.name, file=file, problem=one_line(error, file.path))]


def import_file(file: HandlerFile) -> ModuleType:
    if file.path is None or file.folder is None:
        return importlib.import_module(file.module)
    if str(file.folder) not in sys.path:
        sys.path.append(str(file.folder))
    if not any(isinstance(each, NeighbourFinder) for each in sys.meta_path):
        sys.meta_path.insert(0, NeighbourFinder())
    importlib.invalidate_caches()
    loader = HandlerLoader(file.module, str(file.path), own_builtins(file))
    spec = importlib.util.spec_from_file_location(file.module, file.path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(PACKAGE, package(PACKAGE))
    sys.modules[file.module] = module
    sys.modules[f"{file.module}.{BESIDE}"] = package(f"{file.module}.{BESIDE}", str(file.folder))
    try:
        loader.exec_module(module)
    except BaseException:
        forget(file.module)
        raise
    return module


def package(name: str, *path: str) -> ModuleType:
    """Make an empty package."""
    made = ModuleType(name)
    made.__path__ = list(path)
    return made


def forget(module: str) -> None:
    """Remove a handler and its neighbours from the loaded modules; code that still runs keeps its references."""
    for name in loaded_modules(f"{module}."):
        sys.modules.pop(name, None)
    sys.modules.pop(module, None)


def loaded_modules(prefix: str) -> list[str]:
    """The names of loaded modules that begin so. Safe while other threads import."""
    return [name for name in list(sys.modules) if name.startswith(prefix)]


def services_of(module: ModuleType, file: HandlerFile) -> list[Loaded]:
    if file.attribute:
        value: Any = module
        for part in file.attribute.split("."):
            value = getattr(value, part)
        definition = definition_of(value)
        if definition is None:
            raise TypeError(f"{file.attribute} is not a service: put @service on it")
        definitions = [definition]
    else:
        values = [value for value in vars(module).values() if is_own(value, module)]
        unique = {each.name: each for each in map(definition_of, values) if each is not None}
        definitions = list(unique.values())
    if len(definitions) == 1 and file.name and not definitions[0].is_named:
        definitions = [definitions[0].renamed(file.name)]
    return [Loaded(name=each.name, file=file, definition=each) for each in definitions]


def is_own(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def preload(files: Iterable[HandlerFile]) -> None:
    """Let what imported handler files define at their top load what all workers may share.

    Calls `__oriel_preload__(file)` of every value whose class has it. For the fork server, before it forks.
    """
    for file in files:
        module = sys.modules.get(file.module)
        for value in list(vars(module).values()) if module is not None else ():
            prepare = getattr(type(value), "__oriel_preload__", None)
            if prepare is not None:
                prepare(value, file)


class HandlerLoader(SourceFileLoader):
    """Loads a handler or one of its neighbours. own: the builtins of that handler."""

    def __init__(self, name: str, path: str, own: dict[str, Any]) -> None:
        super().__init__(name, path)
        self.own = own

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        raise OSError("handlers are compiled afresh")  # the base class then reads no cache

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__builtins__"] = self.own
        super().exec_module(module)


class NeighbourFinder:
    """Finds files beside a handler as parts of it: `oriel_services.digits.beside.prep`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None or not fullname.startswith(f"{PACKAGE}."):
            return None
        handler = sys.modules.get(".".join(fullname.split(".", 2)[:2]))
        known = getattr(handler, "__loader__", None)
        spec = PathFinder.find_spec(fullname, path)
        if isinstance(known, HandlerLoader) and spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = HandlerLoader(fullname, spec.loader.path, known.own)
            spec.cached = None
        return spec


def own_builtins(file: HandlerFile) -> dict[str, Any]:
    return dict(vars(builtins), __import__=own_import(file))


def own_import(file: HandlerFile) -> Callable[..., Any]:
    """Make the `__import__` of one handler and its neighbours."""
    assert file.path is not None and file.folder is not None
    folder, stem = file.folder, file.path.stem
    known: dict[str, bool] = {}

    def is_neighbour(head: str) -> bool:
        found = known.get(head)
        if found is None:
            found = known[head] = lies_in(folder, head) and not is_installed(head)
        return found

    def import_(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        head, _, rest = name.partition(".")
        if level or not is_neighbour(head):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        top = file.module if head == stem else f"{file.module}.{BESIDE}.{head}"
        if fromlist:
            return builtins.__import__(f"{top}.{rest}" if rest else top, globals, locals, fromlist, 0)
        importlib.import_module(f"{top}.{rest}" if rest else top)
        return sys.modules[top]

    return import_


def lies_in(folder: Path, head: str) -> bool:
    return (folder / f"{head}.py").is_file() or (folder / head).is_dir()


def is_installed(head: str) -> bool:
    if head in sys.builtin_module_names or head in sys.stdlib_module_names:
        return True
    handlers = map(sys.modules.get, loaded_modules(f"{PACKAGE}."))
    beside = {entry for module in handlers for entry in getattr(module, "__path__", ())}
    spec = PathFinder.find_spec(head, [entry for entry in sys.path if entry not in beside])
    return spec is not None and spec.loader is not None  # without a loader: a folder that happens to have the name


def setup_problem(services: Services, definition: Definition) -> str:
    """Set a service up in `services` and return why it cannot run here, "" if it can: the error of its `setup`, and the
    line in its file.
    """
    try:
        services.set_up(definition)
    except BaseException as error:  # user code: it concerns this service only
        module = sys.modules.get(getattr(definition.target, "__module__", ""))
        place = getattr(module, "__file__", None)
        return f"its setup failed: {one_line(error, Path(place) if place else None)}"
    return ""


def one_line(error: BaseException, file: Path | None = None) -> str:
    """Describe an error of a service's code to its author: kind, text and, if it lies in `file`, the line."""
    text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300].removesuffix(": ")
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}: {type(error).__name__}: {error.msg}"[:340]
    if file is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        if lines:
            return f"line {lines[-1]}: {text}"
    return text
