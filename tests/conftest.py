"""Asynchronous tests run on what the units run on: uvloop's transports differ from asyncio's own."""

from collections.abc import Callable, Mapping
from typing import Any

import uvloop


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], uvloop.Loop]]:
    return {"uvloop": uvloop.new_event_loop}
