"""`[tool.oriel]` in the `pyproject.toml` of a service's folder.

    [tool.oriel]
    python = ".venv"                  # an environment or an interpreter of its own, relative to the folder
    workers = 4                       # worker processes of its own
    weights = { "1" = 90, "2" = 10 }  # the share of each version in requests that name no version
    sample = "sample.json"            # a request that a new version has to answer before it takes requests
    setup_timeout_s = 120             # limit for import and setup together
    timeout_s = 10                    # as in @service, which it overrides: limit of a request,
    memory_mb = 2000                  # of a worker that runs it,
    max_body_bytes = 1000000          # of a request's body

All are optional. A folder without the file, or a file without the table, means all defaults.
"""

import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from oriel_logic.services.definition import Definition

SETUP_TIMEOUT_S = 60.0

MAX_BYTES = 64 * 1024
MAX_WEIGHT = 1_000_000
FILE = "pyproject.toml"
Weight = Annotated[int, msgspec.Meta(ge=0, le=MAX_WEIGHT)]
Version = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class BadConfig(ValueError):
    """The file contains an invalid setting; the text names it."""


class FolderConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one folder. python: "" for the server's interpreter; workers: 0 for the server's number."""

    python: str = ""
    workers: Annotated[int, msgspec.Meta(ge=0, le=256)] = 0
    weights: dict[Version, Weight] = {}
    sample: str = ""
    setup_timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = SETUP_TIMEOUT_S
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    memory_mb: Annotated[int, msgspec.Meta(gt=0)] | None = None
    max_body_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None

    @property
    def stands_alone(self) -> bool:
        """Return whether the service needs processes that no other service shares."""
        return bool(self.python or self.workers)

    def applied(self, definition: Definition) -> Definition:
        """Return the definition with these limits applied."""
        settings = {name: getattr(self, name) for name in ("timeout_s", "memory_mb", "max_body_bytes")}
        limits = {name: value for name, value in settings.items() if value is not None}
        return replace(definition, options=replace(definition.options, **limits)) if limits else definition


def read_config(folder: Path) -> FolderConfig:
    """Read the settings. Raises BadConfig with a text for the file's author."""
    if os.path.lexists(folder / FILE) and not (folder / FILE).is_file():  # opening a pipe would wait for its writer
        raise BadConfig(f"{FILE} is not a regular file")
    try:
        with (folder / FILE).open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return FolderConfig()
    except OSError as error:
        raise BadConfig(f"{FILE} cannot be read: {error.strerror}") from error
    if len(text) > MAX_BYTES:
        raise BadConfig(f"{FILE} is larger than {MAX_BYTES} bytes")
    try:
        document: dict[str, Any] = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadConfig(f"{FILE} is no TOML: {str(error)[:300]}") from error
    tool = document.get("tool", {})
    table = tool.get("oriel", {}) if isinstance(tool, dict) else {}
    try:
        config = msgspec.convert(table, FolderConfig)
    except msgspec.ValidationError as error:
        raise BadConfig(f"{FILE}, [tool.oriel]: {str(error)[:300]}") from error
    if config.weights and not any(config.weights.values()):
        raise BadConfig(f"{FILE}, [tool.oriel]: one of the weights must be more than 0")
    return config


def interpreter(folder: Path, python: str) -> Path:
    """Find the executable that `python` names. Raises BadConfig with the command that makes it.

    A folder stands for its `bin/python`. Links are not resolved: an environment is known by the path it is called by.
    """
    named = folder / python
    path = named / "bin" / "python" if named.is_dir() else named
    if not path.is_file():
        raise BadConfig(
            f"python = {python!r} is not an environment: make it with `python -m venv {python}` in its folder"
        )
    if not os.access(path, os.X_OK):
        raise BadConfig(f"python = {python!r} cannot be executed")
    return path
