"""`fakes.py` beside a handler: what stands in for its models, in tests and in `oriel logic dev`."""

from pathlib import Path
from types import ModuleType
from typing import Any

from oriel_logic.testing.models import FakeModels

__all__ = ["FAKES", "fakes_beside", "load_fakes"]

FAKES = "fakes.py"
ATTRIBUTE = "models"


def load_fakes(path: Path) -> FakeModels:
    """`models` of the file. Raises what its code raises, and TypeError with what it lacks.

    It is no import: files of this name of several services do not meet.
    """
    module = ModuleType("oriel_fakes")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    found: Any = getattr(module, ATTRIBUTE, None)
    if not isinstance(found, FakeModels):
        raise TypeError('there is no `models` in it: write `models = FakeModels({"name": function})`')
    return found


def fakes_beside(served: object) -> FakeModels | None:
    """Those in the folder of a handler's path, or in the folder itself; None if there are none."""
    if not isinstance(served, str | Path):
        return None
    path = Path(served).resolve()
    fakes = (path if path.is_dir() else path.parent) / FAKES
    return load_fakes(fakes) if fakes.is_file() else None
