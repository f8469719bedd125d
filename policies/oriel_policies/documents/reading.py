"""Reads documents to tables, and names the place of every mistake of form.

A good file is decoded in one go. Only a bad one is walked value by value, so that each mistake is reported:
unknown fields (with the nearest known one), missing fields, values of another type. Entries without a mistake are
returned, so that the checks of `compile` apply to them as well.
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from oriel_policies.documents.schema import DocumentTable, TenantLine, TenantTable
from oriel_policies.errors import BadDocument

_MAX_LINE_BYTES = 1024 * 1024
MOST_PARTS = 32
_MOST_LISTED = 12
T = TypeVar("T")
# A text or a comment of TOML: texts of several lines in both forms, texts of one line in both, a comment.
# A text without an end is one as well: the parser gets no further.
_TEXT = re.compile(
    rb'''"""(?:[^"\\]|\\.|"{1,2}(?!"))*"{0,5}|'{3}(?:[^']|'{1,2}(?!'))*'{0,5}|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|#[^\n]*''',
    re.DOTALL,
)
_MARKS = bytes.maketrans(b",[]{}", b"=====")  # characters that may stand before or behind a key
_ENDS = {">=": "ge", ">": "gt", "<=": "le", "<": "lt"}
_SECTIONS = ("tiers", "tenants", "issuers", "pools", "prices")


def nearest(name: str, known: Mapping[str, object] | set[str], *, list_all: bool = False) -> str:
    """ ", did you mean 'x'?" for the nearest known name. Without one: "" or, with `list_all`, the known names if
    few.
    """
    # difflib compares letter by letter with every known name. With thousands of names or a page of text that takes too
    # long.
    near = get_close_matches(name, sorted(known), n=1, cutoff=0.6) if len(known) <= 500 and len(name) <= 128 else []
    if near:
        return f", did you mean {near[0]!r}?"
    return f": there are {', '.join(sorted(known))}" if list_all and 0 < len(known) <= _MOST_LISTED else ""


def _with_range(text: str, kind: Any) -> str:
    """Return the text of a mistake with both ends of the range of `kind`, where it names the end that was passed."""
    metas = [each for each in get_args(kind)[1:] if isinstance(each, msgspec.Meta)]
    ends = [(sign, getattr(meta, name)) for meta in metas for sign, name in _ENDS.items()]
    named = [f"{sign} {end}" for sign, end in ends if end is not None]
    *words, sign, _ = text.split(" ")  # msgspec: "Expected `int` <= 255"
    return " ".join([*words, " and ".join(named)]) if named and sign in _ENDS else text


def read_toml(data: bytes, kind: type[T]) -> T:
    """Decode a document. Raises DecodeError, UnicodeDecodeError.

    A key of more than MOST_PARTS parts is refused before: the parser takes time by the square of their number.
    """
    if any(line.count(b".") >= MOST_PARTS for line in data.split(b"\n")):
        # Texts that take several lines keep their number, and a key is in one line.
        plain = _TEXT.sub(lambda found: b"''" + b"\n" * found[0].count(b"\n"), data)
        for number, line in enumerate(plain.split(b"\n"), 1):
            if any(part.count(b".") >= MOST_PARTS for part in line.translate(_MARKS).split(b"=")):
                raise msgspec.DecodeError(f"a key of line {number} has more than {MOST_PARTS} parts")
    return msgspec.toml.decode(data, type=kind)


