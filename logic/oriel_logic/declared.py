"""Whether an answer is what the handler says it gives: asked by tests and self-tests, not for every request. Pure."""

from typing import Any

import msgspec

from oriel_logic.definition import Definition
from oriel_logic.signature import Form

__all__ = ["breach"]

JSON = "application/json"


class Unreadable(Exception):
    """A type that only its own library reads."""


def breach(definition: Definition, content_type: str, body: bytes) -> str:
    """What of a JSON answer is not as declared, for the handler's author; "" if all of it is, or nobody can tell."""
    output = definition.signature.output
    if not output.declared or output.form is not Form.JSON or content_type.partition(";")[0].strip() != JSON:
        return ""
    try:
        msgspec.json.decode(body, type=output.type, dec_hook=unreadable)
    except (Unreadable, TypeError):
        return ""
    except msgspec.MsgspecError as error:
        name = getattr(output.type, "__name__", str(output.type))
        return f"it says it gives {name}, and gave something else: {error}"
    return ""


def unreadable(kind: type, value: Any) -> Any:
    raise Unreadable
