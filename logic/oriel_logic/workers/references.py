"""How a job names the code it runs, on both sides of the fork server.

`service:<name>:` is a function service as a whole, `service:<name>:<stage>` a method of a class, and
`function:<module>:<qualified name>` any function that a fresh import finds.
"""

import importlib
from collections.abc import Callable
from typing import Any

from oriel_logic.definition import Definition
from oriel_logic.errors import HandlerFailed
from oriel_logic.serving import Serving

__all__ = ["Services", "for_function", "for_stage", "found_by"]


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
    """The services of one process, each with one instance of its class, made on `set_up`.

    Single writer: whoever sets the process up.
    """

    def __init__(self) -> None:
        self._servings: dict[str, Serving] = {}

    def set_up(self, definition: Definition) -> None:
        """Make a class's instance and run its `setup`. Raises whatever the service's code raises."""
        self._servings[definition.name] = Serving(definition, definition.make())

    def serving(self, service: str) -> Serving:
        """Raises KeyError if it is not set up here."""
        return self._servings[service]

    def resolve(self, reference: str) -> Callable[..., Any]:
        """Raises LookupError, ImportError or AttributeError for what is not there."""
        kind, first, second = reference.split(":", 2)
        return self._servings[first].job(second) if kind == "service" else found_by(reference)


def found_by(reference: str) -> Callable[..., Any]:
    """What a `function:` reference names. Raises ImportError or AttributeError."""
    _, module, name = reference.split(":", 2)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    named: Callable[..., Any] = found
    return named
