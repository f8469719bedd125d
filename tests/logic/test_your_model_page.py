"""docs/your-model.md: its first example, followed as a reader does, in the environment of the tests."""

import ast
import shutil
import sys
from pathlib import Path

import pytest

from .pages import FENCE, follow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "your-model.md").read_text()
FIRST = PAGE.partition("## XGBoost")[0]


def prepared(command: str, folder: Path) -> bool:
    """Take the environment of the tests, which has scikit-learn, for the one that the page installs."""
    if " -m venv " not in command:
        return " install " in command
    (folder / command.rpartition(" ")[2]).symlink_to(sys.prefix)
    return True


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_first_example_as_a_reader_follows_it(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    follow(FIRST, tmp_path, instead=prepared)


def test_every_handler_of_the_page_is_a_service() -> None:
    handlers = [block for kind, block in FENCE.findall(PAGE) if kind == "python" and "handler.py" in block[:40]]
    assert len(handlers) == 4
    for block in handlers:
        (made,) = [each for each in ast.parse(block).body if isinstance(each, ast.FunctionDef)]
        assert f"# services/{made.name}/handler.py" == block.splitlines()[0] and len(made.decorator_list) == 1
