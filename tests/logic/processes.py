"""A logic server in a process of its own."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RUN = "import argparse, sys; from oriel_logic import command as c; p = argparse.ArgumentParser(); c.add_arguments(p)"


class Process:
    """A logic server as a subprocess on free ports."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        flags = ["--services", str(folder), "--http-port", "0", "--admin-port", "0", "--workers", "2", *more]
        code = f"{RUN}; sys.exit(c.run(p.parse_args(sys.argv[1:])))"
        self.log = log
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
        with log.open("w") as output:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", code, *flags], stdout=output, stderr=output, env=os.environ | path
            )
        found = until(
            lambda: re.search(r"services on (http://\S+) \(health and metrics on (http://[^)]+)", log.read_text())
        )
        self.url = found.group(1)
        self.admin = found.group(2)

    def descendants(self) -> list[int]:
        """Pids of the fork server and its workers, with the fork server first."""
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = [self.popen.pid]
        for pid in found:
            found += [each for each, parent in parents.items() if parent == pid]
        return found[1:]


def until(check: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (found := check()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; only there a stuck worker ends with its parent"
)
