"""The files of the Terraform modules, parsed."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import hcl2

VERSIONS = {
    "aws": ("hashicorp/aws", ">= 6.9, < 7"),
    "google": ("hashicorp/google", ">= 6.50, < 7"),
    "azurerm": ("hashicorp/azurerm", ">= 4.55, < 5"),
    "kubernetes": ("hashicorp/kubernetes", ">= 2.38, < 3"),
    "helm": ("hashicorp/helm", "~> 3.1"),
}


class Module:
    """The blocks of a folder's files; names and strings are without the quotes that the parser keeps.

    The files are parsed when they are first asked for, which takes up to a second.
    """

    def __init__(self, folder: Path, files: str = "*.tf") -> None:
        self._paths = sorted(folder.glob(files))

    @cached_property
    def files(self) -> dict[str, Any]:
        """Return name of the file -> its document."""
        return {file.name: _plain(hcl2.loads(file.read_text())) for file in self._paths}

    def blocks(self, kind: str) -> dict[str, Any]:
        """Return name -> body for the kinds variable, output and module; "type.name" -> body for resource and data."""
        found: dict[str, Any] = {}
        for document in self.files.values():
            for block in document.get(kind, []):
                for name, body in block.items():
                    if kind in ("resource", "data"):
                        found |= {f"{name}.{inner}": each for inner, each in body.items()}
                    else:
                        found[name] = body
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items() if not str(key).startswith("__")}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value[1:-1] if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] == '"' else value


@dataclass(frozen=True, slots=True)
class Type:
    """The type of a variable, or of what is below one.

    kind: string, number, bool, any, list, map or object. of: type of each element of a list or map. members: of an
    object. optional: whether null stands for `default`, which is None for no value.
    """

    kind: str
    of: "Type | None" = None
    members: Mapping[str, "Type"] = field(default_factory=dict)
    optional: bool = False
    default: Any = None


def type_of(expression: str) -> Type:
    """Parse what `Module.blocks("variable")[NAME]["type"]` holds."""
    kind, _, inner = expression.removeprefix("${").removesuffix("}" if expression[:2] == "${" else "").partition("(")
    inner = inner.removesuffix(")")
    if kind == "optional":
        of, *default = split(inner)
        return replace(type_of(of.strip()), optional=True, default=json.loads(default[0]) if default else None)
    if kind == "object":
        members = (member.partition("=") for member in split(inner[1:-1]))
        return Type(kind, members={name.strip().strip('"'): type_of(each.strip()) for name, _, each in members})
    return Type(kind, of=type_of(inner) if inner else None)


def split(text: str) -> list[str]:
    """At the commas and line ends outside all brackets."""
    parts, depth, start = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character in ",\n":
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]
