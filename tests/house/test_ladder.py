"""The import ladder of the house, read from the source: who may name whom, and where I/O and runtimes may appear."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# package -> packages of ours it may import.
LADDER = {
    "oriel_wire": (),
    "oriel_policies": (),
    "oriel_gateway": ("oriel_wire", "oriel_policies"),
    "oriel_logic": ("oriel_wire", "oriel_policies"),
    "oriel_inference": ("oriel_wire", "oriel_policies"),
    "oriel_cli": ("oriel_wire", "oriel_policies"),
    # Load, simulation and tuning of the command line. Nothing imports it: `oriel` finds it by its table of commands.
    "oriel_tools": ("oriel_wire", "oriel_policies", "oriel_cli"),
}
FOLDERS = {package: package.removeprefix("oriel_") for package in LADDER}
UNITS = ("oriel_gateway", "oriel_logic", "oriel_inference")
# package -> its rooms (folders, and files beside them) from the top down; names in one string are one room. A room may
# import only itself and rooms below it; imports inside functions and for the type checker count.
ROOMS: dict[str, tuple[str, ...]] = {
    # The limits read targets and so stand above the routing, which asks the identity what a tenant may use. The pages
    # (api_docs) read pools and error answers.
    "oriel_gateway": (
        "command",
        "workers",
        "app backup",
        "settings",
        "ingress",
        "admin",
        "simulated",
        "core",
        "api_docs",
        "shared",
        "call",
        "pools",
        "observe",
        "limits",
        "routing",
        "identity",
        "documents",
        "http_status clock overload state_file",
        "errors oriel_gateway",
    ),
    "oriel_logic": (
        "dev_command",
        "command",
        "app",
        "dev",
        "testing",
        "deploy",
        "openai",
        "server",
        "workers",
        "oriel_logic",
        "loading",
        "services",
        "bodies images",
        "client",
        "observe",
        "settings",
        "errors",
    ),
    "oriel_inference": (
        "command",
        "app assembly flags repository_check settings",
        "servers host log_settings metrics metrics_choice",
        "models",
        "artefacts",
        "dataplane",
        "repository",
        "ensembles",
        "catalog fitting simulated",
        "quality",
        "language sequences",
        "batching",
        "backends stores",
        "clock model trace_config",
        "errors oriel_inference",
    ),
    # A tuner simulates, and a simulation replays a load: never the other way round.
    "oriel_tools": ("tune", "simulate", "load", "oriel_tools"),
}
IO = (
    "aiohttp asyncio concurrent fcntl ftplib glob grpc http httpx io mmap multiprocessing os pathlib pty requests "
    "select selectors shutil signal smtplib socket socketserver ssl starlette subprocess sys tempfile threading "
    "urllib.request urllib3 uvicorn uvloop"
).split()
# module imported -> patterns of the modules that may import it.
ONLY_IN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("onnxruntime", "tensorrt", "treelite"), ("oriel_inference.backends.*",)),
    "openvino": ("oriel_inference.backends.*", "oriel_inference.language.openvino"),
    "openvino_genai": ("oriel_inference.language.openvino",),
    "redis": ("oriel_gateway.limits.redis_ledger",),
    "grpc": ("oriel_tools.load.*",),
    **dict.fromkeys(
        ("boto3", "botocore", "aiobotocore"),
        ("oriel_wire.objects.s3", "oriel_wire.objects.s3_http"),
    ),
    "obstore": ("oriel_wire.objects.obstore",),
    **dict.fromkeys(
        ("starlette", "uvicorn"),
        (
            "oriel_wire.process.control",
            "oriel_gateway.admin.app",
            "oriel_gateway.admin.workers",
            "oriel_logic.app",
            "oriel_logic.server.envelope",
            "oriel_logic.server.ingress",
            "oriel_logic.server.connection",
            "oriel_inference.servers.control",
            "oriel_cli.*",
            "oriel_tools.*",
        ),
    ),
    "onnx": ("oriel_inference.backends.tensorrt.half",),
    # Reads models of other frameworks, in a process of its own.
    **dict.fromkeys(("sklearn", "skl2onnx", "pandas"), ("oriel_cli.models.conversion",)),
    **dict.fromkeys(("pytest", "tritonclient"), ()),
}
# No I/O: decides or translates. The generator of the protobuf modules is a script, not part of the codec.
PURE = ("oriel_policies", "oriel_policies.*", "oriel_wire", "oriel_wire.*")
# Circles of imports that are there for the type checker alone, still to be cut. The list only ever gets shorter.
TYPING_CIRCLES: tuple[frozenset[str], ...] = (
    frozenset({"oriel_gateway.observe.decisions", "oriel_gateway.observe.tracing"}),
)
NOT_PURE = (
    *(f"oriel_wire.{room}" for room in ("engine", "objects", "process", "discovery")),
    *(f"oriel_wire.{room}.*" for room in ("engine", "objects", "process", "discovery")),
    *(f"oriel_wire.observe.{name}" for name in ("recall", "spans", "otel_settings", "span_metrics", "line_log")),
    *(f"oriel_wire.usage.{name}" for name in ("files", "ledger", "metrics")),
    "oriel_wire.v2.proto.generate",
)


@dataclass(frozen=True, slots=True)
class Import:
    """One import: `module` imports `name` (dotted). lazily: inside a function. typing: for the type checker only."""

    module: str
    name: str
    line: int
    lazily: bool
    typing: bool

    def names(self, package: str) -> bool:
        return self.name == package or self.name.startswith(f"{package}.")


def modules(root: Path) -> dict[str, Path]:
    """Return dotted name -> file for every module of the packages."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder / package).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path) -> Iterator[Import]:
    yield from _walk(ast.parse(path.read_text(), str(path)), module, path.name == "__init__.py", False, False)


