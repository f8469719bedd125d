"""Fixtures of all tests of the load generator."""

from types import SimpleNamespace

import pytest

from oriel_tools.load import generator


@pytest.fixture(autouse=True)
def on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every request however late it is, and collect no garbage before a load: this process holds a lot of it."""
    monkeypatch.setattr(generator, "TOO_LATE_S", 60.0)
    monkeypatch.setattr(generator, "gc", SimpleNamespace(collect=int, freeze=int, unfreeze=int))
