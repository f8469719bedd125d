"""`Request` and `Answer`: what a handler receives, and what it may return where a plain value is not enough."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from oriel_logic.bodies.json import decode
from oriel_logic.errors import Refused

ANYTHING = msgspec.json.Decoder()


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
        """Decode the body as JSON of at most 4 MiB and 100 levels. Raises Refused (422) or InputTooLarge.

        Decoding 1 MiB of numbers takes about 10 ms: for large bodies call it in a plain `def` stage, which does not
        hold the event loop.
        """
        return decode(self.body, ANYTHING)

    def text(self) -> str:
        """Decode the body as UTF-8 text. Raises Refused."""
        try:
            return self.body.decode()
        except UnicodeDecodeError as error:
            raise Refused("the body is not UTF-8 text") from error


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
