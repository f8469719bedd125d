"""Changes single fields of a `config.pbtxt` and leaves the rest of the text as it is, comments too. Pure.

The text format of protobuf is read into fields with their positions: the parser of protobuf itself has none. The value
of a field is replaced where it stands, a missing field is added to its message, and a missing message at the end of the
file. Whoever changes a text parses the result, see `setting.changed`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import unified_diff

MAX_BYTES = 1 << 20
MAX_DEPTH = 32
_TOKEN = re.compile(
    r"""(?P<blank>\s+|\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<word>[A-Za-z0-9_.+-]+)"""
    r"""|(?P<mark>[{}<>\[\]:,;])"""
)
_CLOSERS = {"{": "}", "<": ">"}
_INDENT = "  "


class Unreadable(ValueError):
    """The text is not in the form that is read here."""


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def is_text(self) -> bool:
        return self.text[0] in "\"'"


@dataclass(slots=True, kw_only=True)
class _Message:
    """A message. inside: the position behind its opening brace; end: the position of its closing one."""

    inside: int
    end: int = 0
    fields: list["_Field"] = field(default_factory=list)

    def named(self, name: str) -> list["_Field"]:
        return [each for each in self.fields if each.name == name]


@dataclass(slots=True, kw_only=True)
class _Field:
    """A field, from its name to the separator behind it. value: the positions of its value, brackets included."""

    name: str
    start: int
    end: int = 0
    value: tuple[int, int] = (0, 0)
    messages: list[_Message] = field(default_factory=list)


class _Reader:
    """Reads tokens into messages."""

    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._next = 0
        self._length = len(text)

    def whole(self) -> _Message:
        message = _Message(inside=0)
        self._fields(message, "", 0)
        return message

    def _peek(self) -> str:
        return self._tokens[self._next].text if self._next < len(self._tokens) else ""

    def _take(self, wanted: str = "") -> _Token:
        if self._next == len(self._tokens) or (wanted and self._peek() != wanted):
            raise Unreadable(f"{wanted or 'more'!r} is expected at the {self._next + 1}. word")
        self._next += 1
        return self._tokens[self._next - 1]

    def _fields(self, message: _Message, closer: str, depth: int) -> None:
        """Read the fields of a message up to its closing brace, or to the end of the text."""
        if depth > MAX_DEPTH:
            raise Unreadable(f"messages are nested more than {MAX_DEPTH} deep")
        while (there := self._peek()) != closer:
            if not there:
                raise Unreadable(f"{closer!r} is missing at the end")
            message.fields.append(self._field(depth))
        message.end = self._take(closer).start if closer else self._length

    def _field(self, depth: int) -> _Field:
        name = self._take()
        if name.is_text or not (name.text[0].isalpha() or name.text[0] == "_"):
            raise Unreadable(f"{name.text[:32]!r} is no name of a field")
        found = _Field(name=name.text, start=name.start)
        if self._peek() == ":":
            self._take()
        found.value = self._values(found, depth)
        found.end = found.value[1]
        if self._peek() in (",", ";"):
            found.end = self._take().end
        return found

    def _values(self, found: _Field, depth: int) -> tuple[int, int]:
        if self._peek() != "[":
            return self._value(found, depth)
        start = self._take().start
        while self._peek() != "]":
            self._value(found, depth)
            if self._peek() == ",":
                self._take()
        return start, self._take("]").end

    def _value(self, found: _Field, depth: int) -> tuple[int, int]:
        first = self._take()
        if first.text in _CLOSERS:
            message = _Message(inside=first.end)
            self._fields(message, _CLOSERS[first.text], depth + 1)
            found.messages.append(message)
            return first.start, message.end + 1
        if first.text in "}>[]:,;":
            raise Unreadable(f"a value is expected, not {first.text!r}")
        end = first.end
        while first.is_text and self._peek().startswith(('"', "'")):  # parts of one text
            end = self._take().end
        return first.start, end


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise Unreadable(f"{text[position]!r} in line {text.count(chr(10), 0, position) + 1} is not understood")
        if found.lastgroup != "blank":
            yield _Token(found[0], position)
        position = found.end()


def put(text: str, name: str, value: str | None, *, within: str = "") -> str:
    """Give a field a value, or remove it (None). Raises Unreadable.

    within: the message of the field, "" for the whole one. A missing message is added; of a list of messages only a
    single one is changed.
    """
    message = _Reader(text).whole()
    if not within:
        return _set(text, message, name, value, top=True)
    found = message.named(within)
    if not found:
        block = f"{within} {{\n{_INDENT}{name}: {value}\n}}"
        return text if value is None else _added(text, message, block, top=True)
    if len(found) > 1 or len(found[0].messages) != 1:
        raise Unreadable(f"there is not exactly one {within!r}")
    return _set(text, found[0].messages[0], name, value, top=False)


def put_parameter(text: str, key: str, value: str) -> str:
    """Give an entry of `parameters` a text as its value. Raises Unreadable."""
    written = f'"{value}"'
    for entry in [each for found in _Reader(text).whole().named("parameters") for each in found.messages]:
        if [_text_of(text, each) for each in entry.named("key")] != [key]:
            continue
        values = [each for found in entry.named("value") for each in found.messages]
        if len(values) == 1:
            return _set(text, values[0], "string_value", written, top=False)
        return _set(text, entry, "value", f"{{ string_value: {written} }}", top=False)
    return _added(
        text, _Reader(text).whole(), f'parameters {{ key: "{key}" value: {{ string_value: {written} }} }}', top=True
    )


def append(text: str, block: str) -> str:
    """Add a block at the end of the file."""
    return _added(text, _Reader(text).whole(), block, top=True)


def _text_of(text: str, found: _Field) -> str:
    return text[found.value[0] : found.value[1]].strip("\"'")


def _set(text: str, message: _Message, name: str, value: str | None, *, top: bool) -> str:
    found = message.named(name)
    if not found:
        return text if value is None else _added(text, message, f"{name}: {value}", top=top)
    for extra in reversed(found if value is None else found[1:]):
        text = _removed(text, extra)
    if value is None:
        return text
    start, end = found[0].value
    return f"{text[:start]}{value}{text[end:]}"


def _removed(text: str, found: _Field) -> str:
    """Remove a field: with its line and the comment there, if nothing else is in the line."""
    start, end = found.start, found.end
    line = text.rfind("\n", 0, start) + 1
    rest = text.find("\n", end)
    after = text[end : rest if rest >= 0 else len(text)].strip()
    if not text[line:start].strip() and (not after or after.startswith("#")):
        return text[:line] + (text[rest + 1 :] if rest >= 0 else "")
    while start > 0 and text[start - 1] in " \t":
        start -= 1
    return text[:start] + text[end:]


def _added(text: str, message: _Message, written: str, *, top: bool) -> str:
    """Add a field at the beginning of a message, or at the end of the file."""
    if top:
        gap = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{gap}{written}\n"
    inside, body = message.inside, text[message.inside : message.end]
    if not body.strip():
        return f"{text[:inside]} {written} {text[message.end :]}"
    first_line = body.partition("\n")[0]
    if "\n" not in body or (first_line.strip() and not first_line.strip().startswith("#")):
        return f"{text[:inside]} {written}{text[inside:]}"
    place = inside + len(first_line) + 1
    sample = text[text.rfind("\n", 0, message.fields[0].start) + 1 : message.fields[0].start] if message.fields else ""
    indent = sample if message.fields and not sample.strip() else _INDENT
    return f"{text[:place]}{indent}{written}\n{text[place:]}"


def patch(name: str, before: str, after: str) -> str:
    """Return a unified patch for `patch -p1` in the folder of the repository; "" if nothing is changed.

    name: the file's path there. before: "" for a file that is not there yet.
    """
    source = f"a/{name}" if before else "/dev/null"
    lines = unified_diff(_lines(before), _lines(after), source, f"b/{name}")
    return "".join([line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines])


def _lines(text: str) -> list[str]:
    """Split at line feeds only, as `patch` does."""
    lines = [f"{line}\n" for line in text.split("\n")]
    lines[-1] = lines[-1][:-1]
    return lines if lines[-1] else lines[:-1]
