"""`oriel version`."""

import argparse
from importlib import metadata

__all__ = ["add_arguments", "installed", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    print(f"oriel {installed()}")
    return 0


def installed() -> str:
    """The installed version, or "unknown" when run from a tree that was not installed."""
    try:
        return metadata.version("oriel")
    except metadata.PackageNotFoundError:
        return "unknown"
