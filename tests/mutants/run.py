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
import json
import math
import os
import pathlib
import queue
import random
import shutil
import signal
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

# Area -> the folders or files that are changed, and the tests that are asked.
AREAS = {
    "policies": (["policies/oriel_policies"], ["tests/policies"]),
    "usage": (["gateway/oriel_gateway/observe"], ["tests/gateway", "tests/policies/test_metering.py"]),
    "limits": (
        ["gateway/oriel_gateway/limits"],
        ["tests/gateway", "tests/conformance/test_limiter.py", "tests/conformance/test_ledger.py"],
    ),
    "identity": (["gateway/oriel_gateway/identity"], ["tests/gateway"]),
    "batching": (["inference/oriel_inference/batching"], ["tests/inference", "tests/policies"]),
    "openai": (["logic/oriel_logic/openai/schema.py"], ["tests/logic/openai_api"]),
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
    quiet, nodes = _quiet_lines(source), list(ast_nodes(get_ast(source)))
    found = []
    for name in OPERATORS:
        operator = get_operator(name)()
        lines = [start[0] for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [(path, name, occurrence, line) for occurrence, line in enumerate(lines) if line not in quiet]
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


def covered_by(area: str, paths: list[str], tests: list[str]) -> dict[str, dict[int, list[str]]]:
    """Run an area's tests once and return file -> line -> the tests that run it, quickest first."""
    kept = BUILD / f"{area}.json"
    if not kept.exists():
        data, times = BUILD / f"{area}.coverage", BUILD / f"{area}.xml"
        print(f"{area}: running its tests once to see which lines they reach", file=sys.stderr, flush=True)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n0",
            "--no-header",
            f"--junitxml={times}",
            "--cov-context=test",
            "--cov-report=",
        ]
        subprocess.run(
            [
                *command,
                *(
                    f"--cov={ROOT / each.removesuffix('.py')}"
                    if not each.endswith(".py")
                    else f"--cov={(ROOT / each).parent}"
                    for each in paths
                ),
                *tests,
            ],
            cwd=ROOT,
            env={**os.environ, "COVERAGE_FILE": str(data)},
            check=False,
            stdout=sys.stderr,
        )
        seconds = {}
        for one in ET.parse(times).iter("testcase"):
            file = one.get("classname", "").replace(".", "/") + ".py"
            seconds[f"{file}::{one.get('name')}"] = float(one.get("time", 0))
        found: dict[str, dict[int, list[str]]] = {}
        read = coverage.CoverageData(str(data))
        read.read()
        for file in read.measured_files():
            lines = {}
            for line, contexts in read.contexts_by_lineno(file).items():
                names = {each.rpartition("|")[0] for each in contexts if each}
                lines[line] = sorted(names, key=lambda each: seconds.get(each, 9.0))
            found[str(pathlib.Path(file).relative_to(ROOT))] = lines
        kept.write_text(json.dumps(found))
    return {
        path: {int(line): names for line, names in lines.items()}
        for path, lines in json.loads(kept.read_text()).items()
    }


def tests_of(lines: dict[int, list[str]], line: int) -> list[str]:
    """Return the tests that run a line; for one that runs at import, those of its whole file."""
    return lines.get(line) or list(dict.fromkeys(name for names in lines.values() for name in names))


def copies(count: int) -> "queue.Queue[pathlib.Path]":
    """Return `count` copies of this checkout's tracked files, in which files may be changed."""
    free: queue.Queue[pathlib.Path] = queue.Queue()
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    for n in range(count):
        tree = BUILD / f"tree-{n}"
        shutil.rmtree(tree, ignore_errors=True)
        for name in filter(None, names):
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        free.put(tree)
    return free


def survives(mutant: Mutant, tests: list[str], free: "queue.Queue[pathlib.Path]") -> bool:
    """Run the tests of a changed line in a copy; return whether all of them passed."""
    tree = free.get()
    try:
        file = tree / mutant.path
        before = file.read_text()
        file.write_text(mutant.code)
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-n0",
            "-p",
            "no:cacheprovider",
            "--no-header",
            "--hypothesis-seed=1",
            "--timeout=60",
            *tests,
        ]
        process = subprocess.Popen(
            command,
            cwd=tree,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            return process.wait(180) == 0
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
        finally:
            file.write_text(before)
    finally:
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
        reached = covered_by(area, paths, tests)
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
        asked = {
            each: tests_of(reached.get(each.path, {}), each.line)[: args.tests] or tests for each in chosen.values()
        }
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
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
