"""What all loads of these tests have in common."""

from types import SimpleNamespace

import pytest

from oriel_cli.load import generator


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is sent, however late, and no load begins with a collection of all that this test process holds."""
    monkeypatch.setattr(generator, "TOO_LATE_S", 60.0)
    monkeypatch.setattr(generator, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
