"""Measures weight and shape of the sources: code lines per unit, and what makes code hard to read."""

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

UNITS = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools", "benchmarks", "tests")
PRODUCT = UNITS[:7]
LONG_LINES = 80  # code lines of a function
WIDE, MANY = 6, 8  # parameters of a function
PLACES = 5  # of a tuple that is unpacked
IGNORED = 2  # of them that nobody reads
HEADLESS = re.compile(r"^(What|Who|Whom|So many|So much|Whether|Of|Where|Which)\b(?!.*\?)")
PARAMETER = re.compile(r"^\s*([a-z_][a-z0-9_]*): (of|what|where|who|which|whether|so many|as|in|that)\b")
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(root: Path) -> dict[str, str]:
    """Return the text of each module by its path below `root`; generated ones are left out."""
    found = [path for unit in UNITS for path in sorted((root / unit).rglob("*.py")) if "_pb2" not in path.name]
    return {path.relative_to(root).as_posix(): path.read_text() for path in found}


def code_lines(text: str, nodes: Iterable[ast.AST]) -> set[int]:
    """Return the numbers of the lines that are neither blank nor comment nor docstring."""
    lines = {number for number, line in enumerate(text.split("\n"), 1) if line.strip() and line.lstrip()[0] != "#"}
    docstrings: list[ast.stmt] = []
    for node in nodes:
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:
            lines.update(range(node.lineno, (node.end_lineno or 0) + 1))
        if isinstance(node, _Documented) and ast.get_docstring(node, clean=False) is not None:
            docstrings.append(node.body[0])
    for each in docstrings:
        lines.difference_update(range(each.lineno, (each.end_lineno or 0) + 1))
    return lines


def faults(path: str, lines: set[int], nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield what makes a module hard to read: the kind of fault, and its place."""
    for node in nodes:
        at = f"{path}:{getattr(node, 'lineno', 1)}"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            own = given.args[:1] and given.args[0].arg in ("self", "cls")
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) - bool(own)
            if len(lines.intersection(range(node.lineno, (node.end_lineno or 0) + 1))) > LONG_LINES:
                yield "long", f"{at} {node.name}"
            if count > WIDE:
                yield "wide", f"{at} {node.name}"
            if count > MANY:
                yield "wider", f"{at} {node.name}"
        elif isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases):
            yield "protocols", f"{at} {node.name}"
        elif isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store):
            names = [each.id for each in node.elts if isinstance(each, ast.Name)]
            if len(node.elts) > PLACES or names.count("_") > IGNORED:
                yield "unpacked", at
        if isinstance(node, _Documented):
            said = ast.get_docstring(node) or ""
            headless = [line for line in said.splitlines() if PARAMETER.match(line)]
            headless += [each for each in re.split(r"(?<=[.;])\s+|\n\n", said) if HEADLESS.match(each)]
            yield from (("headless", f"{at} {line.strip()}") for line in headless)


def weigh(texts: Mapping[str, str]) -> tuple[Counter[str], dict[str, list[str]]]:
    """Return the code lines of each unit, and the places of each kind of fault in the product."""
    weight: Counter[str] = Counter()
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        nodes = list(ast.walk(ast.parse(text)))
        lines, unit = code_lines(text, nodes), path.partition("/")[0]
        weight[unit] += len(lines)
        if unit in PRODUCT:
            for kind, at in faults(path, lines, nodes):
                found.setdefault(kind, []).append(at)
    return weight, found
