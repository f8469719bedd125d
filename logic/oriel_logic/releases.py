"""A service as it was set up once: its definition, the processes it runs in, and who still uses it.

A `Deployment` is what was set up together: one handler file, or all plain files at start. It owns a worker pool, and
the instances on the loop. Each of its services is a `Release`. A release that another one replaces takes no new
requests; when its last request is done it is drained, and when all of a deployment's are, its pool is closed.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from oriel_logic.definition import Definition
from oriel_logic.pipeline import Pipeline
from oriel_logic.sources import HandlerFile
from oriel_logic.workers.tally import Tally

__all__ = ["VERSION_HEADER", "Deployment", "Pool", "Release"]

VERSION_HEADER = "x-oriel-service-version"


class Pool(Protocol):
    """What is needed here of `workers.pool.WorkerPool`."""

    @property
    def tally(self) -> Tally: ...
    @property
    def waiting(self) -> int: ...
    @property
    def busy(self) -> int: ...
    @property
    def pids(self) -> list[int]: ...
    async def close(self) -> None: ...


class Release:
    """One service in one version, set up. Single writer: the loop.

    number: counts what this server has set up of the service and version, from 1. stamp: the header that says which
    version answered. began/ended: around every request, also one whose answer is streamed.
    """

    __slots__ = ("_drained", "_leaving", "definition", "deployment", "file", "in_flight", "number", "pipeline", "stamp")

    def __init__(self, definition: Definition, file: HandlerFile, deployment: "Deployment", *, number: int = 1) -> None:
        self.definition = definition
        self.file = file
        self.deployment = deployment
        self.pipeline = deployment.pipeline
        self.number = number
        self.stamp = (VERSION_HEADER, file.version)
        self.in_flight = 0
        self._leaving = False
        self._drained = asyncio.Event()
        deployment.releases.append(self)

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def version(self) -> str:
        return self.file.version

    @property
    def is_leaving(self) -> bool:
        return self._leaving

    def began(self) -> None:
        self.in_flight += 1

    def ended(self) -> None:
        self.in_flight -= 1
        if self._leaving and not self.in_flight:
            self._drained.set()

    def leave(self) -> None:
        """It takes no new requests from now on."""
        self._leaving = True
        if not self.in_flight:
            self._drained.set()

    async def drained(self) -> None:
        """Returns when it has left and its last request is done."""
        await self._drained.wait()


class Deployment:
    """What was set up together, and in which processes. files: what it was made from."""

    __slots__ = ("files", "pipeline", "pool", "releases")

    def __init__(self, files: Sequence[HandlerFile], pool: Pool, pipeline: Pipeline) -> None:
        self.files = tuple(files)
        self.pool = pool
        self.pipeline = pipeline
        self.releases: list[Release] = []

    @property
    def is_idle(self) -> bool:
        """Whether all of its services have left and are drained."""
        return all(each.is_leaving and not each.in_flight for each in self.releases)
