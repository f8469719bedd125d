"""Oriel's logic server: user code around models.

    from oriel_logic import service

    @service
    class Digits:
        model = "digits"
        def pre(self, request): ...
        async def post(self, outputs): ...

`oriel_logic.images` reads pictures safely.
"""

from oriel_logic.context import Context
from oriel_logic.definition import service
from oriel_logic.errors import InputTooLarge, MediaUnsupported, ModelBusy, ModelError, Refused
from oriel_logic.messages import Answer, Request
from oriel_logic.models import Models, ModelSpec, Outputs, TensorSpec

__all__ = [
    "Answer",
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
    "service",
]
