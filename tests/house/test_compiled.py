"""What `make compiled` compiles can be compiled, and no compiled module hides a source of the checkout.

Whether the gateway then does what it should is `make test SUITE=compiled`.
"""

import subprocess
import sys
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "policies", "gateway", "logic", "inference", "cli")
GENERATE = "import sys; from mypyc.build import mypycify; mypycify(sys.argv[2:], target_dir=sys.argv[1])"


def listed() -> list[str]:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    modules: list[str] = wheel["hooks"]["custom"]["modules"]
    return modules


def test_the_list_is_of_sources_in_order() -> None:
    modules = listed()
    assert modules and len(modules) == len(set(modules)) and all((ROOT / path).is_file() for path in modules)
    packages = [path.partition("/")[0] for path in modules]
    assert packages == sorted(packages, key=PACKAGES.index)


@pytest.mark.long
def test_what_is_listed_compiles(tmp_path: Path) -> None:
    """As far as C; its compiler would find nothing that is ours."""
    command = [sys.executable, "-c", GENERATE, str(tmp_path), *listed()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.rglob("*.c"))


def test_the_checkout_is_pure_python() -> None:
    """A library beside a source is what Python imports, whatever is changed in the source."""
    found = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.name.endswith(tuple(EXTENSION_SUFFIXES))
    ]
    assert found == []
