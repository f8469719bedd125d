"""`oriel version`."""

import argparse

from oriel_wire.distribution import installed_version

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    print(f"oriel {installed_version()}")
    return 0
