"""The commands of the logic server in processes of their own, and a shell in which the commands of docs pages run."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import pytest

from ..waiting import wait_until

RUN = "import argparse, sys; from oriel_logic import command as c; p = argparse.ArgumentParser(); c.add_arguments(p)"
STOP_S = 120.0

linux = pytest.mark.skipif(
    sys.platform != "linux", reason="reads /proc; only there a stuck worker ends with its parent"
)


def importing() -> dict[str, str]:
    """Return an environment in which a Python process imports what this one can import."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}


def shell(folder: Path) -> dict[str, str]:
    """Return the environment of a shell that finds `oriel` and `python` of this environment; the scripts go to
    `folder`.
    """
    for name, words in {"python": "", "oriel": " -m oriel_cli.main"}.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (folder / name).chmod(0o755)
    kept = {name: value for name, value in importing().items() if not name.startswith(("PYTEST", "COV", "ORIEL"))}
    return kept | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}


class Process:
    """A running command. log: what it prints to stdout and stderr. stdout: another file for stdout, if given."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        *,
        folder: Path | None = None,
        environ: Mapping[str, str] | None = None,
        stdout: Path | None = None,
    ) -> None:
        self.log = log
        with log.open("w") as errors, (stdout or log).open("a") as output:
            self.popen = subprocess.Popen(command, cwd=folder, stdout=output, stderr=errors, env=environ or importing())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()

    def printed(self, pattern: str) -> "re.Match[str]":
        """Wait until the log contains `pattern`; returns the match."""

        def found() -> "re.Match[str] | None":
            ended = self.popen.poll() is not None  # asked first: a process that has ended prints no more
            match = re.search(pattern, self.log.read_text())
            assert match or not ended, self.log.read_text()
            return match

        match: re.Match[str] = wait_until(found)
        return match

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal and wait; returns the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(STOP_S)

    def descendants(self) -> list[int]:
        """Return the process ids of its children and of theirs. Of a logic server the fork server comes first, then the
        workers.
        """
        parents = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        found = [self.popen.pid]
        for pid in found:
            found += [each for each, parent in parents.items() if parent == pid]
        return found[1:]


class LogicServer(Process):
    """`oriel logic` on free ports. url: of its services. admin: of its health and metrics."""

    def __init__(self, folder: Path, log: Path, *more: str) -> None:
        flags = ["--services", str(folder), "--http-port", "0", "--admin-port", "0", "--workers", "2", *more]
        code = f"{RUN}; sys.exit(c.run(p.parse_args(sys.argv[1:])))"
        super().__init__([sys.executable, "-c", code, *flags], log)
        found = self.printed(r"services on (http://\S+) \(health and metrics on (http://[^)]+)")
        self.url, self.admin = found.groups()


def is_gone(pid: int) -> bool:
    """Whether a process has ended, even if nobody has collected its exit status yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: all(map(is_gone, pids)))
