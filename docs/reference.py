"""Writes the reference of all settings and bounds from the code: flags, fields of policy documents, constants.

`make docs` puts it into the site; nothing of it is written by hand. To read it without the site:

    .venv/bin/python docs/reference.py
"""

import ast
import dataclasses
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import oriel_gateway.settings
import oriel_inference.settings
import oriel_logic.settings
from oriel_policies.documents import schema
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.h2.limits import H2Limits
from oriel_wire.process.control import ControlLimits

ROOT = Path(__file__).resolve().parents[1]
UNITS = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")
CLASSES: dict[str, type] = {
    "HTTP/1.1, every public port": HttpLimits,
    "HTTP/2 and gRPC, every port": H2Limits,
    "Control planes": ControlLimits,
    "`oriel gateway`": oriel_gateway.settings.Settings,
    "`oriel logic`": oriel_logic.settings.Settings,
    "`oriel inference`": oriel_inference.settings.Settings,
}
UNITS_OF = {"s": " s", "ms": " ms", "us": " us"}
HEAD = """# Reference of settings and bounds

Generated from the code by `docs/reference.py`. [limits.md](limits.md) has the bounds that operators set.
"""
# Of the constants, these are bounds: the others are codes, widths and weights.
BOUND = re.compile(
    r"_?(MAX|MOST|MIN|LEAST|KEPT|LONGEST|LARGEST|SHORTEST|ENOUGH|DEEPEST|AT_ONCE|QUEUED)(_|$)"
    r"|_(S|MS|US|BYTES|CHARS|SECONDS|LIMIT|BOUND|SHARE|EVERY|COUNT|LINES|ROWS|CALLS|TRIES|ATTEMPTS)$"
)


class Constant(NamedTuple):
    """A bound that only a change of the code changes. module: its path. meaning: its comment; "" without one."""

    module: str
    name: str
    value: float
    meaning: str


def amount(name: str, value: Any) -> str:
    """Format a value with the unit that its name has."""
    if dataclasses.is_dataclass(value) or not isinstance(value, (str, int, float, type(None), tuple)):
        return ""
    if isinstance(value, int) and not isinstance(value, bool) and re.search(r"(?i)_?bytes$", name):
        bits, unit = next(
            (bits, unit) for bits, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "B")) if not value % (1 << bits)
        )
        return f"{value >> bits} {unit}"
    if isinstance(value, float | int) and not isinstance(value, bool):
        unit = "" if "_per_" in name.lower() else UNITS_OF.get(name.lower().rpartition("_")[2], "")
        return f"{value:g}{unit}" if isinstance(value, float) else f"{value}{unit}"
    return "" if value in (None, "", ()) else f"`{value}`"


def told(docstring: str | None) -> dict[str, str]:
    """Return what a docstring says of each name: `name: meaning. other, another: meaning.`"""
    text = " ".join((docstring or "").split())
    parts = re.split(r"(?:^|(?<=\. ))((?:[a-z][a-z0-9_]*, )*[a-z][a-z0-9_]*): ", text)
    return {
        name: meaning.strip()
        for names, meaning in zip(parts[1::2], parts[2::2], strict=True)
        for name in names.split(", ")
    }


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines) + "\n"


def settings(kind: type) -> list[tuple[str, ...]]:
    """Return a row for each field of a settings class: name, flags, default, meaning."""
    meanings, rows = told(kind.__doc__), []
    for field in dataclasses.fields(kind):
        flags = field.metadata.get("flags", ())
        help_text = next((each.options["help"] for each in flags if each.options.get("help", "==")[:2] != "=="), "")
        default = "" if field.default is dataclasses.MISSING else amount(field.name, field.default)
        meaning = (help_text or meanings.get(field.name, "")).replace("%(default)s", default.strip("`"))
        names = ", ".join(f"`{name}`" for each in flags for name in each.names)
        rows.append((f"`{field.name}`", names, default, meaning))
    return rows


def documents() -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yield each table of the policy documents with its fields."""
    for kind in vars(schema).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__name__.endswith("Table"):
            if fields := msgspec.structs.fields(kind):
                meanings = told(kind.__doc__)
                rows = [
                    (
                        f"`{each.encode_name}`",
                        "required" if each.required else amount(each.name, each.default),
                        meanings.get(each.name, ""),
                    )
                    for each in fields
                ]
                yield " ".join((kind.__doc__ or kind.__name__).partition(". ")[0].split()), rows


def number(node: ast.expr, known: dict[str, float]) -> float | None:
    """Return the value of an arithmetic expression of numbers and of `known` names; None for any other."""
    if any(
        not isinstance(each, (ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Constant, ast.Name, ast.Load))
        for each in ast.walk(node)
    ):
        return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}}, dict(known))
    except (NameError, TypeError):
        return None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def constants(path: Path) -> Iterator[Constant]:
    """Yield the bounds among the constants of a module."""
    text = path.read_text()
    lines, known = text.splitlines(), dict[str, float]()
    for node in ast.parse(text).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        value = number(node.value, known) if isinstance(node, ast.AnnAssign | ast.Assign) and node.value else None
        if not isinstance(target, ast.Name) or value is None:
            continue
        known[target.id] = value
        if BOUND.search(target.id):
            beside = lines[node.lineno - 1].partition("  # ")[2]
            above = lines[node.lineno - 2].strip() if node.lineno > 1 else ""
            meaning = beside or (above.removeprefix("#").strip() if above.startswith("# ") else "")
            yield Constant(str(path.relative_to(ROOT)), target.id, value, meaning)


@cache
def all_constants() -> tuple[Constant, ...]:
    """Return the bounds of all units, in the order of their modules."""
    paths = [path for unit in UNITS for path in sorted((ROOT / unit / f"oriel_{unit}").rglob("*.py"))]
    return tuple(each for path in paths if not path.name.endswith("_pb2.py") for each in constants(path))


def written() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, kind in CLASSES.items():
        parts.append(f"\n## {title}\n\n" + table(("setting", "flag", "default", "meaning"), settings(kind)))
    parts.append("\n## Policy documents\n\n[policies.md](policies.md) explains them.\n")
    for title, rows in documents():
        parts.append(f"\n**{title}**\n\n" + table(("field", "default", "meaning"), rows))
    parts.append("\n## Constants\n\nNo flag and no document sets these.\n")
    by_module: dict[str, list[Constant]] = {}
    for each in all_constants():
        by_module.setdefault(each.module, []).append(each)
    for module, found in by_module.items():
        summary = (ast.get_docstring(ast.parse((ROOT / module).read_text())) or "").partition("\n\n")[0]
        parts.append(f"\n`{module}`: {' '.join(summary.split())}\n\n")
        rows = [(f"`{each.name}`", amount(each.name, each.value), each.meaning) for each in found]
        parts.append(table(("constant", "value", "meaning"), rows))
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(written())
