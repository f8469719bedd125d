"""What `oriel logic dev` makes of its argument."""

from pathlib import Path

import pytest

from oriel_logic.deploy.samples import sample_file
from oriel_logic.dev.target import find
from oriel_logic.loading.listing import read_listing
from oriel_wire.errors import StartFailed


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def sample(root: Path, name: str) -> Path | None:
    source = next(each for each in read_listing([root]).sources.values() if each.file.name == name)
    return sample_file(source, name)


def test_a_file_is_one_service_with_the_fakes_beside_it(tmp_path: Path) -> None:
    target = find(write(tmp_path, "one.py", "two.py", "fakes.py") / "one.py")
    assert [each.name for each in target.files] == ["one"] and target.fakes == (tmp_path / "fakes.py",)


def test_a_folder_with_a_handler_is_one_service_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "ranker", "handler.py", "prep.py", "fakes.py", "sample.json")
    monkeypatch.chdir(folder)
    for path in (folder, Path("."), Path("handler.py")):
        target = find(path)
        (file,) = target.files
        assert file.name == "ranker" and target.root == folder and target.fakes == (folder / "fakes.py",)
        assert sample(target.root, "ranker") == folder / "sample.json"
    (folder / "pyproject.toml").write_text('[tool.oriel]\nsample = "other.png"\n')
    write(folder, "other.png")
    assert sample(folder, "ranker") == folder / "other.png"


def test_another_folder_is_a_folder_of_services(tmp_path: Path) -> None:
    target = find(write(tmp_path, "one.py", "one.sample.json", "sample.json", "ranker/handler.py", "ranker/fakes.py"))
    assert [each.name for each in target.files] == ["one", "ranker"]
    assert target.fakes == (tmp_path / "ranker" / "fakes.py",)
    assert sample(target.root, "one") == tmp_path / "one.sample.json"
    assert sample(target.root, "ranker") is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "oriel logic new nothing"),
        ("nothing.py", "there is no"),
        ("notes.md", "not a service: give a .py file"),
        ("empty", "there is no service in"),
    ],
)
def test_what_is_no_service_is_said_with_the_remedy(tmp_path: Path, name: str, words: str) -> None:
    write(tmp_path, "notes.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StartFailed, match=words):
        find(tmp_path / name)
