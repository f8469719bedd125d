"""Reads JSON bodies: bounded in size and depth, decoded into the service's own types, refused with the field's path.

Paths are written as in JSONPath: `$.items[2].price`. msgspec appends them to its error text; pydantic gives tuples.
"""

import re
from typing import Any

import msgspec

from oriel_logic.errors import InputTooLarge, Refused
from oriel_wire.errors import BadMessage, json_fault
from oriel_wire.process.allowed import split_path, with_values
from oriel_wire.v2.depth import MAX_DEPTH, check_depth

ONE_FIELD = re.compile(r"Object (?:missing required|contains unknown) field `(?P<name>[^`]+)`\Z")
MAX_PATH = 200
MAX_JSON_BYTES = 4 << 20


def decode(body: bytes, decoder: "msgspec.json.Decoder[Any]") -> Any:
    """Decode a JSON body. Raises InputTooLarge, or Refused with `field` set if one field is at fault."""
    if len(body) > MAX_JSON_BYTES:
        raise InputTooLarge(f"JSON bodies may have at most {MAX_JSON_BYTES} bytes, this one has {len(body)}")
    try:
        check_depth(body)
        return decoder.decode(body)
    except (BadMessage, RecursionError) as error:
        raise Refused(f"the JSON is nested more than {MAX_DEPTH} levels deep: flatten it") from error
    except msgspec.ValidationError as error:
        raise invalid(error, decoder.type) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"the body is not valid JSON: {json_fault(body, error)}") from error


def invalid(error: msgspec.ValidationError, wanted: Any) -> Refused:
    """Convert a decoding error to a Refused that says what is wrong and where, of the class that the value's reader
    raised.

    wanted: the type that was expected.
    """
    (text, path), field = split_path(with_values(error, wanted)), ""
    missing = ONE_FIELD.match(text)
    if missing is not None:
        field = f"{path}.{missing['name']}"
    cause = error.__cause__
    problems = getattr(cause, "errors", None)
    if callable(problems):  # pydantic reports several errors: use the first
        first = problems()[0]
        text, path = str(first["msg"]), path + steps(first["loc"])
    kind: type[Refused] = Refused
    if cause is not None and isinstance(cause.__cause__, Refused):
        kind = type(cause.__cause__)
    path = path[:MAX_PATH]
    return kind(f"{text[:1].upper()}{text[1:]} at {path}", field=field[:MAX_PATH] or path)


def steps(location: tuple[str | int, ...]) -> str:
    """Write a location as a path: ("items", 2, "price") becomes ".items[2].price"."""
    return "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in location)
