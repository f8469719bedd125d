"""An inference server in a thread, for tests that have no event loop, or one each."""

import asyncio
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import uvloop

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink


@contextmanager
def unit_in_thread(settings: Settings) -> Iterator[Unit]:
    """Serve in a thread until the context is left."""
    opened: Future[tuple[Unit, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        stop = asyncio.Event()
        async with open_unit(settings, sink=ListSink()) as running:
            opened.set_result((running, asyncio.get_running_loop(), stop))
            await stop.wait()

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(serve())
        except BaseException as failure:
            if opened.done():
                raise
            opened.set_exception(failure)

    # A server filters the handlers of its start, and pytest has one for all tests.
    root = logging.getLogger()
    handlers, root.handlers = root.handlers, []
    thread = threading.Thread(target=run, name="kept unit")
    thread.start()
    try:
        unit, loop, stop = opened.result()
    finally:
        root.handlers = handlers
    try:
        yield unit
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
