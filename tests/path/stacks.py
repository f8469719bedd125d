"""The real stack as subprocesses: `oriel up --demo` on free ports, driven only through its public surface."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
START_S = 240.0
STOP_S = 120.0
# A variable that all processes of a stack keep, also those with users' code, which forget most others.
MARK = "LC_ORIEL_TEST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One running `oriel up`; `ready` is the JSON line it printed."""

    process: subprocess.Popen[str]
    ready: dict[str, Any]
    environ: dict[str, str]

    def unit(self, name: str) -> dict[str, Any]:
        return next(unit for unit in self.ready["units"] if unit["unit"] == name)

    def address(self, unit: str, label: str) -> str:
        return str(self.unit(unit)["addresses"][label])

    @property
    def gateway(self) -> str:
        return self.address("gateway", "http")

    @property
    def base(self) -> str:
        return f"http://{self.gateway}"

    def oriel(self, *words: str, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        """Run another `oriel` command beside the stack."""
        return subprocess.run(
            command(*words), env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def processes(self) -> list[int]:
        """Return the living processes with this stack's mark in their environment, whoever their parents are."""
        mark = f"{MARK}={self.environ[MARK]}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


def command(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "oriel_cli.main", *words]


def key(tier: str) -> dict[str, str]:
    return {"authorization": f"Bearer oriel-demo-{tier}"}


def picture(digit: int) -> bytes:
    return (EXAMPLES / "digits" / f"{digit}.png").read_bytes()


@contextlib.contextmanager
def started(
    state: Path, words: Sequence[str] = (), variables: Mapping[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[Stack]:
    """Run a stack. words: further flags. variables: further environment variables. log: takes its stderr."""
    own = {"ORIEL_STATE": str(state), MARK: str(state), "PYTHONPATH": os.pathsep.join(sys.path)}
    environ = {**os.environ, **own, **(variables or {})}
    demo = command("up", "--demo", "--free-ports", "--json", *words)
    process = subprocess.Popen(demo, env=environ, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "oriel up ended before it was ready: its reason is on stderr"
            yield Stack(process=process, ready=json.loads(line), environ=environ)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            finally:
                process.kill()


@contextlib.contextmanager
def example(name: str, folder: Path, *, until: str) -> Iterator[str]:
    """Run `examples/NAME/demo.py` on free ports, as make starts it. Yield the lines up to one with `until`."""
    environ = {**os.environ, "ORIEL_STATE": str(folder / "state"), "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, str(EXAMPLES / name / "demo.py"), "--free-ports"]
    with subprocess.Popen(words, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True) as demo:
        try:
            assert demo.stdout is not None
            printed = ""
            for line in demo.stdout:
                printed += line
                if until in line:
                    break
            assert until in printed, "the demo ended before it was ready: its reason is on stderr"
            yield printed
        finally:
            demo.send_signal(signal.SIGTERM)
            demo.wait(STOP_S)
