"""`oriel version`: the version, and whether this is the compiled build."""

import argparse

from oriel_wire.distribution import build, installed_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add no flags: `version` has none."""


def run(args: argparse.Namespace) -> int:
    print(f"oriel {installed_version()} ({build()})")
    return 0