class Reading:
    """The tables of a set of files. mistakes: mistakes of form. bad: section -> names of the entries that had one."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.mistakes: list[BadDocument] = []
        self.unreadable = False  # set if a file cannot be read: the names that it defines are unknown then
        self.bad: dict[str, set[str]] = {section: set() for section in _SECTIONS}
        self.route_numbers: dict[str, list[int]] = {}  # numbers of the remaining routes, where some had a mistake
        self.documents: dict[str, DocumentTable] = {}
        self.attached = {name: data for name, data in files.items() if name.endswith(".json")}
        self._lines = {name: data for name, data in files.items() if name.endswith(".ndjson")}
        for file, data in files.items():
            if file not in self.attached and file not in self._lines:
                self._document(file, data)

    def tenants(self) -> Iterator[tuple[str, str, TenantTable]]:
        """(file, name, table) of every tenant; of a line of NDJSON the file is `FILE:LINE`."""
        for file, document in self.documents.items():
            for name, table in document.tenants.items():
                yield file, name, table
        decode = msgspec.json.Decoder(TenantLine).decode
        for file, data in self._lines.items():
            for number, line in enumerate(data.split(b"\n"), 1):
                if not line.strip():
                    continue
                try:
                    if len(line) > _MAX_LINE_BYTES:
                        raise msgspec.ValidationError(f"the line is longer than {_MAX_LINE_BYTES} bytes")
                    tenant = decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    self._bad_line(f"{file}:{number}", line, error)
                    continue
                yield f"{file}:{number}", tenant.name, tenant

    def _document(self, file: str, data: bytes) -> None:
        try:
            self.documents[file] = read_toml(data, DocumentTable)
        except msgspec.ValidationError as error:
            self._walk_document(file, tomllib.loads(data.decode()), error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.unreadable = True
            self.mistakes.append(BadDocument(file, "", f"not TOML: {error}"))

    def _walk_document(self, file: str, raw: dict[str, Any], error: msgspec.ValidationError) -> None:
        hints = get_type_hints(DocumentTable, include_extras=True)
        before = len(self.mistakes)
        kept: dict[str, Any] = {}
        for section, table in raw.items():
            if section not in hints:
                self._unknown(file, section, section, hints)
            elif section in self.bad and isinstance(table, dict):
                (_, kind) = get_args(hints[section])
                kept[section] = {n: e for n, e in table.items() if self._walk(file, f"{section}.{n}", e, kind)}
                self.bad[section] |= table.keys() - kept[section].keys()
            elif section == "routes" and isinstance(table, list):
                (kind,) = get_args(hints[section])
                good = {i: e for i, e in enumerate(table) if self._walk(file, f"routes[{i}]", e, kind)}
                kept[section] = list(good.values())
                self.route_numbers[file] = list(good)
            elif self._walk(file, section, table, hints[section]):
                kept[section] = table
        try:
            self.documents[file] = msgspec.convert(kept, DocumentTable)
        except msgspec.ValidationError as other:
            error = other  # a mistake that the walk does not report
        else:
            if len(self.mistakes) > before:
                return
        self.mistakes.append(BadDocument(file, "", str(error)))
        self.unreadable = True

    def _bad_line(self, file: str, line: bytes, error: Exception) -> None:
        before = len(self.mistakes)
        try:
            raw = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as wrong:
            self.mistakes.append(BadDocument(file, "", f"not JSON: {wrong}"))
            return
        name = raw.get("name") if isinstance(raw, dict) else None
        self._walk(file, f"tenants.{name}" if isinstance(name, str) else "tenants", raw, TenantLine)
        if len(self.mistakes) == before:
            self.mistakes.append(BadDocument(file, "", str(error)))

    def _walk(self, file: str, path: str, raw: Any, kind: Any) -> bool:
        """Return whether `raw` is a `kind`; if not, add every reason to the mistakes."""
        before = len(self.mistakes)
        if get_origin(kind) in (Union, UnionType):
            choices = [choice for choice in get_args(kind) if choice is not NoneType]
            tables = [choice for choice in choices if isinstance(choice, type) and issubclass(choice, msgspec.Struct)]
            kind = tables[0] if tables and isinstance(raw, dict) else choices[0]
        if get_origin(kind) is dict and isinstance(raw, dict):
            for name, value in raw.items():
                self._walk(file, f"{path}.{name}", value, get_args(kind)[1])
        elif get_origin(kind) is list and isinstance(raw, list):
            for number, value in enumerate(raw):
                self._walk(file, f"{path}[{number}]", value, get_args(kind)[0])
        elif isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(raw, dict):
            types, fields = get_type_hints(kind, include_extras=True), msgspec.structs.fields(kind)
            hints = {field.encode_name: types[field.name] for field in fields}
            for name, value in raw.items():
                if name in hints:
                    self._walk(file, f"{path}.{name}", value, hints[name])
                else:
                    self._unknown(file, f"{path}.{name}", name, hints)
            for field in fields:
                if field.required and field.encode_name not in raw:
                    self.mistakes.append(BadDocument(file, path, f"{field.encode_name} is missing"))
        else:
            try:
                msgspec.convert(raw, kind)
            except msgspec.ValidationError as error:
                self.mistakes.append(BadDocument(file, path, _with_range(str(error).partition(" - at `$")[0], kind)))
        return len(self.mistakes) == before

    def _unknown(self, file: str, path: str, name: str, hints: Mapping[str, object]) -> None:
        self.mistakes.append(BadDocument(file, path, f"there is no field {name!r} here{nearest(name, hints)}"))
