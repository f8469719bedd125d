"""`oriel logic new`: what it writes is good Python, whatever the name, and it never writes over anything."""

import ast
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from oriel_logic.dev.new import WHAT, make
from oriel_wire.errors import StartFailed


@pytest.mark.parametrize("name", ["sentiment", "my-service.v2", "2nd", "class", "print", "models", "WORDS", "service"])
def test_whatever_the_name_the_files_are_whole(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    assert list(make(folder).values()) == list(WHAT.values())
    assert len(list(folder.iterdir())) == len(WHAT)
    handler = ast.parse((folder / "handler.py").read_text())
    (function,) = (each.name for each in handler.body if isinstance(each, ast.AsyncFunctionDef))
    assert function.isidentifier() and "client.post(" in (folder / f"test_{function}.py").read_text()
    json.loads((folder / "sample.json").read_text())
    assert tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"] == name


def test_a_linter_has_nothing_to_say(tmp_path: Path) -> None:
    make(tmp_path / "sentiment")
    options = ["--isolated", "--no-cache", "--line-length", "88"]
    for command in (["check", "--select", "E,F,W,I,UP,B,C4,PERF"], ["format", "--check"]):
        words = [sys.executable, "-m", "ruff", *command, *options, "."]
        done = subprocess.run(words, cwd=tmp_path / "sentiment", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [("a b", "not a service name"), ("..", "not a service name"), ("taken", "exists"), ("none/here", "cannot be made")],
)
def test_what_cannot_be_made_is_said_and_nothing_is_left(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(StartFailed, match=words):
        make(tmp_path / name)
    assert [each.name for each in tmp_path.rglob("*")] == ["taken"]
