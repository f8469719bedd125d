"""Change one operator, number or truth value at a time, and see whether a test notices.

    make test SUITE=mutants ARGS="--area usage --sample 60 --seed 1"

Cosmic Ray makes the changes in copies of this checkout in build/mutants. The tests that run a changed line, found by
coverage contexts, are run against it, quickest first. A change that no test notices survives: either a test is missing,
or the change means the same. Changes of the second kind are listed in `equal.txt` beside this file, with the reason.

Prints one line for each survivor, and each area's kill rate with its 95 % interval. Exits 1 if an area kills less than
90 % of the changes that are not equal. It is not part of `.ci/run`: an area takes minutes to hours.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import difflib
import hashlib
import json
import math
import os
import pathlib
import queue
import random
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "mutants"
EQUAL = pathlib.Path(__file__).with_name("equal.txt")
LEAST_RATE = 0.9
IMPORT = 0  # stands for the lines of a file that run when it is imported
UNITS = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")
FORKS = pathlib.Path(__file__).with_name("forks.py")

Reached = dict[str, dict[int, list[str]]]
Timed = tuple[float, str]  # seconds, test


def _gateway(*names: str) -> list[str]:
    return [f"tests/gateway/test_{name}.py" for name in names]


def _inference(*names: str) -> list[str]:
    return [f"tests/inference/test_{name}.py" for name in names]


# Area -> the folders or files that are changed, and the tests that are asked.
AREAS = {
    "policies": (["policies/oriel_policies"], ["tests/policies"]),
    "usage": (
        ["gateway/oriel_gateway/observe"],
        [
            *_gateway("usage", "objectives", "top_names", "tenant_budgets", "charged_once", "token_limits", "tracing"),
            *_gateway("console", "explain", "pages", "causes", "attempt_spans", "observe_turns"),
            "tests/conformance/test_shared_use.py",
        ],
    ),
    "limits": (
        ["gateway/oriel_gateway/limits"],
        [
            *_gateway("limits", "leased", "charged_once", "limited_calls", "limiter_settings", "quota_file"),
            *_gateway("stream_limits", "token_limits", "tenant_budgets", "shared_demand", "limit_turns", "limit_texts"),
            *(f"tests/conformance/test_{name}.py" for name in ("limiter", "ledger", "ledger_client", "ledger_pace")),
        ],
    ),
    "identity": (
        ["gateway/oriel_gateway/identity"],
        _gateway(
            "tokens",
            "key_sets",
            "credentials",
            "tickets",
            "tenant_buckets",
            "other_requests",
            "openai_paths",
            "named_models",
            "stored_state",
        ),
    ),
    "batching": (
        ["inference/oriel_inference/batching"],
        [
            *_inference("batcher", "scheduling", "statistics", "cores", "failed_callers", "usage", "stream", "workers"),
            *_inference(
                "overload",
                "request_batches",
                "queue_policies",
                "wait_estimate",
                "instances_by_demand",
                "batching_turns",
            ),
        ],
    ),
    "openai": (
        ["logic/oriel_logic/openai/schema.py"],
        [f"tests/logic/openai_api/test_{name}.py" for name in ("schema", "rules", "bodies")],
    ),
}

_COMPARED = {
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
}
_COMPUTED = {"Add": "Sub", "Sub": "Add", "Mul": "Div", "Div": "Mul", "FloorDiv": "Mul"}
OPERATORS = [
    *(f"core/ReplaceComparisonOperator_{old}_{new}" for old, found in _COMPARED.items() for new in found),
    "core/ReplaceComparisonOperator_Is_IsNot",
    "core/ReplaceComparisonOperator_IsNot_Is",
    *(f"core/ReplaceBinaryOperator_{old}_{new}" for old, new in _COMPUTED.items()),
    "core/AddNot",
    "core/ReplaceTrueWithFalse",
    "core/ReplaceFalseWithTrue",
    "core/ReplaceAndWithOr",
    "core/ReplaceOrWithAnd",
    "core/ReplaceBreakWithContinue",
    "core/ReplaceContinueWithBreak",
    "core/NumberReplacer",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One changed line of one file."""

    path: str
    line: int
    operator: str
    code: str
    difference: str

    def key(self) -> str:
        """Return what `equal.txt` names it by: the file, the line as it was and the line as it is."""
        return f"{self.path}: {self.difference}"


def places_of(path: str) -> list[tuple[str, str, int, int]]:
    """Return every place of a file that an operator can change: (path, operator, occurrence, line)."""
    source = (ROOT / path).read_text()
    kept = BUILD / "places" / f"{hashlib.sha256(source.encode()).hexdigest()}.json"
    if kept.exists():
        return [(path, name, occurrence, line) for name, occurrence, line in json.loads(kept.read_text())]
    quiet, nodes = _quiet_lines(source), list(ast_nodes(get_ast(source)))
    found = []
    for name in OPERATORS:
        operator = get_operator(name)()
        lines = [start[0] for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [(path, name, occurrence, line) for occurrence, line in enumerate(lines) if line not in quiet]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([place[1:] for place in found]))
    return found


