"""The commands of docs/logic.md, run as a reader runs them, print what the page says."""

import contextlib
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..waiting import wait_until
from .processes import Process, shell

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "logic.md").read_text()
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LASTS = "oriel logic dev"


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the page and what is printed beneath it."""

    command: str
    said: str


def steps() -> list[Step]:
    found = []
    for block in BLOCK.findall(PAGE):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, said = part.partition("\n")
            found.append(Step(command, said))
    return found


def steady(text: str) -> str:
    """Without what differs from run to run: seconds, ports, request ids."""
    text = re.sub(r"\bin \d+\.\d+s\b", "in 0.00s", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:0", text)
    return re.sub(r'"request_id":"[^"]*"', '"request_id":"..."', text).strip()


@pytest.fixture
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return shell(tmp_path_factory.mktemp("bin"))


@contextlib.contextmanager
def lasting(command: str, said: str, folder: Path, environ: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Start a command that goes on until Ctrl-C; what it has printed once that are as many lines as the page shows."""
    out, err = folder.parent / "out", folder.parent / "err"
    with Process(["sh", "-c", f"exec {command}"], err, folder=folder, environ=environ, stdout=out) as process:

        def is_printed() -> bool:
            assert process.popen.poll() is None, out.read_text() + err.read_text()
            return out.read_text().count("\n") >= said.count("\n")

        wait_until(is_printed)
        yield out.read_text(), err
        assert process.stop(signal.SIGINT) == 0


def test_the_page_is_short_enough() -> None:
    first = BLOCK.findall(PAGE)[:2]
    assert sum(block.count("\n$ ") + block.startswith("$ ") for block in first) <= 5


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_of_the_page_print_what_it_says(tmp_path: Path, environ: dict[str, str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    with contextlib.ExitStack() as running:
        port = "8090"
        for step in steps():
            if step.command.startswith(LASTS):
                printed, err = running.enter_context(lasting(step.command, step.said, folder, environ))
                assert steady(printed) == steady(step.said), err.read_text()
                (port,) = set(re.findall(r"127\.0\.0\.1:(\d+)", printed))
                continue
            # The line that was printed: on a port that was free here.
            command = step.command.replace("127.0.0.1:8090", f"127.0.0.1:{port}").replace("curl ", "curl -s ", 1)
            done = subprocess.run(
                ["sh", "-c", command], cwd=folder, env=environ, capture_output=True, text=True, timeout=60
            )
            assert steady(done.stdout) == steady(step.said), done.stderr


def test_the_handler_on_the_page_is_the_one_that_is_made(tmp_path: Path) -> None:
    from oriel_logic.dev.new import make

    make(tmp_path / "sentiment")
    assert (tmp_path / "sentiment" / "handler.py").read_text() in PAGE
