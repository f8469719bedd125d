"""What a worker does for stages that run on the loop: reading large bodies and pictures, encoding large answers."""

from typing import Any

from oriel_logic.decoding import Reader
from oriel_logic.definition import definition_of
from oriel_logic.encoding import encode
from oriel_logic.messages import Answer, Request
from oriel_logic.workers.references import found_by

__all__ = ["encode_there", "read_there"]

READERS: dict[str, Reader] = {}


def encode_there(value: Any, media: str, service: str) -> Answer:
    """Raises HandlerFailed."""
    return encode(value, media, service=service)


def read_there(reference: str, request: Request) -> tuple[Any, ...]:
    """The inputs of the service whose function or class `reference` names. Raises what `Reader.inputs` raises."""
    reader = READERS.get(reference)
    if reader is None:
        definition = definition_of(found_by(reference))
        assert definition is not None
        reader = READERS[reference] = Reader(definition.signature)
    return reader.inputs(request)
