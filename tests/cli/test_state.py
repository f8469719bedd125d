import os
import subprocess
import sys
from pathlib import Path

import pytest

from oriel_cli import state
from oriel_cli.errors import CommandFailed


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def instance(admin_port: int, pid: int | None = None) -> state.Instance:
    return state.Instance(
        pid=os.getpid() if pid is None else pid,
        admin_port=admin_port,
        gateway="127.0.0.1:1",
        traces="http://127.0.0.1:2",
        demo=True,
    )


def test_the_only_running_instance_is_picked_and_forgotten() -> None:
    state.remember(instance(9000))
    assert state.pick(None) == instance(9000) == state.pick(9000)
    state.forget(9000)
    with pytest.raises(CommandFailed, match="no 'oriel up' runs here"):
        state.pick(None)


def test_of_several_the_one_on_the_default_port_is_picked_else_a_port_is_asked_for() -> None:
    state.remember(instance(9000))
    state.remember(instance(9001))
    with pytest.raises(CommandFailed, match="--admin-port with one of 9000, 9001"):
        state.pick(None)
    state.remember(instance(8082))
    assert state.pick(None).admin_port == 8082


def test_an_instance_that_was_killed_does_not_count(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as gone:
        gone.wait()
    state.remember(instance(9000, gone.pid))
    with pytest.raises(CommandFailed, match="admin port 9000"):
        state.pick(9000)
    assert list(folder.iterdir()) == []


def test_a_damaged_file_is_passed_over(folder: Path) -> None:
    state.remember(instance(9000))
    (folder / "running-9001.json").write_text("{")
    (folder / "running-9002.json").write_text('{"pid": 1}')
    assert state.pick(None).admin_port == 9000


def test_the_folder_is_for_its_owner_only(folder: Path) -> None:
    assert state.state_folder() == folder and folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ORIEL_STATE", str(tmp_path / "file" / "below"))
    with pytest.raises(CommandFailed, match="set ORIEL_STATE"):
        state.state_folder()
