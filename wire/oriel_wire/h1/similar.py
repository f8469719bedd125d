"""Recognises heads that differ from earlier ones in a few lines only: ids, the length of the body, credentials.

A client's heads are the same line by line but for such lines, and so are the heads of many clients of one program.
The memo's entries for each line of a head (`LineMemo.parts`), nothing for those it does not know, are the key of the
head's *shape*: where the unknown lines stand and how each of them begins. A head of a known shape is read without
looking at its other lines again; one whose unknown lines are not what the shape says is left to the parser. Shapes are
shared by all connections of a server, and are made only of heads whose sender is authenticated and whose lines of other
kinds than those that may differ came before: any other key may never come again.

A server may keep what it decides about a head whatever the lines are in which its shape lets it differ, for the shape
and the credentials. A credential is recognised by its hash (`LineMemo.find_credential`), and no bytes of it are kept.

A line that a proxy only passes on may differ as well: if the memo has it, it counts by its name, so that clients with
other programs and languages share a shape. Lines of a recognised head are never put into the memo, so those that come
once do not fill it.

A shape keeps no head: a head has its shape, and what only the garbage collector can free stops all calls meanwhile.
"""

from hashlib import sha256
from typing import Any, Final, NamedTuple

from oriel_wire.errors import TooLarge
from oriel_wire.h1.request import (
    CONTENT_LENGTH,
    CREDENTIAL,
    FORWARD,
    FORWARDED,
    INTERNAL,
    PASSED_ON,
    REQUEST_ID,
    SAME,
    TRACEPARENT,
    TRACESTATE,
    Field,
    LineMemo,
    RequestHead,
    parse_lines,
)

SIZE: Final = 2048  # bound on shapes, and on decisions
_MAX_ALIKE: Final = 4  # shapes with one key
_MAX_BYTES: Final = 4096  # largest head that makes a shape
# Kinds of lines that may be unknown; lines of other kinds say how the message is read, or are hardly ever new.
_VARIES: Final = frozenset({FORWARD, INTERNAL, FORWARDED, CONTENT_LENGTH, REQUEST_ID, TRACEPARENT, TRACESTATE})
Key = tuple[Any, ...]


class Slot(NamedTuple):
    """A line that may differ between heads of one shape. start: the bytes that it begins with; size: their number."""

    number: int
    kind: int
    start: bytes
    size: int
    name: str


class HeadShape:
    """The common part of the heads of one shape; see `shape_of`.

    slots: the lines that may differ. unknown: those of them that the memo does not have.
    varying: numbers of the lines that may differ and that a proxy passes on.
    """

    __slots__ = (
        *("_chunked", "_credential", "_fields", "_forward", "_line", "_named", "_names", "_plain", "_slots"),
        *("_unknown", "varying"),
    )

    def __init__(self, head: RequestHead, slots: list[Slot], unknown: list[Slot], credential: int) -> None:
        self._credential = credential  # number of its line, 0 if there is none
        self._line = head.line
        self._chunked = head.chunked
        self._slots = slots
        self._unknown = unknown
        self._fields = [*head.fields]
        self._names = head.by_name().copy()
        if credential:  # each head has its own, and no bytes of it are kept
            self._names.pop(self._fields[credential - 1].name)
            self._fields[credential - 1] = Field(b"", "", "", CREDENTIAL, -1)
        numbers = {slot.number for slot in slots}
        # The head as a proxy passes it on: lines, and the numbers of those that differ.
        self._forward: list[bytes | int] = [
            number if number in numbers else field.line
            for number, field in enumerate(self._fields, 1)
            if field.kind in PASSED_ON
        ]
        self.varying = tuple(slot.number for slot in slots if slot.kind == FORWARD)
        self._named = (head.timeout, head.tier, head.content_encoding, head.header_length)
        self._plain = self._named == (None, None, None, None) and not head.chunked

    def read(self, lines: list[bytes], memo: LineMemo) -> RequestHead | None:
        """The head in `lines`, whose bytes are kept but for the credential; None if it has to be parsed.

        Raises BadMessage for a credential that no head may have.
        """
        head = RequestHead(self._line)
        if self._credential:
            line = lines[self._credential]
            field = memo.credentials.get(sha256(line).digest()) or memo.classify(line)
            if field.kind != CREDENTIAL:
                return None
            head.credentials = [field]
        for number, kind, start, size, _ in self._unknown:
            line = lines[number]
            if not line.startswith(start):
                return None
            value = line[size:].decode("latin-1").strip(" \t")
            if not value.isprintable():
                return None
            if kind == REQUEST_ID:
                head.request_id = value
            elif kind == TRACEPARENT:
                head.traceparent = value
            elif kind == CONTENT_LENGTH:
                if not value.isdigit() or not value.isascii() or len(value) > 15:
                    return None
                head.content_length = int(value)
            elif kind == TRACESTATE:
                head.tracestate = value
        if self._credential:
            lines[self._credential] = b""
        head.lines = lines
        head.shape = self
        if not self._plain:
            head.chunked = self._chunked
            head.timeout, head.tier, head.content_encoding, head.header_length = self._named
        return head

    def fields_of(self, head: RequestHead) -> list[Field]:
        """Every field of a head that was read."""
        fields = [*self._fields]
        for number, kind, _, size, name in self._slots:
            line = head.lines[number]
            value = line[size:].decode("latin-1").strip(" \t")
            fields[number - 1] = Field(line, name, value, kind, int(value) if kind == CONTENT_LENGTH else -1)
        if head.credentials is not None:
            fields[self._credential - 1] = head.credentials[0]
        return fields

    def forward_of(self, head: RequestHead) -> list[bytes]:
        """`RequestHead.forward` of a head that was read."""
        lines = head.lines
        return [lines[each] if isinstance(each, int) else each for each in self._forward]

    def names_of(self, head: RequestHead) -> dict[str, str]:
        """`RequestHead.by_name` of a head that was read."""
        names = self._names.copy()
        for number, _, _, size, name in reversed(self._slots):  # the first of two equal names counts
            names[name] = head.lines[number][size:].decode("latin-1").strip(" \t")
        if head.credentials is not None:
            names[head.credentials[0].name] = head.credentials[0].value
        return names


