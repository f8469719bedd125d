"""Models in an object store, and servers that soon ask again after an outage of the store."""

import pytest

from oriel_inference.models import control
from oriel_inference.stores import retries, source

from .control_server import times


def model(factor: float) -> bytes:
    found: bytes = times(factor).SerializeToString()
    return found


def outages_end_soon(monkeypatch: pytest.MonkeyPatch, *, outage_s: float = 0.05) -> None:
    """Servers that start from now on ask a store that failed again after `outage_s`, and poll it as often."""
    monkeypatch.setattr(source, "OUTAGE_S", outage_s)
    monkeypatch.setattr(control, "OUTAGE_POLL_S", 0.05)
    monkeypatch.setattr(retries, "PAUSE_S", 0.05)
