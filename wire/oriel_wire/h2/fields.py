"""The rules of whole header lists in HTTP/2 (RFC 9113 section 8), and stricter where leniency allows smuggling.

`known_fields.malformed` judges each field for itself; the decoder applies it.

* Pseudo-header fields come first, none twice, none that is not defined.
* A request has :method, :scheme (http or https), :path (a path, or `*` for OPTIONS), and a host in :authority or
  `host`, which agree; no CONNECT. An answer has :status and no 101. Trailers have no pseudo-header fields.
* `content-length` at most once, digits only, and not in trailers.

Each check raises BadMessage; the stream then ends with PROTOCOL_ERROR.
"""

import re
from typing import Final

from oriel_wire.errors import BadMessage
from oriel_wire.h2.known_fields import Field

_METHOD: Final = 1
_SCHEME: Final = 2
_PATH: Final = 3
_AUTHORITY: Final = 4
_STATUS: Final = 5
_LENGTH: Final = 6
_HOST: Final = 7
_REQUIRED: Final = 1 << _METHOD | 1 << _SCHEME | 1 << _PATH
_KINDS: Final[dict[bytes, int]] = {
    b":method": _METHOD,
    b":scheme": _SCHEME,
    b":path": _PATH,
    b":authority": _AUTHORITY,
    b":status": _STATUS,
    b"content-length": _LENGTH,
    b"host": _HOST,
}
_METHODS: Final = frozenset({b"POST", b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"PATCH"})
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,24}\Z")
_HOST_VALUE: Final = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?\Z")
_IN_PATH: Final = bytes([*range(0x21, 0x23), *range(0x24, 0x7F)])


def _length(value: bytes, seen: int) -> int:
    if seen >= 0:
        raise BadMessage("content-length is given twice")
    if not value.isdigit() or len(value) > 15:
        raise BadMessage("content-length is not a plain number")
    return int(value)


def check_request(fields: list[Field]) -> int:
    """The content-length of a valid request, -1 if it has none. Raises BadMessage."""
    method = scheme = path = authority = host = b""
    length = -1
    seen = 0  # one bit for each pseudo-header field
    regular = False
    kind_of = _KINDS.get
    for name, value in fields:
        kind = kind_of(name, 0)
        if kind == 0:
            regular = True
        elif kind < _STATUS:
            if regular or seen & (1 << kind):
                raise BadMessage("a pseudo-header field is misplaced or given twice")
            seen |= 1 << kind
            if kind == _METHOD:
                method = value
            elif kind == _PATH:
                path = value
            elif kind == _SCHEME:
                scheme = value
            else:
                authority = value
        elif kind == _STATUS:
            raise BadMessage("a request has no :status")
        else:
            regular = True
            if kind == _LENGTH:
                length = _length(value, length)
            elif host:
                raise BadMessage("host is given twice")
            else:
                host = value
    if seen & _REQUIRED != _REQUIRED:
        raise BadMessage("a request must have :method, :scheme and :path")
    if method not in _METHODS and (method == b"CONNECT" or _TOKEN.match(method) is None):
        raise BadMessage("the method is CONNECT or no token")
    if scheme != b"http" and scheme != b"https":
        raise BadMessage(":scheme is not http or https")
    if path.translate(None, _IN_PATH) or (path[:1] != b"/" and (path != b"*" or method != b"OPTIONS")):
        raise BadMessage(":path has to begin with / and has characters of a path only")
    if authority and host and authority.lower() != host.lower():
        raise BadMessage(":authority and host differ")
    if _HOST_VALUE.match(authority or host) is None:
        raise BadMessage(":authority is not a name or an address")
    return length


def check_response(fields: list[Field]) -> int:
    """The content-length of valid answer fields, -1 if they have none. :status is `fields[0]`. Raises BadMessage."""
    if not fields or fields[0][0] != b":status":
        raise BadMessage("an answer must begin with :status")
    status = fields[0][1]
    if len(status) != 3 or not status.isdigit() or status[:1] == b"0" or status == b"101":
        raise BadMessage(":status is not a three-digit status that HTTP/2 allows")
    return _check_rest(fields, 1)


def check_trailers(fields: list[Field]) -> None:
    """Check a trailer section. Raises BadMessage."""
    if _check_rest(fields, 0) >= 0:
        raise BadMessage("content-length is in the trailers")


def _check_rest(fields: list[Field], pseudo: int) -> int:
    """Check fields of which the first `pseudo` ones are pseudo-header fields; the content-length, or -1."""
    length = -1
    kind_of = _KINDS.get
    for name, value in fields:
        kind = kind_of(name, 0)
        if kind == 0:
            continue
        if kind <= _STATUS:
            pseudo -= 1
            if pseudo < 0:
                raise BadMessage("a pseudo-header field is misplaced or given twice")
        elif kind == _LENGTH:
            length = _length(value, length)
    return length
