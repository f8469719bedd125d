"""Runs one of the cases that an entry point offers: `python benchmarks/growth.py CASE [options]`."""

import sys
from collections.abc import Mapping
from importlib import import_module

from harness.processes import ROOT

__all__ = ["run"]


def run(doc: str | None, cases: Mapping[str, str]) -> None:
    """Run the case that the first argument names and exit with its status.

    doc: printed if no case is named. cases: name -> module with a function `main`, imported only if it is chosen. The
    other arguments are left for the case to parse.
    """
    script, *arguments = sys.argv
    if not arguments or arguments[0] not in cases:
        wanted = arguments[0] if arguments else "--help"
        print(f"{doc}\nCases: {', '.join(cases)}. `CASE --help` lists the options of one.")
        sys.exit(0 if wanted in ("-h", "--help") else 2)
    # Several cases use servers, doubles and clients of the tests.
    sys.path.append(str(ROOT))
    sys.argv = [f"{script} {arguments[0]}", *arguments[1:]]
    sys.exit(import_module(cases[arguments[0]]).main())
