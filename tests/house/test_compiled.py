"""The list of what is compiled names sources, and no compiled module hides a source of the checkout.

Whether they can be compiled, and then do what they should, is `make test SUITE=compiled`.
"""

import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools")


def listed() -> list[str]:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    modules: list[str] = wheel["hooks"]["custom"]["modules"]
    return modules


def test_the_list_is_of_sources_in_order() -> None:
    modules = listed()
    assert modules and len(modules) == len(set(modules)) and all((ROOT / path).is_file() for path in modules)
    packages = [path.partition("/")[0] for path in modules]
    assert packages == sorted(packages, key=PACKAGES.index)


def test_the_checkout_is_pure_python() -> None:
    """A library beside a source is what Python imports, whatever is changed in the source."""
    found = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.name.endswith(tuple(EXTENSION_SUFFIXES))
    ]
    assert found == []
