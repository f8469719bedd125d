"""What the tests of Terraform run on: the tree, the binary, and workspaces that are set up once."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .harness import Workspace, default_tree


@pytest.fixture(scope="session")
def tree() -> Path:
    """terraform/ of this checkout, or the copy that ORIEL_TERRAFORM_TREE names."""
    return default_tree()


@pytest.fixture(scope="session")
def terraform() -> str:
    found = shutil.which("terraform")
    if found is None:
        pytest.skip("terraform is not on PATH")
    return found


@pytest.fixture
def workspace(terraform: str, tree: Path, tmp_path: Path) -> Iterator[Callable[..., Workspace]]:
    """workspace("aws", edit=..., rules=...): one of its own, initialised."""
    opened: list[Workspace] = []

    def open_one(root: str | Path, **options: Any) -> Workspace:
        one = Workspace(root, tmp_path / f"workspace-{len(opened)}", tree=tree, **options)
        opened.append(one)
        one.init()
        return one

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture(scope="session")
def shared(
    terraform: str, tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str | Path], Workspace]]:
    """shared("aws"): one per root and edit for all tests of the process. For plans only: nothing may be applied."""
    opened: dict[str, Workspace] = {}

    def open_one(root: str | Path, edit: Callable[[Path], None] | None = None) -> Workspace:
        name = f"{root} {edit}"
        if name not in opened:
            opened[name] = Workspace(root, tmp_path_factory.mktemp("shared"), tree=tree, edit=edit)
            opened[name].init()
        return opened[name]

    yield open_one
    for one in opened.values():
        one.close()
