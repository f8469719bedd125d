"""The programs of build/stores, which `make test` makes: object stores to test against."""

from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "build" / "stores" / "bin"


def tool(name: str) -> str:
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"no {name} in build/stores: make test makes it")
    return str(path)
