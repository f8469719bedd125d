"""Names the code that a job runs, on both sides of the fork server.

`service:<name>:` is a function service as a whole, `service:<name>:<stage>` a method of a class, and
`function:<module>:<qualified name>` any function that a fresh import finds.
"""

import importlib
from collections.abc import Callable
from typing import Any

from oriel_logic.errors import HandlerFailed


def for_stage(service: str, stage: str) -> str:
    return f"service:{service}:{stage}"


def for_function(function: Callable[..., Any]) -> str:
    """Return the reference of a function. Raises HandlerFailed if another process cannot find it by name."""
    name = getattr(function, "__qualname__", "")
    module = getattr(function, "__module__", None)
    if not name or not module or "<" in name or not callable(function):
        raise HandlerFailed("only functions defined at the top of a file can run in a worker process")
    return f"function:{module}:{name}"


def found_by(reference: str) -> Callable[..., Any]:
    """Return the function that a `function:` reference names. Raises ImportError or AttributeError."""
    _, module, name = reference.split(":", 2)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    named: Callable[..., Any] = found
    return named
