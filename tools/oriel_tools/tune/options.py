"""The inputs of one tuning run: model, objectives, limits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oriel_tools.tune.trial import Load

Say = Callable[[str], None]  # prints a line of progress
Clock = Callable[[], float]  # monotonic, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The inputs of one tuning run.

    budget_s: seconds for all of it. replicas: present number of servers. providers, compilers: names of those that are
    installed beside ONNX Runtime's own provider, as configurations have them.
    """

    repository: Path
    model: str
    load: Load
    budget_s: float
    cores: int
    replicas: int = 1
    most_replicas: int = 8
    providers: Sequence[str] = ()
    compilers: Sequence[str] = ()
