"""A server with one model of the fake backend, whose long batches end when the test says so."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
from fake_backend import FakeBackend

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends import Backend
from oriel_inference.batching.batcher import Batcher
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from . import models
from .clients import client_of

ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"


def batcher_of(unit: Unit) -> Batcher:
    """Return the batcher of the model `double`."""
    batcher = unit.catalog.get("double").batcher
    assert isinstance(batcher, Batcher)
    return batcher


@contextlib.asynccontextmanager
async def gated(
    tmp_path: Path, fake: FakeBackend, config: str = models.DOUBLE, **changes: Any
) -> AsyncIterator[tuple[Unit, httpx.AsyncClient]]:
    """Yield the server and a client."""
    models.put(tmp_path, "double", models.double(), config)
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=1, drain_s=5.0)
    settings = dataclasses.replace(settings, **changes)

    def find(_: str) -> Backend:
        return fake

    async with open_unit(settings, backends=find, sink=ListSink()) as unit:
        fake.gate.close()
        async with client_of(unit.http_port) as client:
            try:
                yield unit, client
            finally:
                fake.gate.open()


async def admitted(client: httpx.AsyncClient) -> httpx.Response:
    """Send a request again until it is admitted; returns its answer. On a busy machine the queue may still be full."""
    while (answer := await client.post(INFER, json=ROW)).status_code == 503:
        pass
    return answer
