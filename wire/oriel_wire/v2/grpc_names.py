"""Reads the model that a v2 gRPC message names, and makes sure that the message cannot name another one. Pure.

In protobuf the last occurrence of a scalar field wins, so the first `model_name` of a message may not be the one that
the server uses. Every v2 request that names a model has the name in field 1 and the version in field 2. So the first
occurrence of each is read and authorised, and then appended to the message again, where it is also the last.

Appending is safe only if the message is well-formed at its top level: a final field that claims more bytes than there
are, or an open group, would swallow what is appended, and the sender's own last `model_name` would stay in force. So
all fields of the top level are walked, at most `MAX_FIELDS` of them and without parsing their content, and groups are
refused. The first `model_name` has to begin within `MAX_PEEK` bytes. In a message that does not come in one piece it
has to end within `MAX_BEGINNING` bytes: before it is known, no more is received.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final

from oriel_wire.errors import BadMessage

SERVICE = "inference.GRPCInferenceService"
MAX_FIELDS = 4096
MAX_PEEK = 64 * 1024
MAX_BEGINNING: Final = 65_535 - 5  # bytes that fit into a stream's first window, behind a message's prefix
_NAME_TAG, _VERSION_TAG, _PARAMETERS_TAG = 0x0A, 0x12, 0x22
_KEY_TAG, _VALUE_TAG = 0x0A, 0x12
_INT64_TAG, _UINT64_TAG = 0x10, 0x28  # tags of `InferParameter`; tritonclient uses one of them
_FINAL = b"\x0a\x15triton_final_response\x12\x02\x08"  # an entry of `parameters` up to its boolean value
_MAX_ANSWER_FIELDS = 64
_HEAD_BYTES: Final = 20  # largest head of a field: two numbers of at most ten bytes
_WINDOW_BYTES: Final = 4096


class _Window:
    """The part of a message in pieces that is being read; it only moves on."""

    __slots__ = ("_offset", "_pieces", "_piece")

    def __init__(self, pieces: Sequence[bytes | memoryview]) -> None:
        self._pieces = pieces
        self._piece = self._offset = 0

    def move(self, by: int, size: int) -> bytes:
        """Skip `by` bytes and return the next `size`, or all that are left if they are fewer."""
        pieces, piece, offset = self._pieces, self._piece, self._offset + by
        while piece < len(pieces) and offset >= len(pieces[piece]):
            offset -= len(pieces[piece])
            piece += 1
        self._piece, self._offset = piece, offset
        parts = []
        while piece < len(pieces) and size:
            part = pieces[piece][offset : offset + size]
            parts.append(part)
            size -= len(part)
            piece, offset = piece + 1, 0
        return b"".join(parts)


def peek_model(message: bytes | list[bytes | memoryview]) -> tuple[str, str]:
    """Return the first model name and version, "" where absent. message: whole or in pieces. Raises BadMessage."""
    if isinstance(message, bytes):
        data, end, window = message, len(message), None
    else:
        window = _Window(message)
        data, end = window.move(0, _WINDOW_BYTES), sum(map(len, message))
    name: bytes | None = None
    version: bytes | None = None
    position = before = 0  # in `data`, which begins behind `before` bytes and has `end` to the end of the message
    for _ in range(MAX_FIELDS):
        if position == end:
            break
        if window is not None and position + _HEAD_BYTES > len(data):
            data = window.move(position, _WINDOW_BYTES)
            before, end, position = before + position, end - position, 0
        start = before + position
        tag = data[position]
        position += 1
        if tag > 127:
            tag, position = read_varint(data, position - 1)
        kind, number = tag & 7, tag >> 3
        if not 0 < number < 1 << 29:
            raise BadMessage("the message has an invalid field number")
        if kind == 2:
            size = data[position] if position < end else 128
            if size < 128:
                position += 1
            else:
                size, position = read_varint(data, position)
            if size > end - position:
                raise BadMessage("the message ends inside a field")
            if window is not None and number < 3 and position + size > len(data):
                data = window.move(position, size)
                before, end, position = before + position, end - position, 0
            if number == 1 and name is None:
                if start > MAX_PEEK:
                    raise BadMessage(f"model_name has to be within the first {MAX_PEEK} bytes")
                name = data[position : position + size]
            elif number == 2 and version is None:
                version = data[position : position + size]
            position += size
        elif kind == 0:
            _, position = read_varint(data, position)
        elif kind in (1, 5):
            position += 8 if kind == 1 else 4
            if position > end:
                raise BadMessage("the message ends inside a field")
        else:
            raise BadMessage("the message holds a group, which the v2 protocol does not have")
    else:
        if position != end:
            raise BadMessage(f"the message has more than {MAX_FIELDS} fields")
    try:
        return (name or b"").decode("ascii"), (version or b"").decode("ascii")
    except UnicodeDecodeError:
        raise BadMessage("model_name and model_version are ASCII") from None


def peek_parameters(message: bytes) -> bytes:
    """Return the fields with the parameters of a message, as they are in it; `peek_model` has read it. Raises
    BadMessage.
    """
    found: list[bytes] = []
    position = size_bytes = 0
    while position < len(message):
        start = position
        tag, position = read_varint(message, position)
        if tag & 7 == 2:
            size, position = read_varint(message, position)
            position += size
            if tag == _PARAMETERS_TAG:
                found.append(message[start:position])
                size_bytes += position - start
        elif tag & 7 == 0:
            _, position = read_varint(message, position)
        else:
            position += 8 if tag & 7 == 1 else 4
    if size_bytes > MAX_PEEK:
        raise BadMessage(f"the parameters have more than {MAX_PEEK} bytes")
    return b"".join(found)


class Beginning:
    """Reads the first model name and version of a message that is not complete, going on from where it stopped.

    This only guesses what `peek_model` will return for the whole message.
    """

    __slots__ = ("_fields", "_name", "_position", "_version", "_wanted")

    def __init__(self) -> None:
        self._name = self._version = ""
        self._fields = 0  # read so far, which end at `_position`
        self._position = 0
        self._wanted = 1  # bytes that must have come before more of the message can be read

    def read(self, message: bytes | bytearray | memoryview, start: int = 0) -> tuple[str, str]:
        """Read on in what is there of a message, which begins at `start`. Returns the name and the version as far as
        they are known, "" for what is not.

        Raises BadMessage as soon as the name cannot be within the first `MAX_BEGINNING` bytes and `MAX_FIELDS` fields.
        """
        end = len(message)
        while start + self._wanted <= end and not (self._name and self._version):
            self._field(message, start, end)
            if not self._name and (self._wanted > MAX_BEGINNING or self._fields > MAX_FIELDS):
                raise BadMessage(
                    f"model_name has to be within the first {MAX_BEGINNING} bytes and {MAX_FIELDS} fields of a message"
                )
        return self._name, self._version

    def _field(self, message: bytes | bytearray | memoryview, start: int, end: int) -> None:
        """Read one field, if it has come as far as needed, and note how long the message has to be for the next."""
        at = start + self._position
        head = bytes(message[at : at + _HEAD_BYTES])
        try:
            tag, size = read_varint(head, 0)
            kind, number = tag & 7, tag >> 3
            if kind == 2:
                content, size = read_varint(head, size)
            elif kind == 0:
                content, size = 0, read_varint(head, size)[1]
            elif kind in (1, 5):
                content = 8 if kind == 1 else 4
            else:
                raise BadMessage("the message holds a group, which the v2 protocol does not have")
        except BadMessage:
            if len(head) == _HEAD_BYTES:
                raise
            self._wanted = end - start + 1  # the rest of these two numbers
            return
        found = number in (1, 2) and kind == 2
        self._wanted = self._position + size + content
        if found and start + self._wanted > end:
            return
        if found:
            text = bytes(message[at + size : at + size + content])
            if not text.isascii():
                raise BadMessage("model_name and model_version are ASCII")
            if number == 1:
                self._name = self._name or text.decode("ascii")
            else:
                self._version = self._version or text.decode("ascii")
        self._fields += 1
        self._position = self._wanted
        self._wanted += 1


def peek_answer(answer: bytes) -> tuple[str, bool | None]:
    """Return the model that a `ModelStreamInferResponse` is of, and whether it is the last answer to its message.

    The model is "" if it is not named or cannot be read; the second is None if the response does not say it. Nothing
    behind the beginning of the tensors is read.
    """
    model, final = "", None
    with suppress(BadMessage, UnicodeDecodeError):
        position, end = 0, len(answer)
        if answer[:1] == b"\x0a":  # an error is the last answer to its message
            size, position = read_varint(answer, 1)
            position += size
            final = True if size else None
        if answer[position : position + 1] != b"\x12":
            return model, final
        size, position = read_varint(answer, position + 1)
        end = min(end, position + size)
        for _ in range(_MAX_ANSWER_FIELDS):
            if position >= end:
                break
            tag, position = read_varint(answer, position)
            if tag & 7 != 2 or tag > _PARAMETERS_TAG:
                break
            size, position = read_varint(answer, position)
            if tag == _NAME_TAG:
                model = answer[position : position + size].decode("ascii")
            elif tag == _PARAMETERS_TAG and final is None and answer.startswith(_FINAL, position):
                final = answer[position + len(_FINAL) : position + size] == b"\x01"
            position += size
    return model, final


def append_model(message: bytes, name: str, version: str) -> bytes:
    """Return `message` with this name and version in force; `peek_model` has read both from the same message."""
    return b"".join((message, model_fields(name, version)))


@lru_cache(1024)  # the names are those of models that may be used
def model_fields(name: str, version: str) -> bytes:
    """Return what `append_model` appends."""
    return _field(_NAME_TAG, name) + _field(_VERSION_TAG, version)


def schedule_fields(priority: int, left_s: float | None) -> bytes:
    """Return what puts Triton's `priority` and `timeout` in force at the end of a `ModelInferRequest` that `peek_model`
    has read.

    priority: 1 is the most urgent.
    left_s: seconds until the deadline; None for no timeout.
    The last entry of a map wins, so these replace the sender's own.
    """
    added = _parameter("priority", _UINT64_TAG, priority)
    if left_s is not None:
        added += _parameter("timeout", _INT64_TAG, max(1, int(left_s * 1e6)))
    return added


def _parameter(name: str, tag: int, value: int) -> bytes:
    entry = _field(_KEY_TAG, name) + _sized(_VALUE_TAG, bytes((tag,)) + write_varint(value))
    return _sized(_PARAMETERS_TAG, entry)


def _field(tag: int, text: str) -> bytes:
    return _sized(tag, text.encode("ascii"))


def _sized(tag: int, data: bytes) -> bytes:
    return bytes((tag,)) + write_varint(len(data)) + data


def write_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises BadMessage."""
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise BadMessage("the message is not valid protobuf")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7
