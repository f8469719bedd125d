"""What docs/logic-pipelines.md and docs/logic-testing.md show is run: every block is a file, every test in it holds."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"```python\n# file: (\S+)\n(.*?)```", re.DOTALL)


@pytest.fixture
def imports_of_its_own(tmp_path: Path) -> Iterator[None]:
    before, path = set(sys.modules), list(sys.path)
    sys.path.insert(0, str(tmp_path))
    yield
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.usefixtures("imports_of_its_own")
@pytest.mark.parametrize(("page", "files", "tests"), [("logic-pipelines.md", 2, 3), ("logic-testing.md", 5, 8)])
def test_the_page_is_true(page: str, files: int, tests: int, tmp_path: Path) -> None:
    text = (DOCS / page).read_text()
    found = BLOCK.findall(text)
    assert len(found) == files == text.count("```python")
    for name, source in found:
        (tmp_path / name).write_text(source)
    ran = 0
    for file in sorted(tmp_path.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(f"docs_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        for name, function in list(vars(module).items()):
            if name.startswith("test_"):
                ran += 1
                assert not inspect.iscoroutinefunction(function), "pytest alone does not run it"
                function()
    assert ran == tests