def changed(place: tuple[str, str, int, int]) -> Mutant | None:
    """Return the file with this place changed; None where the operator leaves it as it is."""
    path, name, occurrence, line = place
    source = (ROOT / path).read_text()
    code = mutate_code(source, get_operator(name)(), occurrence)
    if code is None or ast.dump(_arguments_free(code)) == ast.dump(_arguments_free(source)):
        return None
    return Mutant(path=path, line=line, operator=name.split("/")[1], code=code, difference=_difference(source, code))


def _arguments_free(source: str) -> ast.Module:
    """Return a tree without the kinds of parameters: Cosmic Ray takes a star among them for a product."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            node.args, node.posonlyargs, node.kwonlyargs = [*node.posonlyargs, *node.args, *node.kwonlyargs], [], []
    return tree


def _quiet_lines(source: str) -> set[int]:
    """Return the lines on which nothing but annotations, imports and assertions of types stands."""
    quiet = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.AnnAssign) and node.value is None):
            quiet.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            quiet.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return quiet


def _difference(before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[3:]
    old = " ".join(each[1:].strip() for each in lines if each.startswith("-"))
    new = " ".join(each[1:].strip() for each in lines if each.startswith("+"))
    return f"{old}  ->  {new}"


def covered_by(area: str, paths: list[str], tests: list[str], tree: pathlib.Path, jobs: int) -> Reached:
    """Run an area's tests unchanged and return file -> line -> the tests that run it, quickest first.

    They run in the copy in which the changes are tried, so that a test that fails there by itself cannot kill changes.
    Only the test files that changed since the last time run again, as long as the code under test is the same.

    Raises SystemExit if a test fails.
    """
    kept = BUILD / f"{area}.json"
    files = sorted({each for path in tests for each in _python(tree / path)})
    modules = [each for each in files if each.name.startswith("test_")]
    sources = [each for unit in UNITS for each in _python(tree / unit)]
    support = [each for each in _python(tree / "tests") if not each.name.startswith("test_")]
    state = json.loads(kept.read_text()) if kept.exists() else {}
    if state.get("code") != (code := _digest(sources + support)):
        state = {"code": code, "tests": {}}
    known = state["tests"]
    names = {str(each.relative_to(tree)): _digest([each]) for each in modules}
    new = [name for name, digest in names.items() if known.get(name, {}).get("digest") != digest]
    if new:
        print(
            f"{area}: running {len(new)} test files unchanged, to see which lines they reach",
            file=sys.stderr,
            flush=True,
        )
        for name, (lines, tests_of_file) in _run_unchanged(area, paths, new, tree, jobs).items():
            known[name] = {"digest": names[name], "lines": lines, "tests": tests_of_file}
        kept.write_text(json.dumps(state))
    found: dict[str, dict[int, list[Timed]]] = {}
    for name in names:
        for path, lines in known[name]["lines"].items():
            found.setdefault(path, {}).setdefault(IMPORT, []).extend(known[name]["tests"])
            for line, reached in lines.items():
                found[path].setdefault(int(line), []).extend(reached)
    return {
        path: {line: [test for _, test in sorted(reached)] for line, reached in lines.items()}
        for path, lines in found.items()
    }


def _python(path: pathlib.Path) -> list[pathlib.Path]:
    return [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))


def _digest(files: list[pathlib.Path]) -> str:
    return hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()


def _run_unchanged(
    area: str, paths: list[str], modules: list[str], tree: pathlib.Path, jobs: int
) -> dict[str, tuple[dict[str, dict[int, list[Timed]]], list[Timed]]]:
    """Return of each test file the tests that run each line of each file, and all its tests. Raises SystemExit if one
    fails.
    """
    data, times = BUILD / f"{area}.coverage", BUILD / f"{area}.xml"
    folders = sorted({each if not each.endswith(".py") else str(pathlib.Path(each).parent) for each in paths})
    command = [
        sys.executable,
        FORKS,
        f"-n{jobs if jobs > 1 else 0}",
        f"--junitxml={times}",
        "--cov-context=test",
        "--cov-report=",
        *(f"--cov={tree / each}" for each in folders),
        *modules,
    ]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "COVERAGE_FILE": str(data)}, check=False, stdout=sys.stderr
    )
    if done.returncode:
        sys.exit(f"{area}: the tests fail without any change (status {done.returncode}): fix them first")
    seconds = {}
    for one in ET.parse(times).iter("testcase"):
        file = one.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{file}::{one.get('name')}"] = float(one.get("time", 0))
    found: dict[str, dict[str, dict[int, list[Timed]]]] = {each: {} for each in modules}
    read = coverage.CoverageData(str(data))
    read.read()
    for file in read.measured_files():
        path = str(pathlib.Path(file).relative_to(tree))
        for line, contexts in read.contexts_by_lineno(file).items():
            for test in {each.rpartition("|")[0] for each in contexts if each}:
                reached = found[test.partition("::")[0]].setdefault(path, {})
                reached.setdefault(line, []).append((seconds.get(test, 9.0), test))
    return {
        each: (found[each], [(seconds[test], test) for test in seconds if test.startswith(f"{each}::")])
        for each in modules
    }


def tests_of(lines: dict[int, list[str]], line: int, most: int) -> list[str]:
    """Return the tests that run a line; for one that runs at import, all of the test files that reach its file."""
    return lines[line][:most] if line in lines else lines.get(IMPORT, [])[: 4 * most]


def copies(count: int) -> "queue.Queue[Tree]":
    """Return `count` copies of this checkout's tracked files, in which files may be changed."""
    free: queue.Queue[Tree] = queue.Queue()
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for n in range(count):
        tree = BUILD / f"tree-{os.getpid()}-{n}"
        shutil.rmtree(tree, ignore_errors=True)
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        if (BUILD.parent / "redis").is_dir():  # the server of the tests of shared limits
            (tree / "build").mkdir(exist_ok=True)
            (tree / "build" / "redis").symlink_to(BUILD.parent / "redis")
        free.put(Tree(tree))
    return free