def _walk(node: ast.AST, module: str, is_package: bool, lazily: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, lazily, typing)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            if child.level:
                parts = module.split(".")
                kept = parts[: len(parts) - child.level + is_package]
                base = ".".join([*kept, *([base] if base else [])])
            for alias in child.names:
                yield Import(module, f"{base}.{alias.name}", child.lineno, lazily, typing)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _walk(child, module, is_package, lazily, True)
        else:
            inside = lazily or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, module, is_package, inside, typing)


def fits(module: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(module, pattern) for pattern in patterns)


def breaches(root: Path) -> list[str]:
    """Return every import that breaks a rule, as `module:line imports name: why`."""
    known = modules(root)
    all_imports = [found for module, path in known.items() for found in imports(module, path)]
    said = [f"{i.module}:{i.line} imports {i.name}: {why}" for i in all_imports for why in _judge(i)]
    return said + [f"import ring: {' -> '.join(ring)}" for ring in rings(known, all_imports)]


def _judge(found: Import) -> Iterator[str]:
    package = found.module.split(".")[0]
    target = found.name.split(".")[0]
    if target == "oriel_tools" and package != target:
        yield "nothing imports the tools: `oriel` finds them by its table of commands"
    elif target in LADDER and target != package and target not in LADDER[package]:
        if package not in ("oriel_cli", "oriel_tools"):
            yield f"{package} may only name {', '.join(LADDER[package]) or 'itself'}"
        elif not found.lazily and (package, target) != ("oriel_tools", "oriel_cli"):
            yield "the command line names units lazily"
    for name, patterns in ONLY_IN.items():
        if found.names(name) and not fits(found.module, patterns):
            yield f"{name} is only for {', '.join(patterns) or 'scripts and tests'}"
    if fits(found.module, PURE) and not fits(found.module, NOT_PURE) and not found.typing:
        if any(found.names(name) for name in IO):
            yield "no I/O here"
        if found.names("oriel_wire.engine") or found.names("oriel_wire.objects"):
            yield "a codec does not name the engine or the object stores"
    if package in UNITS and found.names(f"{package}.app") and found.module != f"{package}.command":
        yield "only the command names the composition root"
    elif package in ROOMS and target == package:
        floors = {room: floor for floor, rooms in enumerate(ROOMS[package]) for room in rooms.split()}
        here, there = room_of(found.module), room_of(found.name)
        there = there if there in floors else package
        if floors[there] < floors.get(here, 0):
            yield f"{there} is above {here}"


def room_of(name: str) -> str:
    """Return the folder or file directly inside the package; the package itself for its `__init__`."""
    return name.split(".")[1 if "." in name else 0]


def rings(known: dict[str, Path], all_imports: Sequence[Import]) -> Iterator[list[str]]:
    """Return the circles of imports. Those for the type checker count: inside a unit imports have one direction."""
    loaded = list(_rings(known, [found for found in all_imports if not found.typing]))
    yield from loaded
    for ring in _rings(known, all_imports):
        if ring not in loaded and not any(circle.issuperset(ring) for circle in TYPING_CIRCLES):
            yield ring


def _rings(known: dict[str, Path], all_imports: Sequence[Import]) -> Iterator[list[str]]:
    edges: dict[str, set[str]] = {module: set() for module in known}
    for found in all_imports:
        if not found.lazily:
            target = found.name if found.name in known else found.name.rpartition(".")[0]
            if target in known and target != found.module:
                edges[found.module].add(target)
    done: set[str] = set()
    for start in sorted(known):
        yield from _ring_from(start, edges, [], done)


def _ring_from(module: str, edges: dict[str, set[str]], above: list[str], done: set[str]) -> Iterator[list[str]]:
    if module in above:
        yield [*above[above.index(module) :], module]
    elif module not in done:
        for target in sorted(edges[module]):
            yield from _ring_from(target, edges, [*above, module], done)
        done.add(module)


def test_the_house_keeps_its_ladder() -> None:
    assert len(modules(ROOT)) > 50, "the rules were looked for in the wrong place"
    assert breaches(ROOT) == []


def test_every_room_has_a_floor() -> None:
    for package, floors in ROOMS.items():
        named = [room for rooms in floors for room in rooms.split()]
        there = {room_of(name) for name in modules(ROOT) if name.split(".")[0] == package}
        assert sorted(named) == sorted(there)


