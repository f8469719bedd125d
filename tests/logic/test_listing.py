import os
from pathlib import Path

import pytest

from oriel_logic import service
from oriel_logic.deploy.samples import find_sample
from oriel_logic.loading import listing
from oriel_logic.loading.folder_config import BadConfig
from oriel_logic.loading.handlers import load_file
from oriel_logic.loading.listing import Source, read_listing, together
from oriel_logic.services.definition import definition_of


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def only(root: Path) -> Source:
    (source,) = read_listing([root]).sources.values()
    return source


def test_a_file_is_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "one.py", "import os\nfrom prep import x\n")
    write(tmp_path / "_unused.py")
    assert isinstance(before := read_listing([tmp_path]).stamps(), dict)
    write(tmp_path / "prep.py", "    import _deep\n")
    with_prep = read_listing([tmp_path]).stamps()
    one, prep = str(tmp_path / "one.py"), str(tmp_path / "prep.py")
    assert with_prep[one] != before[one]
    write(tmp_path / "_deep.py", "import one\n")
    with_deep = read_listing([tmp_path]).stamps()
    assert with_deep[one] != with_prep[one] and with_deep[prep] != with_prep[prep]
    write(tmp_path / "_unused.py", "changed")
    assert read_listing([tmp_path]).stamps() == with_deep


def test_a_toml_file_is_listed_with_a_sentence_until_it_is_changed_to_python(tmp_path: Path) -> None:
    toml = write(tmp_path / "shop.toml", '[[step]]\nname = "a"\nmodel = "m"\n')
    told = only(tmp_path)
    assert told.problem.startswith("TOML cannot declare a pipeline: write it in a .py file") and told.stands_alone
    (loaded,) = load_file(told.file, log=False)
    assert (loaded.name, loaded.problem) == ("shop", told.problem)
    write(tmp_path / "shop.py")
    toml.rename(tmp_path / "_shop.toml")
    assert only(tmp_path).problem == ""


@pytest.mark.parametrize("name", ["handler.py", "prep.py", "lib/deep.py", "vocab.txt", "pyproject.toml"])
def test_a_folder_is_all_that_lies_in_it(tmp_path: Path, name: str) -> None:
    write(tmp_path / "digits/handler.py")
    before = only(tmp_path).stamp
    write(tmp_path / "digits" / name, "[tool.oriel]\nworkers = 2\n" if name.endswith("toml") else "x")
    assert only(tmp_path).stamp != before


@pytest.mark.parametrize("name", [".git/config", "__pycache__/x.pyc", ".hidden", "env/pyvenv.cfg", "lib/.x"])
def test_what_no_handler_is_made_of_changes_nothing(tmp_path: Path, name: str) -> None:
    write(tmp_path / "digits/handler.py")
    write(tmp_path / "digits/lib/x.py")
    before = only(tmp_path).stamp
    write(tmp_path / "digits" / name, "x")
    assert only(tmp_path).stamp == before


def test_the_same_second_and_size_is_another_file(tmp_path: Path) -> None:
    path = write(tmp_path / "one.py", "1")
    os.utime(path, (1000, 1000))
    before = only(tmp_path).stamp
    newer = write(tmp_path / ".one", "2")
    os.utime(newer, (1000, 1000))
    newer.rename(path)
    assert only(tmp_path).stamp != before


def test_weights_are_said_once_for_all_versions_and_change_no_version(tmp_path: Path) -> None:
    for version in ("1", "2"):
        write(tmp_path / f"ranker/{version}/handler.py")
    write(tmp_path / "ranker/pyproject.toml", '[tool.oriel]\nweights = { "1" = 90, "2" = 10 }\n')
    before = read_listing([tmp_path])
    assert before.weights == {"ranker": {"1": 90, "2": 10}}
    write(tmp_path / "ranker/pyproject.toml", '[tool.oriel]\nweights = { "1" = 5, "2" = 95 }\n')
    after = read_listing([tmp_path])
    assert after.weights == {"ranker": {"1": 5, "2": 95}} and after.stamps() == before.stamps()
    write(tmp_path / "ranker/2/pyproject.toml", "[tool.oriel]\nworkers = 3\n")
    source = read_listing([tmp_path]).sources[str(tmp_path / "ranker/2/handler.py")]
    assert source.config.workers == 3 and source.config.weights == {"1": 5, "2": 95} and source.stands_alone


