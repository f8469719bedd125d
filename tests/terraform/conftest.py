"""The tree, the terraform binary, and workspaces that are set up once for many tests."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..conftest import Run
from .harness import HERE, Workspace


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave every test that runs terraform to `make test SUITE=long` and `make test SUITE=terraform`."""
    for item in items:
        if "terraform" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="session")
def tree() -> Path:
    """The folder terraform/ of this checkout."""
    return HERE.parents[1] / "terraform"


@pytest.fixture(scope="session")
def terraform() -> str:
    found = shutil.which("terraform")
    if found is None:
        pytest.skip("terraform is not on PATH")
    return found


@pytest.fixture
def workspace(terraform: str, tree: Path, tmp_path: Path) -> Iterator[Callable[..., Workspace]]:
    """`workspace("aws", rules=...)` returns an initialised workspace of its own."""
    opened: list[Workspace] = []

    def open_one(root: str, **options: Any) -> Workspace:
        one = Workspace(root, tmp_path / f"workspace-{len(opened)}", tree=tree, **options)
        opened.append(one)
        one.init()
        return one

    yield open_one
    for one in opened:
        one.close()


class Shared:
    """`shared("aws")` returns one workspace per root for all tests of the process. Tests may plan in it, but
    not apply anything.

    once: keeps what was planned for all processes of the test run.
    """

    def __init__(self, tree: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> None:
        self._tree = tree
        self._folders = tmp_path_factory
        self._opened: dict[str, Workspace] = {}
        self.once = run.once

    def __call__(self, root: str) -> Workspace:
        if root not in self._opened:
            one = self._opened[root] = Workspace(root, self._folders.mktemp("shared"), tree=self._tree)
            one.init()
        return self._opened[root]

    def close(self) -> None:
        for one in self._opened.values():
            one.close()


@pytest.fixture(scope="session")
def shared(terraform: str, tree: Path, tmp_path_factory: pytest.TempPathFactory, run: Run) -> Iterator[Shared]:
    one = Shared(tree, tmp_path_factory, run)
    yield one
    one.close()
