import textwrap
from pathlib import Path

import pytest

from oriel_logic.loading import folder_config
from oriel_logic.loading.folder_config import BadConfig, FolderConfig, interpreter, read_config


def config(folder: Path, text: str) -> FolderConfig:
    (folder / "pyproject.toml").write_text(textwrap.dedent(text))
    return read_config(folder)


def test_everything_may_be_left_out(tmp_path: Path) -> None:
    assert read_config(tmp_path) == FolderConfig()
    assert config(tmp_path, "[project]\nname = 'x'\n") == FolderConfig()
    assert not read_config(tmp_path).stands_alone


def test_all_of_it(tmp_path: Path) -> None:
    found = config(
        tmp_path,
        """
        [tool.oriel]
        python = ".venv"
        workers = 3
        weights = { "1" = 90, "2" = 10 }
        sample = "sample.json"
        setup_timeout_s = 2
        """,
    )
    assert found == FolderConfig(
        python=".venv", workers=3, weights={"1": 90, "2": 10}, sample="sample.json", setup_timeout_s=2.0
    )
    assert found.stands_alone


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("pyhton = '.venv'", "unknown field `pyhton`"),
        ("workers = 1000", "Expected `int` <= 256"),
        ("weights = { '1' = -1 }", "Expected `int` >= 0"),
        ("weights = { '../x' = 1 }", "matching regex"),
        ("weights = { '1' = 0 }", "one of the weights must be more than 0"),
        ("weights", "pyproject.toml is no TOML"),
    ],
)
def test_what_cannot_be_is_said_by_name(tmp_path: Path, table: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words.replace("(", r"\(")):
        config(tmp_path, f"[tool.oriel]\n{table}\n")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=f"larger than {folder_config.MAX_BYTES} bytes"):
        config(tmp_path, "#" * (folder_config.MAX_BYTES + 1))


def test_an_environment_is_its_python(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="make it with `python -m venv .venv`"):
        interpreter(tmp_path, ".venv")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("")
    with pytest.raises(BadConfig, match="cannot be executed"):
        interpreter(tmp_path, ".venv")
    python.chmod(0o755)
    assert interpreter(tmp_path, ".venv") == interpreter(tmp_path, ".venv/bin/python") == python
