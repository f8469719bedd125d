"""`oriel version`: the version, and whether this is the compiled build."""

import argparse

from oriel_wire.distribution import build, installed_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flags: `version` has none."""


def text() -> str:
    """Return the line that names this version."""
    return f"oriel {installed_version()} ({build()})"


def run(args: argparse.Namespace) -> int:
    print(text())
    return 0
