"""Loads all services in a scratch process first, so that a crash or an endless import cannot take the server down.

If all of them load together, they are served together. Otherwise the handlers that lie in folders are left to
`updates`, which sets each up by itself, with limits, and reports its error; each of the others is tried here.
"""

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from oriel_logic.errors import ServiceBroken
from oriel_logic.loading.folder_config import SETUP_TIMEOUT_S
from oriel_logic.loading.listing import Listing
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import WorkerPool
from oriel_logic.workers.worker import PoolLimits

_log = logging.getLogger(__name__)


async def loadable_together(
    files: Sequence[HandlerFile], listing: Listing, scratch: ForkServer, *, max_frame_bytes: int
) -> list[HandlerFile]:
    """Return those of `files` that the server may import and set up together.

    scratch: a fork server that was launched with all of them.
    """
    problem = await try_loading(scratch, max_frame_bytes=max_frame_bytes)
    if not problem:
        return list(files)
    _log.error("services could not be set up together (%s): each is now tried alone", problem)
    able = []
    for file in files:
        if file.origin in listing.sources:
            continue
        alone = ForkServer.launch([file], sets_up_all=True, max_frame_bytes=max_frame_bytes)
        problem = await try_loading(alone, max_frame_bytes=max_frame_bytes)
        if problem:
            _log.error("services: %s is not served: %s", file.label, problem)
        else:
            able.append(file)
    return able


async def try_loading(server: ForkServer, *, max_frame_bytes: int, timeout_s: float = SETUP_TIMEOUT_S) -> str:
    """Set up everything in a worker of `server`, close it, and return why that failed, "" if it worked.

    A handler that raises is not a failure here: it is reported by name when it is loaded for serving.
    Cancelled: the server is closed too.
    """
    launch = partial(ForkServer.launch, server.files, sets_up_all=True, max_frame_bytes=max_frame_bytes)
    pool = WorkerPool(server, PoolLimits(workers=1, max_frame_bytes=max_frame_bytes), launch=launch)
    await pool.start()
    try:
        async with asyncio.timeout(timeout_s):
            await pool.wait_ready(starts_once=True)
        return ""
    except TimeoutError:
        return f"their import and setup took longer than {timeout_s:g} s"
    except ServiceBroken as error:
        return error.message
    finally:
        await pool.close()
