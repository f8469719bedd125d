"""Follows a page of the docs as a reader does: saves its files, runs its commands, and compares what they print."""

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..waiting import wait_until
from .processes import Process, shell

FENCE = re.compile(r"^```(python|toml|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = "oriel logic --services"
MOST_S = 60.0


class Server(Process):
    """The page's server, on a port that is free."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        words = f"exec {command} --http-port 0 --admin-port 0 --workers 1"
        super().__init__(["sh", "-c", words], folder.parent / "log", folder=folder, environ=environ)
        self.port = self.printed(r"services on http://127.0.0.1:(\d+)/")[1]


def commands(block: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, said = part.partition("\n")
        yield command, said.strip()


def follow(page: str, tmp_path: Path, *, instead: Callable[[str, Path], bool] = lambda command, folder: False) -> None:
    """Follow a page. instead: called with each command and the reader's folder; returns whether it did its work."""
    (tmp_path / "bin").mkdir()
    environ = shell(tmp_path / "bin")
    folder = tmp_path / "here"
    folder.mkdir()
    port = ""
    with contextlib.ExitStack() as running:
        for kind, block in FENCE.findall(page):
            if kind != "console":
                name, _, text = block.removeprefix("# ").partition("\n")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
                continue
            for command, said in commands(block):
                if instead(command, folder):
                    continue
                if command.startswith(SERVER):
                    server = running.enter_context(Server(command, folder, environ))
                    port = server.port
                    continue
                runs = command.replace("127.0.0.1:8090", f"127.0.0.1:{port}").replace("curl ", "curl -s ", 1)
                printed = ""

                def is_said(runs: str = runs, said: str = said) -> bool:
                    nonlocal printed
                    printed = ran(runs, folder, environ)
                    return printed == said

                try:
                    wait_until(is_said, MOST_S)  # what was saved is taken over in a moment
                except TimeoutError:
                    pytest.fail(f"$ {command}\n{printed}\nis not\n{said}")
        assert server.stop() == 0, server.log.read_text()


def ran(command: str, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()
