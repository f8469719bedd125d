"""HPACK, the header compression of HTTP/2 (RFC 7541): a strict decoder, and literals for an encoder without a table.

Rules of the decoder:

* What violates the RFC is an HpackError: the connection ends, as what follows cannot be read. So are integers of more
  than five further bytes, and a size update behind a field.
* A header list that is too large, as RFC 9113 (6.5.2) counts it or in its number of fields, is a HeaderListTooLarge.
  The rest of its block is read for the sake of the dynamic table alone and makes no field, so 12,000 references to
  one large entry cost no memory. Fields that are not kept are not judged either: the Huffman code of a skipped string
  may be wrong. Past `stop_factor` times the bound it is an HpackError.
* A field that is compressed properly but is none that HTTP/2 allows is no HpackError: `Decoder.malformed` names it,
  and its stream ends.
* When we allow a smaller table (`Decoder.allow_table`), the peer's next block has to begin with a size update. If
  one does not, RFC 9113 (4.3.1) wants an error and this decoder evicts as if the update were there, because nginx
  (`grpc_pass`) and gRPC's C core send literals "with incremental indexing" to any server and never a size update. That
  is safe: our table then holds the newest of the peer's entries, so a reference means the same field or is an error.

The memo: a literal whose name is in full or in the static table has one meaning, whatever was sent before. Its bytes
are validated once and then recognised. As in `h1`, values that differ per request, and credentials, are never kept; a
field is kept only when the caller says so (`FieldMemo.keep`, after authentication). Only strings of less than 127 bytes
are looked for: their length is one byte.

To edit this module: the loop of `decode` costs a quarter of a microsecond per known field, and the whole budget of a
gRPC call's head is 5. It reads past the end of a block only by `block[i]`, which raises IndexError.
"""

from typing import Final

from oriel_wire.errors import BadMessage, HeaderListTooLarge, HpackError
from oriel_wire.h2 import huffman
from oriel_wire.h2.known_fields import PER_REQUEST, STATIC, Field, FieldMemo, malformed

_ENTRY_BYTES: Final = 32  # RFC 7541, 4.1: what an entry or a field counts beside its strings
_MAX_KNOWN: Final = 60  # the largest size of a static entry, or of a field with a static name less its value
_MAX_PATH: Final = 96
_TRANSFER_ENCODING: Final = 0xB9  # the one entry of the static table that HTTP/2 does not allow


