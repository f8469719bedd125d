"""What is tuned, for what, and with which means."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oriel_tools.tune.trial import Load

Say = Callable[[str], None]  # prints a line of progress
Clock = Callable[[], float]  # monotonic, in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is tuned, for what, and with which means.

    replicas: of the pool at present. providers, compilers: what the installation has beside ONNX Runtime's own
    provider, as configurations name it.
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
