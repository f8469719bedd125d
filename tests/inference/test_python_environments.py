"""Python models that bring an environment of their own."""

import io
import os
import random
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest

from oriel_inference.backends.python import environments
from oriel_inference.backends.python.environments import Environments
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.repository.python_model import check_python
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

from .python_calls import BEHAVE, put, say, served, starting

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def environment(folder: Path) -> Path:
    """Make an environment: a package that only it has, and its own copy of one that the server has too."""
    packages = folder / f"lib/python{VERSION}/site-packages"
    packages.mkdir(parents=True)
    (packages / "only_there.py").write_text("NUMBER = 41\n")
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {os.path.dirname(os.path.realpath(sys.executable))}\n")
    (folder / "bin/python").symlink_to(os.path.realpath(sys.executable))
    return folder


def configured(path: object, config: str = BEHAVE) -> str:
    return config + f' parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'


def parsed(path: object) -> pb.ModelConfig:
    return parse_config_text('name: "m" ' + configured(path))


async def test_a_model_runs_in_the_environment_of_its_folder(tmp_path: Path) -> None:
    text = "[__import__('only_there').NUMBER, __import__('sys').prefix, __import__('shutil').which('python')]"
    folder = put(tmp_path / "models", "own", "loader", configured("$$TRITON_MODEL_DIRECTORY/env", starting(text)))
    put(tmp_path / "models", "plain", "loader", BEHAVE)
    root = environment(folder / "env")
    async with served(tmp_path / "models", "own", "plain") as (_, http):
        assert await say(http, "told", model="own") == repr([41, str(root), str(root / "bin/python")])
        assert await say(http, "is_model_ready('own')", model="own") == "True", "the server's packages are there, too"
        assert await say(http, "__import__('sys').prefix", model="plain") == repr(sys.prefix)


def archive(path: Path, *members: tarfile.TarInfo, content: Callable[[int], bytes] = bytes) -> Path:
    with tarfile.open(path, "w:gz") as opened:
        for member in members:
            opened.addfile(member, io.BytesIO(content(member.size)))
    return path


def member(name: str, size: int = 0, **more: object) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size, found.mode = size, 0o755
    for key, value in more.items():
        setattr(found, key, value)
    return found


GOOD = member("bin/python"), member(f"lib/python{VERSION}", type=tarfile.DIRTYPE)


def test_an_archive_is_extracted_once_until_it_changes(tmp_path: Path) -> None:
    found = Environments()
    packed = archive(tmp_path / "env.tar.gz", *GOOD)
    first = found.interpreter(parsed(packed), tmp_path)
    assert found.interpreter(parsed("$$TRITON_MODEL_DIRECTORY/env.tar.gz"), tmp_path) == first
    os.utime(packed, ns=(1, 1))
    second = found.interpreter(parsed(packed), tmp_path)
    assert second != first and os.access(second, os.X_OK) and os.access(first, os.X_OK)
    with patch.object(environments, "MAX_ARCHIVES", 2), pytest.raises(LoadFailed, match="restart the server"):
        found.interpreter(parsed(archive(tmp_path / "more.tar.gz", *GOOD)), tmp_path)
    found.close()
    assert not os.path.exists(first)


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member("../outside", 3)], "it cannot be extracted"),
        ([member("link", type=tarfile.SYMTYPE, linkname="/etc")], "it cannot be extracted"),
        ([member("device", type=tarfile.CHRTYPE)], "it cannot be extracted"),
        ([member("hard", type=tarfile.LNKTYPE, linkname="nowhere")], "it cannot be extracted"),
        ([member("large", 40)], "takes more than"),
        ([member(str(number)) for number in range(5)], "takes more than"),
        ([member("bin/python"), member("lib/python2.7", type=tarfile.DIRTYPE)], f"lib/python{VERSION}"),
    ],
)
def test_archives_that_could_do_harm_are_refused(
    tmp_path: Path, members: list[tarfile.TarInfo], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "MAX_BYTES", 30)
    monkeypatch.setattr(environments, "MAX_MEMBERS", 4)
    found = Environments()
    with pytest.raises(LoadFailed, match=reason):
        found.interpreter(parsed(archive(tmp_path / "env.tar.gz", *members)), tmp_path)
    assert not (tmp_path.parent / "outside").exists()
    found.close()


@pytest.mark.parametrize("at", [100, -2000, -6])
def test_nothing_of_a_damaged_archive_stays(tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    packed = archive(tmp_path / "env.tar.gz", *GOOD, member("lib/large", 9999), content=random.Random(1).randbytes)
    data = bytearray(packed.read_bytes())
    data[at] ^= 1
    packed.write_bytes(data)
    with pytest.raises(LoadFailed, match="it cannot be extracted"):
        Environments().interpreter(parsed(packed), tmp_path)
    (folder,) = tmp_path.glob("oriel-python-*")
    assert not list(folder.iterdir())


def test_paths_that_name_no_environment_are_refused(tmp_path: Path) -> None:
    found = Environments()
    (tmp_path / "text").write_text("no archive")
    for path, reason in {
        "env": "must be absolute",
        tmp_path / "none": "bin/python",
        tmp_path / "text": "extracted",
    }.items():
        with pytest.raises(LoadFailed, match=reason):
            found.interpreter(parsed(path), tmp_path)
    assert found.interpreter(pb.ModelConfig(), tmp_path) == ""
    found.close()


def test_a_request_chooses_no_environment(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    check_python(parsed("/env"), store, "m/config.pbtxt", sent=False)
    with pytest.raises(ConfigInvalid, match="a request cannot choose what runs here"):
        check_python(parsed("/env"), store, "m/config.pbtxt", sent=True)
