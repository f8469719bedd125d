"""Finds the files that hold services, and the module name under which every process imports each of them.

    services/
        sentiment.py                    one file, one service (or several: each by its own name)
        digits/handler.py               a folder: the handler, its neighbours, `pyproject.toml` with [tool.oriel]
        ranker/1/handler.py             versions side by side
        ranker/2/handler.py

Names that begin with "." or "_" are skipped, and files for tests (`test_*.py`, `conftest.py`, `fakes.py`).
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

PACKAGE = "oriel_services"
GROUP = "oriel.services"
HANDLER = "handler.py"
SUFFIXES = (".py", ".toml")  # a TOML file is listed, so that its author reads why it is not served
TOML = (
    "TOML cannot declare a pipeline: write it in a .py file with @service, or as an ensemble of models "
    "(docs/logic-pipelines.md), and remove this file or begin its name with _"
)
FIRST_VERSION = "1"
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
NO_HANDLER = re.compile(r"pyproject\.toml|(?:test_.*|conftest|fakes)\.py\Z")
UNFIT = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerFile:
    """One file of services; every process that loads it gets an equal value.

    module: the name that every process imports it under, so that its functions and values can be pickled.
    path: the file; None if `module` is found on the import path and its service is `attribute`.
    folder: the folder of its neighbours, for its own imports.
    name: the name of its service, if the file has only one and that has no name of its own.
    """

    module: str
    path: Path | None = None
    folder: Path | None = None
    version: str = FIRST_VERSION
    name: str = ""
    attribute: str = ""

    @property
    def origin(self) -> str:
        """The place of the handler in its source; the same before and after a change."""
        return str(self.path) if self.path is not None else self.label

    @property
    def is_plain(self) -> bool:
        """Return whether the source lies directly in the services folder."""
        return self.path is not None and self.path.name != HANDLER

    @property
    def label(self) -> str:
        """The part of its path that identifies it in messages, or `module:attribute`."""
        if self.path is None:
            return f"{self.module}:{self.attribute}"
        if self.path.name != HANDLER or self.folder is None:
            return sayable(self.path.name)
        folders = dict.fromkeys((self.name, sayable(self.folder.name)))
        return "/".join((*folders, HANDLER))

    def to_record(self) -> dict[str, str]:
        """Return the fields as JSON can hold them; `from_record` reads them."""
        return {name: "" if value is None else str(value) for name, value in asdict(self).items()}

    @classmethod
    def from_record(cls, record: Mapping[str, str]) -> "HandlerFile":
        """Return the file that `to_record` has described."""
        path, folder = (Path(record[name]) if record[name] else None for name in ("path", "folder"))
        named = {name: record[name] for name in ("module", "version", "name", "attribute")}
        return cls(path=path, folder=folder, **named)


def module_name(stem: str, turn: int = 1) -> str:
    """Return the module name of a handler. turn: counts the loads from one place, for `oriel_services.digits@2`."""
    name = f"{PACKAGE}.{UNFIT.sub('_', stem)}"
    return name if turn == 1 else f"{name}@{turn}"


def handler_files(folders: Iterable[Path]) -> list[HandlerFile]:
    """Find every handler of `folders`, by folder, then name, then version. A folder may be a service itself."""
    return with_own_modules(file for folder in folders for entry in entries(folder) for file in in_entry(entry))


def with_own_modules(files: Iterable[HandlerFile]) -> list[HandlerFile]:
    """Make the module names unique: the second one is `oriel_services.<name>@2`."""
    turns: dict[str, int] = {}
    unique = []
    for file in files:
        turn = turns[file.module] = turns.get(file.module, 0) + 1
        unique.append(file if turn == 1 else replace(file, module=f"{file.module}@{turn}"))
    return unique


def named_file(text: str) -> HandlerFile:
    """Parse `module:attribute`. Raises ValueError."""
    module, colon, attribute = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ValueError(f"{text!r} is not a service: name it as module:attribute")
    return HandlerFile(module=module, attribute=attribute)


def installed_files() -> list[HandlerFile]:
    """Return the services that installed distributions offer as entry points of the group `oriel.services`."""
    from importlib.metadata import entry_points  # slow to import, and no worker needs it

    found = sorted(entry_points(group=GROUP), key=lambda each: each.name)
    return [HandlerFile(module=each.module, attribute=each.attr, name=each.name) for each in found if each.attr]


def entries(place: Path) -> list[Path]:
    """List what may hold services at `place`: a services folder, or one service alone, its file or its own folder.

    Raises OSError if it cannot be read.
    """
    if place.is_file() or os.path.lexists(place / HANDLER) or (place.suffix in SUFFIXES and os.path.lexists(place)):
        return [place]
    return sorted(each for each in visible(place) if not NO_HANDLER.match(each.name))


def in_entry(entry: Path) -> Iterator[HandlerFile]:
    """Yield the handlers of one entry of a folder. A handler that is not a regular file is yielded too, as broken: it
    must not look as if it had been removed.

    Raises OSError.
    """
    if entry.suffix in SUFFIXES:
        if os.path.lexists(entry):
            name = sayable(entry.stem)
            yield HandlerFile(module=module_name(entry.stem), path=entry, folder=entry.parent, name=name)
    elif entry.is_dir():
        yield from of_service(entry)


def of_service(folder: Path) -> Iterator[HandlerFile]:
    """Yield the handlers of one service's own folder: `handler.py` in it, or in the folders of its versions."""
    name = sayable(folder.name)
    if os.path.lexists(folder / HANDLER):
        yield HandlerFile(module=module_name(name), path=folder / HANDLER, folder=folder, name=name)
        return
    for version in sorted(visible(folder), key=lambda each: natural(each.name)):
        handler = version / HANDLER
        if VERSION.match(version.name) and os.path.lexists(handler):
            module = module_name(f"{name}-v{version.name}")
            yield HandlerFile(module=module, path=handler, folder=version, version=version.name, name=name)


def sayable(name: str) -> str:
    """Return a file's name as valid UTF-8, which file systems do not guarantee; invalid parts become U+FFFD."""
    return os.fsencode(name).decode(errors="replace")


def unfitness(path: Path) -> str:
    """Return why this file cannot be a handler; "" if it can."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return "its path is not UTF-8: rename it"
    if path.is_file():
        return TOML if path.suffix == ".toml" else ""
    kind = "link that leads to no file" if path.is_symlink() else "folder" if path.is_dir() else "special file"
    return f"{path.name} is a {kind}: a handler has to be a regular file"


def visible(folder: Path) -> Iterator[Path]:
    return (entry for entry in folder.iterdir() if not entry.name.startswith((".", "_")))


def natural(version: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key that puts "2" before "10", and "1.9" before "1.10"."""
    parts = re.split(r"(\d+)", version)
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts if part)
