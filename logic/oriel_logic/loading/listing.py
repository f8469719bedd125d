"""Lists the handlers in the services folders, with a stamp for each that changes when the handler does.

A stamp is made of modification time, size and inode of the files of a handler: all files in a service's own folder
except hidden ones and environments, and the names of what is installed in its own environment; for a file directly in
the services folder, the neighbours it imports. Listing an unchanged folder costs a `stat` per file.
"""

import errno
import os
import re
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from oriel_logic.loading.folder_config import BadConfig, FolderConfig, interpreter, read_config
from oriel_logic.loading.sources import HandlerFile, entries, in_entry, unfitness, with_own_modules

MAX_FILES = 2000
MAX_SOURCE_BYTES = 1 << 20
IMPORT = re.compile(rb"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)
SKIPPED = frozenset({"__pycache__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One handler on the disk.

    python: its own interpreter.
    problem: an error in its settings.
    homes: the folders that names in its settings are relative to, the nearest first.
    """

    file: HandlerFile
    config: FolderConfig = FolderConfig()
    python: Path | None = None
    homes: tuple[Path, ...] = ()
    problem: str = ""
    stamp: Hashable = None

    @property
    def stands_alone(self) -> bool:
        """Return whether the handler needs worker processes that no other handler shares."""
        return self.config.stands_alone or bool(self.problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All handlers that were found.

    sources: the sources by origin.
    weights: the weights of versions by service, for services that set some.
    unread: entries of the folders that could not be read; what lies there must not count as removed.
    """

    sources: Mapping[str, Source] = field(default_factory=dict)
    weights: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    unread: Mapping[str, str] = field(default_factory=dict)

    def stamps(self) -> dict[str, Hashable]:
        """Return the stamps of the sources."""
        return {origin: source.stamp for origin, source in self.sources.items()}


def read_listing(folders: Iterable[Path]) -> Listing:
    """List the folders. Raises OSError if one of them cannot be read: nothing is known then of any."""
    sources: dict[str, Source] = {}
    weights: dict[str, Mapping[str, int]] = {}
    unread: dict[str, str] = {}
    for folder in folders:
        for entry in entries(folder):
            try:
                found = [source_of(file) for file in in_entry(entry)]
            except OSError as error:
                unread[str(entry)] = str(error.strerror)
                continue
            for source in found:
                sources[source.file.origin] = source
                if source.config.weights:
                    weights.setdefault(source.file.name, source.config.weights)
    return Listing(sources=sources, weights=weights, unread=unread)


def together(listing: Listing) -> list[HandlerFile]:
    """Return the handlers that may share processes at start: those that need none of their own and have one version.

    Module names are unique: of two files with one name the second is `oriel_services.<name>@2`.
    """
    names = Counter(source.file.name for source in listing.sources.values())
    shared = [each for each in listing.sources.values() if not each.stands_alone]
    return with_own_modules(each.file for each in shared if names[each.file.name] == 1 or each.file.is_plain)


def source_of(file: HandlerFile) -> Source:
    assert file.path is not None and file.folder is not None
    unfit = unfitness(file.path)
    if unfit:
        return Source(file=file, homes=(file.folder,), problem=unfit, stamp=(unfit, *stats([file.path])))
    if file.is_plain:
        return Source(file=file, homes=(file.folder,), stamp=tuple(stats([file.path, *neighbours(file.path)])))
    homes = (file.folder,) if file.folder.name == file.name else (file.folder, file.folder.parent)
    source = Source(file=file, homes=homes)
    try:
        home = next((each for each in homes if (each / "pyproject.toml").is_file()), homes[-1])
        config = read_config(home)
        if home != homes[-1]:  # the weights of all versions are in one place
            config = msgspec.structs.replace(config, weights=read_config(homes[-1]).weights)
        python = interpreter(home, config.python) if config.python else None
        source = replace(source, config=config, python=python)
    except BadConfig as error:
        source = replace(source, problem=str(error))
    encoded = msgspec.json.encode(msgspec.structs.replace(source.config, weights={}))
    files = list(files_in(file.folder))
    packages = list(source.python.parent.parent.glob("lib/python*/site-packages")) if source.python else []
    stamp = (encoded, source.problem, *stats(files), *(entry for each in packages for entry in installed(each)))
    return replace(source, stamp=stamp)


def stats(paths: Iterable[Path]) -> Iterator[tuple[str, int, int, int]]:
    for path in paths:
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            found = path.lstat()
        yield str(path), found.st_mtime_ns, found.st_size, found.st_ino


def installed(packages: Path) -> list[tuple[str, int]]:
    """Return name and inode of a site-packages and of everything in it, but for what importing it leaves there.

    The folder's own modification time changes with the first `__pycache__`, so a set-up would seem out of date at once.
    """
    with suppress(FileNotFoundError), os.scandir(packages) as found:
        inside = sorted((each.name, each.inode()) for each in found if each.name != "__pycache__")
        return [(str(packages), packages.stat().st_ino), *inside]
    return []


def files_in(folder: Path, most: int = MAX_FILES) -> Iterator[Path]:
    """Yield at most `most` of the files that may belong to a handler, in a stable order."""
    count = 0
    for where, folders, files in os.walk(folder):
        here = Path(where)
        folders[:] = sorted(
            each
            for each in folders
            if not each.startswith(".") and each not in SKIPPED and not (here / each / "pyvenv.cfg").is_file()
        )
        for name in sorted(files):
            if not name.startswith("."):
                yield here / name
                count += 1
                if count == most:
                    return


def neighbours(path: Path) -> list[Path]:
    """Return the files that a file of a services folder imports from beside it, and those that they import."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting and len(found) < MAX_FILES:
        for name in imported(waiting.pop()):
            beside = path.parent / f"{name}.py"
            package = path.parent / name
            files = [beside] if beside.is_file() else files_in(package) if (package / "__init__.py").is_file() else []
            for each in files:
                if each != path and each not in found:
                    found[each] = None
                    waiting.append(each)
    return sorted(found)


def imported(path: Path) -> list[str]:
    """Return the first parts of the names that this file imports. Names that are not neighbours do no harm."""
    if path.suffix != ".py":
        return []
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SOURCE_BYTES)
    except FileNotFoundError:
        return []
    return [name.decode() for name in dict.fromkeys(IMPORT.findall(text))]