class Decoder:
    """Decodes the header blocks of one direction of one connection, which it has to see all and in order.

    max_table_bytes: bytes that the peer may keep in the dynamic table; HTTP/2 begins with 4096.
    max_list_bytes, max_fields: the bounds of one decoded list; a larger one is a HeaderListTooLarge.
    stop_factor: a list of more than this many times `max_list_bytes` is an HpackError; 0 for none.
    memo: the fields known to all connections of this kind.

    About the last block that was decoded:
    malformed: why one of its fields is not allowed in HTTP/2, "" if all are.
    fresh: fields that the memo may keep once the sender is authenticated.
    """

    __slots__ = (
        "_allowed",
        "_doubtful",
        "_entries",
        "_loose_bytes",
        "_max_fields",
        "_max_list",
        "_stop",
        "_table_bytes",
        "_table_max",
        "fresh",
        "malformed",
        "memo",
    )

    def __init__(
        self,
        max_table_bytes: int = 4096,
        max_list_bytes: int = 16 * 1024,
        max_fields: int = 128,
        *,
        stop_factor: int = 16,
        memo: FieldMemo | None = None,
    ) -> None:
        self.memo = FieldMemo() if memo is None else memo
        self._max_list = max_list_bytes
        self._max_fields = max_fields
        self._stop = max_list_bytes * stop_factor
        self._entries: list[Field] = []  # the newest last
        self._doubtful = False  # True if an entry may be a field that HTTP/2 does not allow
        self._table_bytes = 0
        self._table_max = max_table_bytes  # the table size that the peer uses; more than allowed until its size update
        self._allowed = max_table_bytes
        self._loose_bytes = 0  # bytes of names and values that were not known
        self.malformed = ""
        self.fresh: list[tuple[bytes, Field]] = []

    @property
    def stateless(self) -> bool:
        """Return whether the peer has no dynamic table any more: a block means the same whatever was sent before."""
        return not self._table_max

    def allow_table(self, size: int) -> None:
        """Our SETTINGS_HEADER_TABLE_SIZE was acknowledged: the next block follows it."""
        self._allowed = size

    def table(self) -> list[Field]:
        """The entries of the dynamic table, the newest first."""
        return self._entries[::-1]

    def decode(self, block: bytes) -> list[Field]:
        """The fields of a whole header block, in order. Raises HpackError, HeaderListTooLarge."""
        fields: list[Field] = []
        self.malformed = ""
        self.fresh = []
        self._loose_bytes = 0
        end = len(block)
        memo = self.memo.fields
        i = 0
        try:
            if self._table_max > self._allowed or (end and block[0] & 0xE0 == 0x20):
                i = self._resize(block)
            for _ in range(self._max_fields):
                if i >= end:
                    break
                first = block[i]
                if first >= 0x80:
                    if 0x80 < first < 0xBE and first != _TRANSFER_ENCODING:
                        fields.append(STATIC[first & 0x7F])
                        i += 1
                    else:
                        index, stop = _integer(block, i, 0x7F)
                        field = self._entry(index)
                        self._loose_bytes += len(field[0]) + len(field[1])
                        if self._loose_bytes > self._max_list:
                            break
                        if self._doubtful or first == _TRANSFER_ENCODING:
                            self.malformed = malformed(field[0], field[1]) or self.malformed
                        fields.append(field)
                        i = stop
                    continue
                # Position of the value's length: behind a short name or a static one, 0 in rare cases.
                at = 0
                if first == 0x40 or first == 0:
                    length = block[i + 1] & 0x7F
                    if length != 0x7F:
                        at = i + 2 + length
                elif 0x40 < first < 0x7E or first < 0x0F:
                    at = i + 1
                elif first == 0x0F and block[i + 1] <= 61 - 0x0F:
                    at = i + 2
                elif first == 0x1F and block[i + 1] <= 61 - 0x0F:  # a credential, say
                    at = i + 2
                encoded = b""
                if at and block[at] & 0x7F != 0x7F:
                    stop = at + 1 + (block[at] & 0x7F)
                    encoded = block[i:stop]
                    known = memo.get(encoded)
                    if known is not None:
                        fields.append(known)
                        i = stop
                        if first >= 0x40 and self._table_max:
                            self._insert(known)
                        continue
                field, stop = self._literal(block, i)
                if stop < 0:
                    break
                fields.append(field)
                i = stop
                if encoded and first != 0x1F and not self.malformed and _may_be_kept(field):
                    self.fresh.append((encoded, field))
            if i < end:
                self._skip(block, i, list_bytes(fields))
        except IndexError:
            raise HpackError("a header block ends inside a field") from None
        # A field that was known counts at most 60 and 8/5 of its bytes in the block.
        if _MAX_KNOWN * len(fields) + 2 * end + self._loose_bytes > self._max_list:
            size = list_bytes(fields)
            if size > self._max_list:
                raise self._too_large(size)
        return fields

    def _literal(self, block: bytes, i: int) -> tuple[Field, int]:
        """The literal at `i`, and where it ends: -1 if the list is too large."""
        first = block[i]
        if 0x20 <= first < 0x40:
            raise HpackError("a table size update follows a header field")
        index, at = _integer(block, i, 0x3F if first >= 0x40 else 0x0F)
        if index:
            name = self._entry(index)[0]
        else:
            length, start = _integer(block, at, 0x7F)
            if length > self._max_list:
                return STATIC[0], -1
            name = _string(block, start, length, block[at])
            at = start + length
        length, start = _integer(block, at, 0x7F)
        if length > self._max_list:
            return STATIC[0], -1
        value = _string(block, start, length, block[at])
        self._loose_bytes += len(name) + len(value)
        if self._loose_bytes > self._max_list:
            return STATIC[0], -1
        field = (name, value)
        why = malformed(name, value)
        if why:
            self.malformed = why
            self._doubtful = True
        if first >= 0x40:
            self._insert(field)
        return field, start + length

    def _entry(self, index: int) -> Field:
        """The entry of the static or the dynamic table."""
        if 0 < index < 62:
            return STATIC[index]
        if index == 0 or index - 61 > len(self._entries):
            raise HpackError("a header block names an entry that is in no table")
        return self._entries[61 - index]

    def _insert(self, field: Field) -> None:
        """Put a field into the dynamic table; one that is larger than the table only empties it (RFC 7541, 4.4)."""
        size = len(field[0]) + len(field[1]) + _ENTRY_BYTES
        self._evict(self._table_max - size)
        if size <= self._table_max:
            self._entries.append(field)
            self._table_bytes += size

    def _evict(self, most: int) -> None:
        """Drop the oldest entries until the others count at most `most` bytes."""
        entries = self._entries
        if self._table_bytes <= most or not entries:
            return
        count = 0
        for name, value in entries:
            self._table_bytes -= len(name) + len(value) + _ENTRY_BYTES
            count += 1
            if self._table_bytes <= most:
                break
        del entries[:count]

    def _resize(self, block: bytes) -> int:
        """Read the size updates at the begin of a block; where the first field begins."""
        i = 0
        end = len(block)
        while i < end and block[i] & 0xE0 == 0x20:
            size, i = _integer(block, i, 0x1F)
            if size > self._allowed:
                raise HpackError("a table size update exceeds what was allowed")
            self._table_max = size
            self._evict(size)
        if self._table_max > self._allowed:
            self._table_max = self._allowed
            self._evict(self._allowed)
        return i

    def _skip(self, block: bytes, i: int, size: int) -> None:
        """Read the rest of a list that is too large, which counts `size` so far, for the dynamic table alone."""
        end = len(block)
        while i < end:
            first = block[i]
            if first >= 0x80:
                index = first & 0x7F
                i += 1
                if index == 0x7F:
                    index, i = _integer(block, i - 1, 0x7F)
                name, value = self._entry(index)
                size += len(name) + len(value) + _ENTRY_BYTES
            else:
                size, i = self._skip_literal(block, i, size)
            if 0 < self._stop < size:
                break
        raise self._too_large(size)

    def _skip_literal(self, block: bytes, i: int, size: int) -> tuple[int, int]:
        """Skip the literal at `i`, but put it into the dynamic table if it goes there; the new size, and its end."""
        first = block[i]
        if 0x20 <= first < 0x40:
            raise HpackError("a table size update follows a header field")
        index, at = _integer(block, i, 0x3F if first >= 0x40 else 0x0F)
        name = self._entry(index)[0] if index else b""
        name_length = 0
        name_start = name_at = at
        if not index:
            name_length, name_start = _integer(block, at, 0x7F)
            at = name_start + name_length
        length, start = _integer(block, at, 0x7F)
        if start + length > len(block):
            raise HpackError("a header block ends inside a field")
        if first >= 0x40:
            # A byte has at least 8/30 of a symbol: what is longer than that would only empty the table.
            if 8 * (name_length + length) > 30 * self._table_max:
                self._evict(0)
            else:
                if not index:
                    name = _string(block, name_start, name_length, block[name_at])
                self._doubtful = True
                self._insert((name, _string(block, start, length, block[at])))
        return size + len(name) + name_length + length + _ENTRY_BYTES, start + length

    def _too_large(self, size: int) -> BadMessage:
        self.fresh = []
        if 0 < self._stop < size:
            return HpackError("a header list is larger than a connection may send")
        return HeaderListTooLarge(f"a header list of more than {self._max_list} bytes or {self._max_fields} fields")


