"""A model in an object store."""

from .control_server import times


def model(factor: float) -> bytes:
    found: bytes = times(factor).SerializeToString()
    return found