def tree(root: Path, files: dict[str, str]) -> Path:
    for package, folder in FOLDERS.items():
        (root / folder / package).mkdir(parents=True)
        (root / folder / package / "__init__.py").touch()
    for module, text in files.items():
        path = root / FOLDERS[module.split(".")[0]] / Path(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("module", "text", "why"),
    [
        ("oriel_gateway.route", "from oriel_logic import pipeline", "may only name oriel_wire, oriel_policies"),
        ("oriel_gateway.route", "def f():\n    import oriel_inference.app", "may only name oriel_wire, oriel_policies"),
        ("oriel_wire.h1.request", "import oriel_policies.waiting.queue", "may only name itself"),
        ("oriel_policies.waiting.queue", "import asyncio", "no I/O here"),
        ("oriel_policies.waiting.queue", "from os import path", "no I/O here"),
        ("oriel_wire.v2.http", "def f():\n    import socket", "no I/O here"),
        ("oriel_wire.h1.request", "from urllib import request", "no I/O here"),
        ("oriel_wire.h1.request", "from oriel_wire.engine import client", "a codec does not name the engine"),
        ("oriel_wire.context", "from .engine import client", "a codec does not name the engine"),
        (
            "oriel_wire.h1.request",
            "from oriel_wire.objects import client",
            "a codec does not name the engine or the object",
        ),
        (
            "oriel_inference.stores.remote",
            "import aiobotocore.session",
            "aiobotocore is only for oriel_wire.objects",
        ),
        ("oriel_inference.batcher", "import onnxruntime as ort", "onnxruntime is only for"),
        ("oriel_gateway.limits.leased", "import redis.asyncio", "redis is only for"),
        ("oriel_gateway.ingress", "from starlette.requests import Request", "starlette is only for"),
        ("oriel_logic.observe.stages", "import uvicorn", "uvicorn is only for"),
        ("oriel_cli.up.up", "import oriel_gateway.command", "lazily"),
        ("oriel_cli.up.up", "def f():\n    import oriel_tools.load.command", "nothing imports the tools"),
        ("oriel_tools.load.command", "def f():\n    from oriel_tools.simulate import serve", "simulate is above load"),
        ("oriel_tools.simulate.serve", "from oriel_tools.tune import plan", "tune is above simulate"),
        ("oriel_gateway.admin.scaler", "import grpc.aio", "grpc is only for oriel_tools.load"),
        (
            "oriel_inference.dataplane.dataplane",
            "from oriel_inference.app import Unit",
            "only the command names the composition root",
        ),
        ("oriel_logic.server.pipeline", "import sklearn", "sklearn is only for oriel_cli.models.conversion"),
        ("oriel_logic.bodies.json", "from oriel_logic.services.context import Context", "services is above bodies"),
        ("oriel_logic.client.codec", "def f():\n    from oriel_logic import service", "oriel_logic is above client"),
        ("oriel_inference.batching.call", "from oriel_inference.servers import http", "servers is above batching"),
    ],
)
def test_a_breach_is_seen(tmp_path: Path, module: str, text: str, why: str) -> None:
    (seen,) = breaches(tree(tmp_path, {module: text}))
    assert seen.startswith(f"{module}:") and why in seen


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("oriel_gateway.route", "from oriel_policies.waiting.queue import Ticket\nfrom oriel_wire import h1"),
        ("oriel_wire.engine.client", "import asyncio, socket"),
        ("oriel_wire.h1.request", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pathlib import Path"),
        ("oriel_wire.h1.request", "from urllib.parse import unquote"),
        ("oriel_inference.backends.cpu", "import onnxruntime"),
        ("oriel_cli.main", "def f():\n    import oriel_gateway.command"),
        ("oriel_logic.command", "def run():\n    from oriel_logic.app import serve_unit"),
    ],
)
def test_what_is_allowed_is_let_through(tmp_path: Path, module: str, text: str) -> None:
    assert breaches(tree(tmp_path, {module: text})) == []


def test_an_import_for_the_type_checker_closes_a_circle(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from oriel_logic.b import x"
    (seen,) = breaches(tree(tmp_path, {"oriel_logic.a": typed, "oriel_logic.b": "from oriel_logic import a"}))
    assert seen == "import ring: oriel_logic.a -> oriel_logic.b -> oriel_logic.a"


def test_an_import_ring_is_seen_unless_one_side_is_lazy(tmp_path: Path) -> None:
    ring = {"oriel_logic.a": "from oriel_logic import b", "oriel_logic.b": "from oriel_logic.c import x"}
    (seen,) = breaches(tree(tmp_path / "1", {**ring, "oriel_logic.c": "import oriel_logic.a"}))
    assert seen == "import ring: oriel_logic.a -> oriel_logic.b -> oriel_logic.c -> oriel_logic.a"
    assert breaches(tree(tmp_path / "2", {**ring, "oriel_logic.c": "def f():\n    import oriel_logic.a"})) == []
