"""Releases and deployments: services that were set up, their processes, and the requests that use them.

A `Deployment` is what was set up together: one handler file, or all plain files at start. It owns a worker pool and the
instances on the loop. Each of its services is a `Release`. A release that another one replaces takes no new requests;
after its last request it is drained, and once all releases of a deployment are, its pool is closed.
"""

import asyncio
from collections.abc import Sequence

from oriel_logic.loading.sources import HandlerFile
from oriel_logic.server.pipeline import Pipeline
from oriel_logic.services.context import Workers
from oriel_logic.services.definition import Definition

VERSION_HEADER = "x-oriel-service-version"


class Release:
    """One service in one version, set up. Single writer: the loop.

    number: counts the releases of this service and version on this server, from 1.
    drained: set once it is retired and its last request is done.
    stamp: the header that names the version that answered. `began` and `finished` enclose every request, also one whose
        answer is streamed.
    """

    def __init__(self, definition: Definition, file: HandlerFile, deployment: "Deployment", *, number: int = 1) -> None:
        self.definition = definition
        self.file = file
        self.deployment = deployment
        self.pipeline = deployment.pipeline
        self.number = number
        self.stamp = (VERSION_HEADER, file.version)
        self.in_flight = 0
        self.is_leaving = False
        self.drained = asyncio.Event()
        deployment.releases.append(self)

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def version(self) -> str:
        return self.file.version

    def began(self) -> None:
        self.in_flight += 1

    def finished(self) -> None:
        self.in_flight -= 1
        if self.is_leaving and not self.in_flight:
            self.drained.set()

    def retire(self) -> None:
        """Retire the release: it takes no new requests."""
        self.is_leaving = True
        if not self.in_flight:
            self.drained.set()


class Deployment:
    """Services that were set up together, and their processes. files: the handler files."""

    __slots__ = ("files", "pipeline", "pool", "releases")

    def __init__(self, files: Sequence[HandlerFile], pool: Workers, pipeline: Pipeline) -> None:
        self.files = tuple(files)
        self.pool = pool
        self.pipeline = pipeline
        self.releases: list[Release] = []