class Tree:
    """A copy of this checkout in which files may be changed, and the process that runs tests there (forks.py)."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._forks: subprocess.Popen[str] | None = None

    def passes(self, tests: list[str], most_s: float = 180) -> bool:
        """Run tests against the files as they are now; False if one fails or the time runs out."""
        if self._forks is None:
            self._forks = subprocess.Popen(
                [sys.executable, FORKS],
                cwd=self.path,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._forks.stdin is not None and self._forks.stdout is not None
        print(json.dumps({"tests": tests, "most_s": most_s}), file=self._forks.stdin, flush=True)
        return int(self._forks.stdout.readline()) == 0

    def close(self) -> None:
        if self._forks is not None:
            self._forks.communicate()
        shutil.rmtree(self.path)


def survives(mutant: Mutant, tests: list[str], free: "queue.Queue[Tree]") -> bool:
    """Run the tests of a changed line in a copy; return whether all of them passed."""
    tree = free.get()
    file = tree.path / mutant.path
    before = file.read_text()
    try:
        file.write_text(mutant.code)
        return tree.passes(tests)
    finally:
        file.write_text(before)
        free.put(tree)


def interval(killed: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share."""
    z, share = 1.96, killed / count
    middle, spread = (
        share + z * z / (2 * count),
        z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)),
    )
    return (middle - spread) / (1 + z * z / count), (middle + spread) / (1 + z * z / count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--area", action="append", choices=AREAS, help="an area; may be repeated; all of them if it is left out"
    )
    parser.add_argument("--file", action="append", help="only this file of the area")
    parser.add_argument(
        "--sample", type=int, default=0, help="number of changes to draw from each area (0: every change)"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw")
    parser.add_argument("--jobs", type=int, default=2, help="number of changes that are tried at once")
    parser.add_argument("--tests", type=int, default=60, help="most tests that are run for one change")
    args = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    equal = {line.split("  # ")[0].strip() for line in EQUAL.read_text().splitlines() if "  # " in line}
    free, low = copies(args.jobs), False
    for area in args.area or AREAS:
        paths, tests = AREAS[area]
        tree = free.get()
        reached = covered_by(area, paths, tests, tree.path, args.jobs)
        free.put(tree)
        files = [
            str(each.relative_to(ROOT))
            for path in paths
            for each in ([ROOT / path] if path.endswith(".py") else sorted((ROOT / path).rglob("*.py")))
        ]
        every = [each for file in files if not args.file or file in args.file for each in places_of(file)]
        random.Random(args.seed).shuffle(every)
        chosen: dict[str, Mutant] = {}
        for place in every:
            mutant = changed(place)
            if mutant is not None and mutant.key() not in equal:
                chosen.setdefault(mutant.key(), mutant)
            if args.sample and len(chosen) == args.sample:
                break
        asked = {each: tests_of(reached.get(each.path, {}), each.line, args.tests) or tests for each in chosen.values()}
        for tree in (free.get() for _ in range(args.jobs)):
            some = list(dict.fromkeys(test for each in asked.values() for test in each))[:20]
            if not tree.passes(some):
                sys.exit(f"{area}: in {tree.path} tests fail without any change: {' '.join(some)}")
            free.put(tree)
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            results = {pool.submit(survives, each, asked[each], free): each for each in chosen.values()}
            left = 0
            for done, one in enumerate(concurrent.futures.as_completed(results), 1):
                mutant = results[one]
                if one.result():
                    left += 1
                    print(
                        f"survives: {mutant.path}:{mutant.line} ({len(asked[mutant])} tests): {mutant.difference}",
                        flush=True,
                    )
                if done % 20 == 0:
                    print(f"{area}: {done} of {len(chosen)} changes tried, {left} survive", file=sys.stderr, flush=True)
        rate = 1 - left / max(1, len(chosen))
        least, most = interval(len(chosen) - left, max(1, len(chosen)))
        print(
            f"{area}: {len(chosen) - left} of {len(chosen)} changes killed ({rate:.1%};"
            f" 95 % interval {least:.1%} to {most:.1%}; {len(every)} places)",
            flush=True,
        )
        low |= rate < LEAST_RATE
    while not free.empty():
        free.get().close()
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
