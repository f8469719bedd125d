"""`Request` and `Answer`: what a handler receives, and what it may return where a plain value is not enough."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oriel_logic.errors import InputTooLarge, Refused
from oriel_wire.errors import json_fault

MAX_JSON_BYTES = 4 << 20
MAX_JSON_DEPTH = 64
TOO_DEEP = f"the JSON is nested more than {MAX_JSON_DEPTH} levels deep: flatten it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of a service. It is a plain value and can be sent to worker processes.

    body: the bytes as sent, at most the server's body limit.
    content_type: the media type in lower case without parameters, "" if none was sent.
    headers: lower-case names, without credentials, cookies and `x-oriel-*`.
    """

    body: bytes
    content_type: str = ""
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> Any:
        """Decode the body as JSON of at most 4 MiB and 64 levels. Raises Refused (422) or InputTooLarge.

        Decoding 1 MiB of numbers takes about 10 ms: for large bodies call it in a plain `def` stage, which does not
        hold the event loop.
        """
        if len(self.body) > MAX_JSON_BYTES:
            raise InputTooLarge(f"JSON bodies may have {MAX_JSON_BYTES} bytes, this one has {len(self.body)}")
        import msgspec  # not above: a worker in an environment of its own may be without it

        try:
            value = msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Refused(f"the body is not valid JSON: {json_fault(self.body, error)}") from error
        except RecursionError as error:
            raise Refused(TOO_DEEP) from error
        if self.body.count(b"[") + self.body.count(b"{") > MAX_JSON_DEPTH and depth(value) > MAX_JSON_DEPTH:
            raise Refused(TOO_DEEP)
        return value

    def text(self) -> str:
        """Decode the body as UTF-8 text. Raises Refused."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise Refused("the body is not UTF-8 text") from error


def depth(value: object) -> int:
    """Count the levels of lists and objects in a decoded JSON value; counting stops one past MAX_JSON_DEPTH."""
    levels = 0
    level: list[Any] = [value] if isinstance(value, list | dict) else []
    while level and levels <= MAX_JSON_DEPTH:
        levels += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, list | dict)
        ]
    return levels


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A body with its media type, for handlers that return something other than the default form of their value.

    headers: added to those that the server writes; a mapping, or pairs if a name comes more than once.
    """

    body: bytes
    content_type: str = "application/octet-stream"
    headers: Mapping[str, str] | Iterable[tuple[str, str]] = ()

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        given = self.headers
        if type(given) is tuple:
            return given
        return tuple(given.items() if isinstance(given, Mapping) else given)
