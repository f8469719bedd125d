"""Asynchronous tests run on what the units run on: uvloop's transports differ from asyncio's own."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import uvloop

from oriel_wire.engine import listener


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], uvloop.Loop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def servers_in_process_end_soon() -> Iterator[None]:
    """Hundreds of them are ended, and nobody asks them whether they are ready meanwhile; tests that do set it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "LAME_DUCK_S", 0.01)
        yield
