"""Makes the model calls of jobs in workers, under the deadline and in the trace of the job's request."""

import asyncio
import logging
from collections.abc import Callable

from oriel_logic.client.models import Models
from oriel_logic.errors import HandlerFailed, LogicError, Saturated
from oriel_logic.workers.frames import Frame, FrameTooLarge, Kind, Packed, pack, unpack

_log = logging.getLogger(__name__)
METHODS = ("infer", "metadata", "ready", "scan")
MAX_AT_ONCE = 64
MAX_FACTS = 64 << 10


class CallServer:
    """Answers the model calls of one job. `cancel` it when the job has ended.

    send: sends a frame to the job's worker.
    """

    def __init__(self, models: Models | None, send: Callable[[Kind, Packed], None], *, limit_bytes: int) -> None:
        self._models = models
        self._send = send
        self._limit_bytes = limit_bytes
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, frame: Frame) -> None:
        """Begin the call of a CALL frame; its result is sent back when it is there."""
        task = asyncio.create_task(self._answer(frame), name="model call of a worker")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _answer(self, frame: Frame) -> None:
        number = -1
        try:
            number, method, arguments, keywords = unpack(frame)
            if len(self._tasks) > MAX_AT_ONCE:
                raise Saturated(f"a job may have at most {MAX_AT_ONCE} model calls at the same time")
            target = getattr(self._models, method, None) if method in METHODS else None
            if target is None:
                raise HandlerFailed(f"models.{method} cannot be called here")
            packed = pack((number, await target(*arguments, **keywords), None), limit_bytes=self._limit_bytes)
        except LogicError as error:
            packed = pack((number, None, error), limit_bytes=MAX_FACTS)
        except FrameTooLarge as error:
            packed = self._sorry(number, f"the model's outputs: {error}")
        except Exception as error:  # wrong arguments, or a bug of ours: the job gets an error and goes on
            _log.error("a worker's call of a model failed", exc_info=error)
            packed = self._sorry(number, f"{type(error).__name__}: {error}")
        self._send(Kind.CALLED, packed)

    @staticmethod
    def _sorry(number: int, why: str) -> Packed:
        return pack((number, None, HandlerFailed(why)), limit_bytes=MAX_FACTS)
