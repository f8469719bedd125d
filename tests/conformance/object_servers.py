"""The emulators of object stores that `make test` installs in build/stores."""

from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "build" / "stores" / "bin"


def tool(name: str) -> str:
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"no {name} in build/stores: make test makes it")
    return str(path)
