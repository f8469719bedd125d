"""What must hold for every sequence of HTTP/2 header blocks, by the judgement of the `hpack` library.

The input: a line with two numbers, the table size that we allow and after how many blocks the peer acknowledged it,
then each block behind its length in two bytes. `judge(data)` finds broken rules:

1. A block is fields, an HpackError, or a HeaderListTooLarge; nothing else escapes.
2. What decodes, the library decodes to the same fields, and afterwards both have the same dynamic table; they have it
   as well after a list that is too large.
3. A decoder whose memo knows earlier fields finds the same as one that knows nothing.
4. A block that is recognised by its shape has the fields that it is decoded to, and HTTP/2 allows all of them.
5. A list stays in its bounds, and fields that are not malformed come back the same after our encoder.
"""

import re

import hpack

from oriel_wire.errors import HeaderListTooLarge, HpackError
from oriel_wire.h2.block_shapes import learn
from oriel_wire.h2.hpack import Decoder, FieldMemo, literal, malformed

__all__ = ["MAX_BYTES", "MAX_FIELDS", "Oracle", "blocks_of", "judge", "written"]

MAX_BYTES, MAX_FIELDS = 4096, 40
_NEVER = 1 << 30
# All inputs share this memo: what one of them has left there must not change the result of another one.
_MEMO = FieldMemo(64)


class Oracle:
    """The library's decoder, set up to accept all that ours accepts."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=_NEVER)

    def allow_table(self, size: int) -> None:
        self._decoder.max_allowed_table_size = size

    def decode(self, block: bytes) -> list[tuple[bytes, bytes]] | None:
        """Return the fields; None if the library refuses the block."""
        table = self._decoder.header_table
        allowed = self._decoder.max_allowed_table_size
        if table.maxsize > allowed:
            table.maxsize = allowed  # the size update that a peer may leave out
        try:
            return [(bytes(name), bytes(value)) for name, value in self._decoder.decode(block, raw=True)]
        except hpack.HPACKError:
            return None

    def table(self) -> list[tuple[bytes, bytes]]:
        """Return the entries of the dynamic table, the newest first."""
        return [(bytes(name), bytes(value)) for name, value in self._decoder.header_table.dynamic_entries]


def written(blocks: list[bytes], table: int = 4096, after: int = 0) -> bytes:
    """Return the input for these blocks."""
    return b"%d %d\n" % (table, after) + b"".join(len(block).to_bytes(2, "big") + block for block in blocks)


def blocks_of(data: bytes) -> tuple[list[bytes], int, int]:
    """Read an input; returns the blocks, the table size, and after how many blocks it applies."""
    line, _, rest = data.partition(b"\n")
    numbers = [int(each) for each in re.findall(rb"\d{1,5}", line)[:2]] + [4096, 0]
    blocks = []
    while len(rest) > 2:
        length = int.from_bytes(rest[:2], "big")
        blocks.append(rest[2 : 2 + length])
        rest = rest[2 + length :]
    return blocks, numbers[0], numbers[1]


def judge(data: bytes) -> tuple[str, str]:
    """Return the refusal and the rule that is broken; each is "" if there is none."""
    blocks, table, after = blocks_of(data)
    plain, knowing = (
        Decoder(max_list_bytes=MAX_BYTES, max_fields=MAX_FIELDS, stop_factor=4, memo=memo) for memo in (None, _MEMO)
    )
    oracle = Oracle()
    refusal = ""
    for number, block in enumerate(blocks):
        if number == after:
            for decoder in (plain, knowing, oracle):
                decoder.allow_table(table)
        fields, refusal, ends = _decoded(plain, block)
        if (fields, refusal, ends) != _decoded(knowing, block) or plain.malformed != knowing.malformed:
            return "", f"the memo changes {fields} {refusal}"
        if ends:
            return refusal, ""
        wanted = oracle.decode(block)
        if refusal:
            if wanted is None:
                return refusal, ""  # a string that is not kept is not judged
        elif fields != wanted:
            return "", f"{fields} instead of {wanted}"
        elif broken := _judge_fields(fields, plain) or _judge_shapes(block, fields, plain):
            return "", broken
        else:
            if plain.stateless and not plain.malformed:
                learn(_MEMO, block, fields)
            _MEMO.keep(knowing.fresh)
        if plain.table() != oracle.table() or knowing.table() != oracle.table():
            return "", "the dynamic table is out of step"
    return refusal, ""


def _judge_shapes(block: bytes, fields: list[tuple[bytes, bytes]], decoder: Decoder) -> str:
    if decoder.stateless:
        for shape in _MEMO.shapes.values():
            values = shape.read(block, MAX_BYTES)
            if values is not None and (decoder.malformed or shape.fields_of(values) != fields):
                return f"recognised as {shape.fields_of(values)} instead of {fields}: {decoder.malformed!r}"
    return ""


def _decoded(decoder: Decoder, block: bytes) -> tuple[list[tuple[bytes, bytes]], str, bool]:
    """Return the fields, the refusal, and whether the refusal ends the connection."""
    try:
        return decoder.decode(block), "", False
    except HeaderListTooLarge as error:
        return [], error.message, False
    except HpackError as error:
        return [], error.message, True


def _judge_fields(fields: list[tuple[bytes, bytes]], decoder: Decoder) -> str:
    if len(fields) > MAX_FIELDS or sum(len(name) + len(value) + 32 for name, value in fields) > MAX_BYTES:
        return "a list is larger than its bounds"
    if bool(decoder.malformed) != any(malformed(name, value) for name, value in fields):
        return f"malformed: {decoder.malformed!r}"
    block = b"".join(literal(*field) for field in fields)
    if Decoder().decode(block) != fields or Oracle().decode(block) != fields:
        return "the encoder changes fields"
    return ""
