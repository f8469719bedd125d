"""The target of `oriel logic dev`: its services and their fakes."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oriel_logic.loading.sources import HANDLER, HandlerFile, handler_files
from oriel_logic.testing.models import FAKES
from oriel_wire.errors import StartFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """root: the file or folder, absolute. files: its handlers. fakes: the files with fake models."""

    root: Path
    files: tuple[HandlerFile, ...]
    fakes: tuple[Path, ...]


def find(path: Path) -> Target:
    """Find the services at `path`. Raises StartFailed, which says what to do instead."""
    root = path.resolve()
    if root.name == HANDLER:  # a file of a service's own folder, whose name is the service's
        root = root.parent
    if not root.exists():
        remedy = f"make one with 'oriel logic new {path.stem}'" if path.suffix != ".py" else "check the name"
        raise StartFailed(f"there is no {path}: {remedy}")
    if root.is_file() and root.suffix != ".py":
        raise StartFailed(f"{path} is not a service: give a .py file or a folder")
    files = tuple(handler_files([root]))
    if not files:
        raise StartFailed(f"there is no service in {path}: it needs a handler.py, or .py files with @service")
    return Target(root=root, files=files, fakes=fakes_of(root, files))


def fakes_of(root: Path, files: Iterable[HandlerFile]) -> tuple[Path, ...]:
    """Return every `fakes.py` beside a handler, and first the one in the given folder."""
    folders = [root if root.is_dir() else root.parent, *(each.folder for each in files if each.folder is not None)]
    return tuple(dict.fromkeys(folder / FAKES for folder in folders if (folder / FAKES).is_file()))
