"""The first file that a fork server's interpreter runs, by its path: `python bootstrap.py <settings>`.

The interpreter may belong to another virtual environment, without Oriel and its dependencies. So exactly our own
packages are made importable, each from its folder, and nothing beside them: a handler imports what its own environment
has. Two packages that ours need are added for an interpreter of the same build that lacks them; its own, of
whatever version, come first. This file must stay valid for old interpreters, which are refused here.
"""

import importlib.util
import json
import os
import socket
import struct
import sys
import sysconfig
from typing import Any

OLDEST = (3, 11)
# The records on the fork server's control socket: a kind; a token, pid or length; a pid or wait status. BROKEN is
# followed by `length` bytes of text, the reason why workers can never be started, and is the last one.
RECORD = struct.Struct("!BIi")
SPAWN, STARTED, EXITED, BROKEN = 1, 2, 3, 4


class Packages:
    """An import finder that knows a few packages by their folders."""

    def __init__(self, folders: "dict[str, str]") -> None:
        self.folders = folders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        folder = self.folders.get(name)
        if folder is None:
            return None
        start = os.path.join(folder, "__init__.py")
        return importlib.util.spec_from_file_location(name, start, submodule_search_locations=[folder])


def build() -> str:
    """Name the interpreter's build: interpreters of one build load the same compiled packages."""
    return str(sys.implementation.cache_tag) + "-" + sysconfig.get_platform()


def main(settings: "dict[str, Any]") -> str:
    """Run the fork server. Returns only if workers cannot be started here, with the reason."""
    if sys.version_info < OLDEST:
        need = ".".join(map(str, OLDEST))
        have = ".".join(map(str, sys.version_info[:2]))
        return f"its interpreter is Python {have}: workers need {need} or newer"
    sys.meta_path.insert(0, Packages(settings["packages"]))
    if settings["build"] == build():
        sys.meta_path.append(Packages(settings["lent"]))
    try:
        from oriel_logic.workers import forkserver
    except ModuleNotFoundError as error:
        return f"its interpreter lacks the package '{error.name}': install it there"
    forkserver.main(settings)
    return ""


def tell(settings: "dict[str, Any]", problem: str) -> None:
    """Report a problem to the logic process."""
    text = problem.encode()
    socket.socket(fileno=settings["control_fd"]).sendall(RECORD.pack(BROKEN, len(text), 0) + text)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    failure = main(given)
    if failure:
        tell(given, failure)
        sys.stderr.write("oriel logic: a fork server cannot start: " + failure + "\n")
        sys.exit(3)
