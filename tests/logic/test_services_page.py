"""docs/logic-services.md, followed as a reader does: files are saved, commands run, and print what the page says."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oriel_logic.loading.folder_config import FolderConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "logic-services.md").read_text()
FENCE = re.compile(r"^```(python|toml|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = "oriel logic --services"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """A shell in which `oriel` and `python` are this environment's."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, words in {"python": "", "oriel": " -m oriel_cli.main"}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{words} "$@"\n')
        (tools / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "COV", "ORIEL"))}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return kept | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": path}


class Server:
    """The page's server, on a port that is free."""

    def __init__(self, command: str, folder: Path, environ: dict[str, str]) -> None:
        self.log = folder.parent / "log"
        with self.log.open("w") as output:
            words = f"exec {command} --http-port 0 --admin-port 0 --workers 1"
            self.process = subprocess.Popen(["sh", "-c", words], cwd=folder, env=environ, stderr=output)
        end = time.monotonic() + 60
        while (found := re.search(r"services on http://127.0.0.1:(\d+)/", self.log.read_text())) is None:
            assert time.monotonic() < end and self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)
        self.port = found.group(1)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(30) == 0, self.log.read_text()
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()


def commands(block: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, said = part.partition("\n")
        yield command, said.strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_page_as_a_reader_follows_it(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    server: Server | None = None
    try:
        for kind, block in FENCE.findall(PAGE):
            if kind != "console":
                name, _, text = block.removeprefix("# ").partition("\n")
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
                continue
            for command, said in commands(block):
                if command.startswith(SERVER):
                    server = Server(command, folder, environ)
                    continue
                port = server.port if server is not None else ""
                runs = command.replace("127.0.0.1:8090", f"127.0.0.1:{port}").replace("curl ", "curl -s ", 1)
                end = time.monotonic() + 10
                while (printed := ran(runs, folder, environ)) != said:  # what was saved is taken over in a moment
                    assert time.monotonic() < end, f"$ {command}\n{printed}\nis not\n{said}"
                    time.sleep(0.1)
    finally:
        if server is not None:
            server.stop()


def ran(command: str, folder: Path, environ: dict[str, str]) -> str:
    done = subprocess.run(["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()


def test_every_setting_is_on_the_page() -> None:
    table = PAGE.partition("| setting | default |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(FolderConfig.__struct_fields__)
