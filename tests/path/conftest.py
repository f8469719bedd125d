"""One real stack that is shared by all tests that do not change it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from stacks import Stack, started


@pytest.fixture(scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("oriel")


@pytest.fixture(scope="package")
def stack(state_folder: Path) -> Iterator[Stack]:
    """The stack that all tests of this folder share; they leave it as it was."""
    with started(state_folder / "shared") as running:
        yield running


@pytest.fixture(scope="package")
def client(stack: Stack) -> Iterator[httpx.Client]:
    """An HTTP client of the gateway, without a key."""
    with httpx.Client(base_url=stack.base, timeout=30, trust_env=False) as session:
        yield session
