"""Command-line flags from the metadata of a settings class: one definition of each flag, its default and its help.

A field of a `Settings` dataclass lists its flags in its metadata:

    http_port: int = setting(8080, "--http-port", type=int, help="public HTTP")

`add_flags` gives them to a parser in the order of the fields, and `values` reads the fields back from what was parsed.
A flag belongs to the field it is listed at. It sets that field, unless it names a `dest` of its own: then the unit's
command combines it with others.

The type of the field says how the text of such a flag is read and how `--help` names it: a number of seconds for
`float`, a switch for `bool`, a flag that may be repeated for `tuple`. Options of the flag itself come first.
"""

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin
from urllib.parse import SplitResult, urlsplit

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag. names: the flag's names as typed, the main one first. group: its heading in `--help`; options: keyword
    arguments of `add_argument`.
    """

    names: tuple[str, ...]
    group: str
    options: Mapping[str, Any]


class Group:
    """The flags under one heading of `--help`. heading: "" for flags without one."""

    def __init__(self, heading: str = "") -> None:
        self._heading = heading

    def flag(self, *names: str, **options: Any) -> dict[str, tuple[Flag, ...]]:
        """The metadata of a field with one flag. The flag's default is the field's unless the options name one."""
        if options.get("type") is switch:
            options.setdefault("metavar", "BOOL")
        return {"flags": (Flag(names, self._heading, options),)}

    def setting(self, initial: T, *names: str, **options: Any) -> T:
        """A field with one flag. initial: the field's default."""
        return dataclasses.field(default=initial, metadata=self.flag(*names, **options))


PLAIN = Group()
flag, setting = PLAIN.flag, PLAIN.setting


def flags(*several: Mapping[str, tuple[Flag, ...]]) -> dict[str, tuple[Flag, ...]]:
    """The metadata of a field with several flags, from that of each."""
    return {"flags": tuple(each for metadata in several for each in metadata["flags"])}


def add_flags(parser: argparse.ArgumentParser, settings: type) -> None:
    """Add the flags of a settings class, in the order of its fields."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for field in fields(settings):
        for each in field.metadata.get("flags", ()):
            if each.group not in groups:
                groups[each.group] = parser.add_argument_group(each.group)
            options = {"dest": field.name, **each.options}
            if options["dest"] == field.name and "action" not in options:
                options = {**_by_type(field.type), **options}
            if options["dest"] == field.name and options.get("action") != "append" and field.default is not MISSING:
                options.setdefault("default", field.default)
            groups[each.group].add_argument(*each.names, **options)


def values(settings: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields that flags set by themselves, as keyword arguments; a list that was not given is left out."""
    found = {}
    for field in fields(settings):
        if any(each.options.get("dest", field.name) == field.name for each in field.metadata.get("flags", ())):
            value = getattr(args, field.name)
            if isinstance(value, list):
                value = tuple(value)
            if value is not None or field.default is None:
                found[field.name] = value
    return found


def number(kind: Callable[[str], float], low: float, high: float) -> Callable[[str], Any]:
    """A converter for `type=`: a number of that kind from `low` to `high`."""

    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number") from error
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must lie between {low} and {high}")
        return value

    return convert


def split_url(text: str) -> SplitResult:
    """Return the parts of a URL, all of them empty if its host or its port cannot be one."""
    try:
        parts = urlsplit(text)
        return parts if parts.port != 0 else urlsplit("")
    except ValueError:
        return urlsplit("")


def switch(text: str) -> bool:
    """A converter for `type=`: the spellings of true and false that tritonserver takes."""
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither true nor false")
    return known[text.lower()]


def _by_type(kind: Any) -> dict[str, Any]:
    """Return the options of a flag that follow from the type of its field. None beside another type does not count."""
    if get_origin(kind) is tuple:
        return {"action": "append"}
    return _BY_TYPE.get(next(iter(get_args(kind)), kind), {})


_BY_TYPE: dict[object, dict[str, Any]] = {
    bool: {"type": switch, "metavar": "BOOL"},
    int: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "S"},
    Path: {"type": Path},
}