def test_wrong_settings_are_reported_and_fixed(tmp_path: Path) -> None:
    write(tmp_path / "digits/handler.py")
    write(tmp_path / "digits/pyproject.toml", '[tool.oriel]\npython = ".venv"\n')
    broken = only(tmp_path)
    assert "make it with `python -m venv .venv`" in broken.problem
    write(tmp_path / "digits/.venv/bin/python").chmod(0o755)
    repaired = only(tmp_path)
    assert repaired.problem == "" and repaired.stamp != broken.stamp and repaired.stands_alone
    packages = tmp_path / "digits/.venv/lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    empty = only(tmp_path).stamp
    assert empty != repaired.stamp, "what is installed is a part of it"
    write(packages / "installed.py")
    assert (installed := only(tmp_path).stamp) != empty
    write(packages / "__pycache__/installed.pyc")
    assert only(tmp_path).stamp == installed, "and what importing it leaves there is not: it was set up anew for that"


def test_the_number_of_files_is_bounded(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / f"digits/{number}.txt")
    write(tmp_path / "digits/handler.py")
    assert len(list(listing.files_in(tmp_path / "digits", most=3))) == 3


def test_a_folder_that_cannot_be_read_is_no_news(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        read_listing([tmp_path / "gone"])


KINDS = {
    "link to itself": lambda path: path.symlink_to(path.name),
    "link to nothing": lambda path: path.symlink_to("gone"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
}
WORDS = {"pipe": "special file", "folder": "folder"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["digits/handler.py", "ranker/2/handler.py", "one.py", "chain.toml"])
def test_what_is_no_regular_file_is_a_broken_handler_and_not_gone(tmp_path: Path, name: str, kind: str) -> None:
    path = write(tmp_path / name)
    before = only(tmp_path)
    path.unlink()
    KINDS[kind](path)
    broken = only(tmp_path)
    assert broken.file == before.file and broken.stamp != before.stamp
    assert f"{path.name} is a {WORDS.get(kind, 'link that leads to no file')}" in broken.problem
    assert together(read_listing([tmp_path])) == []
    (loaded,) = load_file(broken.file, log=False)
    assert loaded.problem == broken.problem


def test_a_link_to_itself_beside_a_handler_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path / "digits/handler.py")
    (tmp_path / "digits/loop").symlink_to("loop")
    assert read_listing([tmp_path]).unread == {} and only(tmp_path).problem == ""


@pytest.mark.parametrize("kind", KINDS)
def test_settings_or_a_sample_that_are_no_regular_file_are_said_and_not_opened(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "digits/handler.py")
    KINDS[kind](tmp_path / "digits/sample.json")
    source = only(tmp_path)
    with pytest.raises(BadConfig, match=r"sample\.json is not a regular file"):
        find_sample(source, definition_of(marked), limit_bytes=10)  # type: ignore[arg-type]
    KINDS[kind](tmp_path / "digits/pyproject.toml")
    assert only(tmp_path).problem == "pyproject.toml is not a regular file"


def test_a_name_that_is_no_utf8_is_said_as_it_can_be(tmp_path: Path) -> None:
    for raw in (b"b\xff.py", b"c\xff/handler.py", b"d\xff/2/handler.py"):
        write(tmp_path / os.fsdecode(raw))
    found = list(read_listing([tmp_path]).sources.values())
    assert [each.file.name for each in found] == ["b\ufffd", "c\ufffd", "d\ufffd"]
    assert [each.file.label for each in found] == ["b\ufffd.py", "c\ufffd/handler.py", "d\ufffd/2/handler.py"]
    assert all("not UTF-8: rename it" in each.problem for each in found)


@service
def marked(request: object) -> int:
    return 1


def test_services_in_a_config_map_change_when_it_is_swapped(tmp_path: Path) -> None:
    """The mount's files are links through `..data`, which is swapped for another folder; neither is a service."""
    mount = tmp_path / "services"
    for turn, who in enumerate(("a", "b")):
        write(mount / f"..{turn}" / "echo.py", "from helper import WHO\n")
        write(mount / f"..{turn}" / "helper.py", f"WHO = '{who}'\n")
    (mount / "..data").symlink_to("..0")
    for name in ("echo.py", "helper.py"):
        (mount / name).symlink_to(f"..data/{name}")
    before = read_listing([mount]).stamps()
    assert set(before) == {str(mount / "echo.py"), str(mount / "helper.py")}
    (mount / "..data_tmp").symlink_to("..1")
    os.replace(mount / "..data_tmp", mount / "..data")
    after = read_listing([mount]).stamps()
    assert all(after[each] != before[each] for each in before)
