"""Makes the environment of a model's process from the variables that users' code may see."""

from collections.abc import Mapping, Sequence

from oriel_wire.process.environment import selected
from oriel_wire.process.start import THREADS


def model_environment(server: Mapping[str, str], also: Sequence[str], *, threads: int, path: str) -> dict[str, str]:
    """Return the variables of a model's process.

    server: the server's own variables.
    also: names that the operator adds; see `selected`.
    path: the folders in which the child finds this package.
    threads: threads of the numeric libraries, unless the server's environment sets them.
    """
    found = selected(server, also)
    # The processes that the model starts get the variable as it was.
    found["ORIEL_PYTHONPATH"] = found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = path
    found["PYTHONUNBUFFERED"] = "1"
    for name in THREADS:
        found.setdefault(name, str(threads))
    return found
