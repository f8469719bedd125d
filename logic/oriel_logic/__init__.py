"""Oriel's logic server: user code around models.

    from oriel_logic import service

    @service
    class Digits:
        model = "digits"
        def pre(self, request): ...
        async def post(self, outputs): ...

`oriel_logic.images` reads pictures safely. The names of this package are loaded when they are first used: a worker
process in an environment of its own has only the packages that its handlers brought.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oriel_logic.bodies.audio import Audio
    from oriel_logic.bodies.messages import Answer, Request
    from oriel_logic.bodies.tensors import Tensors
    from oriel_logic.bodies.upload import Upload
    from oriel_logic.client.models import Models, ModelSpec, Outputs, TensorSpec
    from oriel_logic.errors import InputTooLarge, MediaUnsupported, ModelBusy, ModelError, Refused
    from oriel_logic.services.batching import batched
    from oriel_logic.services.context import Context
    from oriel_logic.services.definition import service

__all__ = [
    "Answer",
    "Audio",
    "Context",
    "InputTooLarge",
    "MediaUnsupported",
    "ModelBusy",
    "ModelError",
    "ModelSpec",
    "Models",
    "Outputs",
    "Refused",
    "Request",
    "TensorSpec",
    "Tensors",
    "Upload",
    "batched",
    "service",
]

HOMES = {
    "services.batching": ("batched",),
    "services.definition": ("service",),
    "errors": ("InputTooLarge", "MediaUnsupported", "ModelBusy", "ModelError", "Refused"),
    "bodies.messages": ("Answer", "Request"),
    "client.models": ("ModelSpec", "Models", "Outputs", "TensorSpec"),
    "services.context": ("Context",),
    "bodies.audio": ("Audio",),
    "bodies.tensors": ("Tensors",),
    "bodies.upload": ("Upload",),
}
HOME_OF = {name: home for home, names in HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    home = HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'oriel_logic' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"oriel_logic.{home}"), name)
    return value