def _may_be_kept(field: Field) -> bool:
    """Return whether a memo may have the field: its value is none of one request alone."""
    name, value = field
    return name not in PER_REQUEST and (name != b":path" or (len(value) <= _MAX_PATH and b"?" not in value))


def list_bytes(fields: list[Field]) -> int:
    """The size of a header list as SETTINGS_MAX_HEADER_LIST_SIZE counts it."""
    size = _ENTRY_BYTES * len(fields)
    for name, value in fields:
        size += len(name) + len(value)
    return size


def _integer(block: bytes, i: int, most: int) -> tuple[int, int]:
    """The integer whose prefix is all ones for `most`, and where it ends (RFC 7541, 5.1). Raises IndexError."""
    value = block[i] & most
    if value < most:
        return value, i + 1
    for n in range(1, 6):
        byte = block[i + n]
        value += (byte & 0x7F) << 7 * (n - 1)
        if byte < 0x80:
            return value, i + n + 1
    raise HpackError("an integer has more than five further bytes")


def _string(block: bytes, start: int, length: int, first: int) -> bytes:
    """The string of `length` bytes. first: the byte with the bit for the Huffman code."""
    text = block[start : start + length]
    if len(text) != length:
        raise HpackError("a header block ends inside a field")
    if first < 0x80:
        return text
    return _plain(text)


def _plain(text: bytes) -> bytes:
    plain = huffman.decode(text)
    if plain is None:
        raise HpackError("a string has EOS in its Huffman code, or the padding is wrong")
    return plain


# Name -> the bytes of a literal without indexing before its value. A name's first index counts.
_PREFIXES: Final[dict[bytes, bytes]] = {}
LENGTHS: Final = [bytes((n,)) for n in range(0x7F)]


def _encode_integer(value: int, first: int, most: int) -> bytes:
    """first: the bits before the prefix, which is all ones for `most`."""
    if value < most:
        return bytes((first | value,))
    out = [first | most]
    value -= most
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _encode_string(text: bytes) -> bytes:
    return _encode_integer(len(text), 0, 0x7F) + text


def _fill() -> None:
    for index in range(len(STATIC) - 1, 0, -1):
        _PREFIXES[STATIC[index][0]] = _encode_integer(index, 0, 0x0F)
    for name in PER_REQUEST | {b"te", b"grpc-status", b"grpc-message", b"grpc-encoding", b"grpc-accept-encoding"}:
        _PREFIXES.setdefault(name, b"\0" + _encode_string(name))


_fill()


def field_prefix(name: bytes) -> bytes:
    """The begin of a literal without indexing: the value's length (one byte below 127) and the value follow."""
    return _PREFIXES.get(name) or b"\0" + _encode_string(name)


def literal(name: bytes, value: bytes) -> bytes:
    """A field as a literal without indexing."""
    length = len(value)
    if length < 0x7F:
        return (_PREFIXES.get(name) or b"\0" + _encode_string(name)) + LENGTHS[length] + value
    return field_prefix(name) + _encode_string(value)
