"""Recognises heads that differ from an earlier one of their connection only in per-request fields.

A client's heads are the same line by line but for its request id, its trace context and the length of the body.
Where the other lines equal those of the previous head, only the differing ones are parsed. Lines are compared by
64-bit hashes keyed by this process's secret, as whole heads are: credentials are not kept, and a collision would
only confuse two lines of the same client.
"""

import re

from oriel_wire.h1 import Field, Kind, RequestHead

__all__ = ["HeadPattern"]

_VALUE = re.compile(rb"[\x20-\x7e\x80-\xff\t]*\Z")
_REQUEST_ID, _TRACEPARENT, _CONTENT_LENGTH = int(Kind.REQUEST_ID), int(Kind.TRACEPARENT), int(Kind.CONTENT_LENGTH)
_VARIES = (_REQUEST_ID, _TRACEPARENT, _CONTENT_LENGTH)


class HeadPattern:
    """The common part of one client's heads. head: parsed from the bytes `block`.

    Only for heads whose credentials were recognised, because the fields of others contain them.
    """

    __slots__ = ("_hashes", "_head", "_varies")

    def __init__(self, head: RequestHead, hashes: list[int]) -> None:
        self._head = head
        self._hashes = hashes
        self._varies = {
            number: (field, field.line[: len(field.name) + 1])
            for number, field in enumerate(head.fields, 1)
            if field.kind in _VARIES
        }

    @classmethod
    def of(cls, head: RequestHead, block: bytes) -> "HeadPattern | None":
        """The pattern of a head; None if such heads have to be parsed every time, or if the bytes are not known."""
        if (
            not block
            or any(field.owner is None for field in head.credentials or ())
            or head.chunked
            or head.expect_continue
        ):
            return None
        kinds = [field.kind for field in head.fields if field.kind in _VARIES]
        return cls(head, list(map(hash, block.split(b"\r\n")))) if len(kinds) == len(set(kinds)) else None

    def read(self, block: bytes) -> RequestHead | None:
        """The head in `block`; None if it does not match the pattern or is not valid."""
        lines, hashes = block.split(b"\r\n"), self._hashes
        if len(lines) != len(hashes):
            return None
        known = self._head
        head = RequestHead.__new__(RequestHead)
        values = head.__dict__
        values.update(known.__dict__)
        fields = [*known.fields]
        for number, (line, before) in enumerate(zip(lines, hashes, strict=True)):
            if hash(line) == before:
                continue
            if number not in self._varies:
                return None
            field, prefix = self._varies[number]
            if not line.startswith(prefix) or _VALUE.match(line, len(prefix)) is None:
                return None
            raw, kind, length = line[len(prefix) :].strip(b" \t"), field.kind, -1
            value = raw.decode("latin-1")
            if kind == _REQUEST_ID:
                values["request_id"] = value
            elif kind == _TRACEPARENT:
                values["traceparent"] = value
            else:
                if not raw.isdigit() or len(raw) > 15:
                    return None
                values["content_length"] = length = int(raw)
                values["forward"] = [line if each == field.line else each for each in known.forward]
            fields[number - 1] = Field(line, field.name, value, kind, length)
        values["fields"] = fields
        values["plan"] = values["_by_name"] = None
        values["known"] = True
        return head
