"""Finds every regular expression of the product's source: where it is, its pattern and how it is used."""

import ast
import importlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
UNITS = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")
ANCHORED = {"match", "fullmatch"}
_IMPORTS = re.compile(r"^\s*(import re\b|from re import)", re.MULTILINE)
_USES = ANCHORED | {"search", "findall", "finditer", "sub", "subn", "split"}


@dataclass
class Regex:
    """One pattern. where: its file and the name of its variable, or of the function around it. uses: methods called."""

    where: str
    pattern: str | bytes
    flags: int
    uses: set[str] = field(default_factory=set)

    @property
    def anchored(self) -> bool:
        """Whether it is only tried at the beginning of a text."""
        return bool(self.uses) and self.uses <= ANCHORED


def sources() -> list[Path]:
    return sorted(path for unit in UNITS for path in (ROOT / unit).glob("oriel_*/**/*.py"))


def regexes() -> list[Regex]:
    """All of them. Each file is imported, so that patterns made of names are whole."""
    found = []
    texts = {path: path.read_text() for path in sources()}
    # Only these make patterns, or import them.
    homes_of_patterns = {_module(path) for path, text in texts.items() if _IMPORTS.search(text)}
    named = re.compile("|".join(rf"from {re.escape(name)} import" for name in sorted(homes_of_patterns)))
    used_here = re.compile(rf"\.(?:{'|'.join(sorted(_USES))})\b")
    trees = {
        path: ast.parse(text)
        for path, text in texts.items()
        if _IMPORTS.search(text) or (used_here.search(text) and named.search(text))
    }
    used: dict[tuple[str, str], set[str]] = {}  # by module and name
    for path, tree in trees.items():
        homes = {
            each.asname or each.name: (node.module or "", each.name)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for each in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in _USES:
                for each in ast.walk(node.value):
                    if isinstance(each, ast.Name):
                        used.setdefault(homes.get(each.id, (_module(path), each.id)), set()).add(node.attr)
    for path, tree in trees.items():
        calls = list(_calls(tree))
        if not calls:
            continue
        file = str(path.relative_to(ROOT))
        module = importlib.import_module(_module(path))
        for around, call, own_use in calls:
            pattern, flags = _arguments(call, vars(module))
            known = own_use or used.get((_module(path), around), set())
            found.append(Regex(f"{file}:{around}", pattern, flags, set(known)))
    return found


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts[1:]).removesuffix(".__init__")


def _calls(tree: ast.Module) -> list[tuple[str, ast.Call, set[str]]]:
    """The calls of `re`, each with the name that it is found by, and its own use if it makes no pattern to keep."""
    module, functions = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            module |= {each.asname or each.name for each in node.names if each.name == "re"}
        elif isinstance(node, ast.ImportFrom) and node.module == "re":
            functions |= {each.asname or each.name: each.name for each in node.names}
    found = []

    def walk(node: ast.AST, around: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            around = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            around = target.id if isinstance(target, ast.Name) else around
        if isinstance(node, ast.Call):
            of = node.func
            name = ""
            if isinstance(of, ast.Attribute) and isinstance(of.value, ast.Name) and of.value.id in module:
                name = of.attr
            elif isinstance(of, ast.Name):
                name = functions.get(of.id, "")
            if name == "compile" or name in _USES:
                found.append((around, node, set() if name == "compile" else {name}))
        for child in ast.iter_child_nodes(node):
            walk(child, around)

    walk(tree, "")
    return found


def _arguments(call: ast.Call, names: dict[str, Any]) -> tuple[str | bytes, int]:
    """The pattern and the flags of a call; names that only a function knows are taken for the text `x`."""
    local = {node.id: "x" for node in ast.walk(call.args[0]) if isinstance(node, ast.Name) and node.id not in names}
    if any(isinstance(node, ast.Constant) and isinstance(node.value, bytes) for node in ast.walk(call.args[0])):
        local = dict.fromkeys(local, b"x")
    flags = [node for each in (*call.args[1:], *(word.value for word in call.keywords)) for node in ast.walk(each)]
    names_of_flags = [node.attr for node in flags if isinstance(node, ast.Attribute) and hasattr(re, node.attr)]
    pattern = eval(compile(ast.Expression(call.args[0]), "pattern", "eval"), {**names, **local})
    return pattern, sum({int(getattr(re, each)) for each in names_of_flags if each.isupper()})
