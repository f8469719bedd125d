"""Recognises header blocks that differ from earlier ones in a few values only: ids, trace contexts, credentials.

A client's blocks are the same byte by byte but for such values, and so are its upstream's. The *shape* of a block is
what stands before, between and behind the values that differ. A block of a known shape has passed the decoder and the
rules of whole header lists already: only the values are read and validated.

The rules that keep that true:

* A shape is made of literals and references to the static table only, and read only while no dynamic table is in use:
  then a block's bytes mean the same whatever was sent before.
* What is the same in all blocks of a shape is what the memo of fields has, so nothing of a sender that is not
  authenticated, and no credential.
* Only fields may differ that `PER_REQUEST` names, and a few others that no rule of this package looks at, and none
  that the block has twice.

Shapes belong to the memo, so that what one connection has taught holds for all; each connection tries those that its
own latest blocks had. `decision` is the engine's: what holds for all blocks of the shape.
"""

from typing import Any, Final

from oriel_wire.h2 import huffman
from oriel_wire.h2.known_fields import CONTROL, PER_REQUEST, STATIC, Field, FieldMemo

MAX_RECENT: Final = 4  # shapes that a connection tries
_MAX_BYTES: Final = 4096  # largest block that makes a shape
_MAX_UNKNOWN: Final = 4  # fields beside those of `PER_REQUEST` that may differ
# Fields that rules look at, or that say how the rest is read. The memo has no content-length, so a block with one has
# no shape.
_FIXED: Final = frozenset(
    {b"content-length", b"host", b"te", b"content-type", b"grpc-status", b"grpc-message", b"grpc-encoding"}
)


class BlockShape:
    """The common part of the blocks of one shape.

    names: the names of the values that differ. list_bytes: the size of the header list without these values. is_head:
    True for the head of an answer. decision: the engine's decision; None until there is one.
    """

    __slots__ = ("_ends", "_fields", "_last", "_starts", "decision", "is_head", "key", "list_bytes", "names")

    def __init__(self, starts: list[bytes], last: bytes, fields: list[Field], ends: list[int]) -> None:
        self.key = (*starts, last)
        self.is_head = bool(fields) and fields[0][0] == b":status"
        self.decision: Any = None
        self._starts = [(start, len(start)) for start in starts]  # bytes before each value
        self._last = last
        self._fields = fields
        self._ends = ends  # numbers of the fields whose values differ
        self.names = [fields[number][0] for number in ends]
        self.list_bytes = 32 * len(fields)
        for number, (name, value) in enumerate(fields):
            self.list_bytes += len(name) + (0 if number in ends else len(value))

    def read(self, block: bytes, max_list_bytes: int) -> list[bytes] | None:
        """The values in which a block differs, in order; None if it has to be decoded, as lists above the bound do."""
        values: list[bytes] = []
        if not self._starts:
            return values if block == self._last else None
        at = 0
        end = len(block)
        for start, size in self._starts:
            if not block.startswith(start, at):
                return None
            at += size
            if at >= end:
                return None
            length = block[at]
            at += 1
            if length < 0x7F:
                value = block[at : at + length]
                at += length
            else:
                length &= 0x7F
                if length == 0x7F:
                    return None
                plain = huffman.decode(block[at : at + length])
                if plain is None:
                    return None
                value = plain
                at += length
            if value.strip() != value:
                return None
            values.append(value)
        if block[at:] != self._last or at > end:
            return None
        whole = b"".join(values)
        size = len(whole)
        if len(whole.translate(None, CONTROL)) != size or self.list_bytes + size > max_list_bytes:
            return None
        return values

    def fields_of(self, values: list[bytes]) -> list[Field]:
        """The fields of a block with these values; nobody may change the list."""
        if not values:
            return self._fields
        fields = self._fields.copy()
        for number, name, value in zip(self._ends, self.names, values, strict=True):
            fields[number] = (name, value)
        return fields


def learn(memo: FieldMemo, block: bytes, fields: list[Field]) -> BlockShape | None:
    """The shape of a block that was decoded into `fields` and judged; None if blocks like it have none.

    Its sender is authenticated, and what is new among its fields is not in the memo yet.
    """
    shape = _shape(memo, block, fields) if len(block) <= _MAX_BYTES else None
    if shape is None:
        return None
    shapes = memo.shapes
    known = shapes.get(shape.key)
    if known is None:
        if len(shapes) >= memo.MAX_SHAPES:
            del shapes[next(iter(shapes))]
        known = shapes[shape.key] = shape
    return known


def _shape(memo: FieldMemo, block: bytes, fields: list[Field]) -> BlockShape | None:
    names = [name for name, _ in fields]
    starts: list[bytes] = []
    ends: list[int] = []
    begin = at = unknown = 0
    for number, (name, _) in enumerate(fields):
        first = block[at]
        if first >= 0x80:
            if not 0x80 < first < 0xBE:
                return None
            at += 1
            continue
        value_at = _value_at(block, at)
        if not value_at or value_at >= len(block) or block[value_at] & 0x7F == 0x7F:
            return None
        stop = value_at + 1 + (block[value_at] & 0x7F)
        encoded = block[at:stop]
        if encoded not in memo.fields:
            if name[:1] == b":" or name in _FIXED or names.count(name) > 1:
                return None
            if name not in PER_REQUEST:
                unknown += 1
            starts.append(block[begin:value_at])
            ends.append(number)
            begin = stop
        at = stop
    if at != len(block) or unknown > _MAX_UNKNOWN:
        return None
    # The values that differ are not kept: there may be credentials among them.
    kept = [(name, b"") if number in ends else (name, value) for number, (name, value) in enumerate(fields)]
    return BlockShape(starts, block[begin:], kept, ends)


def _value_at(block: bytes, at: int) -> int:
    """Find where the length of the value stands in the literal at `at`; 0 if there is none or it is a rare one."""
    first = block[at]
    index = first & (0x3F if first >= 0x40 else 0x0F)
    if 0x20 <= first < 0x40:
        return 0
    if index == 0:
        length = block[at + 1] & 0x7F
        return 0 if length == 0x7F else at + 2 + length
    if first >= 0x40:
        return at + 1 if index < len(STATIC) else 0
    if index < 0x0F:
        return at + 1
    return at + 2 if block[at + 1] <= 61 - 0x0F else 0
