"""How a job names the code it runs, on both sides of the fork server.

`service:<name>:` is a function service as a whole, `service:<name>:<stage>` a method of a chain, and
`function:<module>:<qualified name>` any function that a fresh import finds.
"""

import importlib
from collections.abc import Callable
from typing import Any

from oriel_logic.definition import Definition
from oriel_logic.errors import HandlerFailed

__all__ = ["Services", "for_function", "for_stage"]


def for_stage(service: str, stage: str) -> str:
    return f"service:{service}:{stage}"


def for_function(function: Callable[..., Any]) -> str:
    """Raises HandlerFailed for a function that another process cannot find by name."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not name or not module or "<" in name or not callable(function):
        raise HandlerFailed("only functions defined at the top of a file can run in a worker process")
    return f"function:{module}:{name}"


class Services:
    """The services of one process: definitions, and one instance per class, made on `set_up`.

    Single writer: whoever sets the process up.
    """

    def __init__(self) -> None:
        self._definitions: dict[str, Definition] = {}
        self._instances: dict[str, Any] = {}

    def set_up(self, definition: Definition) -> None:
        """Make a class's instance and run its `setup`. Raises whatever the service's code raises."""
        self._instances[definition.name] = definition.make()
        self._definitions[definition.name] = definition

    def stage(self, service: str, stage: str) -> Callable[..., Any]:
        """The bound method of a class, or the function itself for stage "". Raises KeyError if not set up."""
        return self._definitions[service].function(self._instances[service], stage)

    def resolve(self, reference: str) -> Callable[..., Any]:
        """Raises LookupError, ImportError or AttributeError for what is not there."""
        kind, first, second = reference.split(":", 2)
        if kind == "service":
            return self.stage(first, second)
        found: Any = importlib.import_module(first)
        for part in second.split("."):
            found = getattr(found, part)
        resolved: Callable[..., Any] = found
        return resolved
