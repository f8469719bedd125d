"""The services of this server and why some cannot run."""

import logging
from collections.abc import Iterable

from oriel_logic.definition import Definition
from oriel_logic.errors import ServiceBroken, ServiceUnknown
from oriel_logic.loading import Loaded

__all__ = ["Registry"]

_log = logging.getLogger(__name__)


class Registry:
    """The services of this server and why some cannot run. Single writer: the loop."""

    def __init__(self, loaded: Iterable[Loaded]) -> None:
        everything = list(loaded)
        self._loaded: dict[str, Loaded] = {}
        for each in everything:
            if each.name not in self._loaded or self._loaded[each.name].definition is None:
                self._loaded[each.name] = each
        self._shadowed = [each for each in everything if self._loaded[each.name] is not each]
        self._problems = {each.name: each.problem for each in self._loaded.values() if each.problem}

    def find(self, name: str) -> Definition:
        """Raises ServiceUnknown or ServiceBroken."""
        found = self._loaded.get(name)
        if found is None:
            raise ServiceUnknown(f"there is no service {name[:128]!r}")
        if found.definition is None or name in self._problems:
            raise ServiceBroken(f"the service '{name}' cannot run: GET /v1/services says why")
        return found.definition

    def definitions(self) -> list[Definition]:
        """Every service that could be loaded, whether or not it can run."""
        return [each.definition for each in self._loaded.values() if each.definition is not None]

    def mark_broken(self, name: str, problem: str) -> None:
        """Take `name` out of service; logged the first time. Unknown names are ignored."""
        if name in self._loaded and name not in self._problems:
            self._problems[name] = problem
            _log.error("services: '%s' cannot run: %s", name, problem)

    def describe(self) -> list[dict[str, object]]:
        """For `GET /v1/services`: name, file, state, description, model or problem."""
        shadowed: list[dict[str, object]] = [
            {"name": each.name, "file": each.file.label, "state": "broken", "problem": each.problem}
            for each in self._shadowed
        ]
        return [self.describe_one(name) for name in sorted(self._loaded)] + shadowed

    def describe_one(self, name: str) -> dict[str, object]:
        """Raises ServiceUnknown."""
        found = self._loaded.get(name)
        if found is None:
            raise ServiceUnknown(f"there is no service {name[:128]!r}")
        problem = self._problems.get(name, "")
        facts: dict[str, object] = {"name": name, "file": found.file.label, "state": "broken" if problem else "ready"}
        if found.definition is not None:
            facts |= {"path": f"/v1/services/{name}", "description": found.definition.description}
            if found.definition.model:
                facts["model"] = found.definition.model
        if problem:
            facts["problem"] = problem
        return facts
