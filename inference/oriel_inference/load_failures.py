"""How often loads were refused, by model and by kind of reason. Single writer: the loop."""

from collections import Counter

from oriel_inference.errors import ConfigInvalid, LoadFailed

__all__ = ["LoadFailures"]

MAX_NAMES = 4096


class LoadFailures:
    """counts: (model, kind) -> times; beyond MAX_NAMES of them the model's name is left out."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()

    def add(self, model: str, failure: LoadFailed | None = None, *, kind: str = "") -> None:
        """A load was refused. kind: "repository" or "internal"; follows from `failure` if that is given."""
        if failure is not None:
            kind = "config" if isinstance(failure, ConfigInvalid) else "model"
        key = (model, kind)
        if key not in self.counts and len(self.counts) >= MAX_NAMES:
            key = ("", kind)
        self.counts[key] += 1
