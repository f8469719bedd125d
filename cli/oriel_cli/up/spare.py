"""A unit that has done its imports and waits: `python -m oriel_cli.up.spare UNIT [FLAGS]`.

A byte on its standard input starts the unit as `oriel UNIT FLAGS` would. If its input ends, because the supervisor is
gone, the process ends. Until then it opens no port, reads no model and runs no service.
"""

import os
import sys
from importlib import import_module

from oriel_cli.main import main as oriel


def main() -> int:
    """Wait for the start and run the unit; return its exit code."""
    import_module(f"oriel_{sys.argv[1]}.command").import_ahead()
    if not os.read(0, 1):
        return 0
    return oriel(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
