"""What the services of a start do is done in processes of its own first: a file whose import or setup ends its process,
or never ends, must not do so to the server and to everything else that is in it.

If all of them together come up, they are served together. If not, those that lie in folders are left to `updates`,
which set each up by itself, with limits, and say what is wrong with which; of the others each is tried here.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from oriel_logic.errors import ServiceBroken
from oriel_logic.folder_config import SETUP_TIMEOUT_S
from oriel_logic.listing import Listing
from oriel_logic.sources import HandlerFile
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import PoolLimits, WorkerPool

__all__ = ["rehearsed", "that_come_up"]

_log = logging.getLogger(__name__)
LOOK_S = 0.05
ENDED = "their process ended while they were imported or set up"


async def that_come_up(
    files: Sequence[HandlerFile], listing: Listing, rehearsal: ForkServer, *, max_frame_bytes: int
) -> list[HandlerFile]:
    """Those of `files` that the server may import and set up together. rehearsal: launched with all of them."""
    problem = await rehearsed(rehearsal, max_frame_bytes=max_frame_bytes)
    if not problem:
        return list(files)
    _log.error("services: %s: each is set up by itself", problem)
    able = []
    for file in files:
        if file.origin in listing.sources:
            continue
        alone = ForkServer.launch([file], sets_up_all=True, max_frame_bytes=max_frame_bytes)
        problem = await rehearsed(alone, max_frame_bytes=max_frame_bytes)
        if problem:
            _log.error("services: %s is not served: %s", file.label, problem)
        else:
            able.append(file)
    return able


async def rehearsed(server: ForkServer, *, max_frame_bytes: int, timeout_s: float = SETUP_TIMEOUT_S) -> str:
    """Why not everything could be set up in a worker of `server`, which is gone afterwards; "" if it could.

    What raises is no problem here: whoever imports it next is told by name. Cancelled: the server is gone too.
    """
    pool = WorkerPool(
        server,
        PoolLimits(workers=1, max_frame_bytes=max_frame_bytes),
        launch=no_other,
        on_problems=ignored,
    )
    await pool.start()
    ready = asyncio.create_task(pool.wait_ready(), name="rehearsal of a start")
    try:
        async with asyncio.timeout(timeout_s):
            while not ready.done():
                await asyncio.wait([ready], timeout=LOOK_S)
                if pool.stillborn:
                    return ENDED
        ready.result()
        return ""
    except TimeoutError:
        return f"their import and setup took longer than {timeout_s:g} s"
    except ServiceBroken as error:
        return error.message
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await pool.close()


def no_other() -> ForkServer:
    raise OSError(ENDED)


def ignored(problems: Mapping[str, str]) -> None:
    """Said again where it counts."""