def shape_of(head: RequestHead, key: Key) -> HeadShape | None:
    """The shape of a parsed head; None if heads like it have to be parsed every time."""
    if head.close or head.expect_continue or head.dropped:
        return None
    slots, unknown = [], []
    credential = 0
    names = [field.name for field in head.fields]
    for number, field in enumerate(head.fields, 1):
        size = len(field.name) + 1
        slot = Slot(number, field.kind, field.line[:size], size, field.name)
        if key[number] is not None:
            if key[number] == field.name:
                slots.append(slot)
            continue
        if field.kind == CREDENTIAL and not credential:
            credential = number
        elif field.kind in _VARIES and field.name not in SAME and names.count(field.name) == 1:
            slots.append(slot)
            unknown.append(slot)
        else:
            return None
    return HeadShape(head, slots, unknown, credential)


class SimilarHeads:
    """The shapes of one server's heads, and its decisions about them. Single user."""

    __slots__ = ("_decided", "_decisions", "_memo", "_shapes")

    def __init__(self, memo: LineMemo) -> None:
        self._memo = memo
        self._shapes: dict[Key, tuple[HeadShape, ...]] = {}
        self._decisions: dict[tuple[HeadShape, Field | None], Any] = {}
        self._decided: set[HeadShape] = set()

    def read(self, block: bytes, max_fields: int) -> RequestHead:
        """Read a head without its closing CRLFCRLF. Raises BadMessage, TooLarge for more than `max_fields` fields."""
        lines = block.split(b"\r\n")
        if len(lines) > max_fields + 1:
            raise TooLarge(f"more than {max_fields} header fields")
        memo = self._memo
        parts: list[Any] = list(map(memo.parts.get, lines))
        parts[0] = memo.lines.get(lines[0])
        key = tuple(parts)
        for shape in self._shapes.get(key, ()):
            head = shape.read(lines, memo)
            if head is not None:
                head.decision = self._decisions.get((shape, head.credentials[0] if head.credentials else None))
                return head
        head = parse_lines(lines, list(map(memo.fields.get, lines)), memo)
        if key[0] is not None and len(block) <= _MAX_BYTES:
            head.key = key
        return head

    def authenticated(self, head: RequestHead) -> None:
        """Remember the lines of a head whose sender is authenticated, and its shape, if heads like it can have one."""
        memo, line = self._memo, head.line
        if head.fresh:
            memo.keep(head.fresh)
            head.fresh = ()
        if memo.lines.get(line.line) is not line:
            memo.keep_line(line)
        key, head.key = head.key, ()
        shape = shape_of(head, key) if key else None
        if shape is not None:
            head.shape = shape
            alike = self._shapes.get(key, ())
            if not alike and len(self._shapes) >= SIZE:
                self._shapes.clear()
            self._shapes[key] = (shape, *alike[: _MAX_ALIKE - 1])

    def decide(self, head: RequestHead, decision: Any, most: int = 0) -> None:
        """Keep a decision for all heads of this shape with these credentials, whatever their other lines, if the
        credentials will be recognised.

        It is kept until `forget_decisions`, or until there are `SIZE` others, or `most` if that is more, or those of
        `SIZE` shapes: a decision keeps its shape in memory, and one sender may make any number of shapes.
        """
        head.decision = decision
        credential = head.credentials[0] if head.credentials else None
        if credential is not None and credential.owner is None:  # it was parsed, and may be recognised from now on
            credential = self._memo.find_credential(credential.line) or credential
        if head.shape is not None and (credential is None or credential.owner is not None):
            if len(self._decisions) >= max(SIZE, most) or len(self._decided) >= SIZE:
                self.forget_decisions()
            self._decided.add(head.shape)
            self._decisions[head.shape, credential] = decision

    def forget_decisions(self) -> None:
        """Drop all decisions, because the set of valid credentials has changed."""
        self._decisions.clear()
        self._decided.clear()
