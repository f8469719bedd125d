"""A unit with decoupled models of the fake backend beside the real ones."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends import Backend, find_backend
from oriel_inference.backends.fake import FakeBackend, FakeStreamSession
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings
from oriel_wire.trace import ListSink

from . import models

COUNT = """
backend: "fake-count" model_transaction_policy { decoupled: true }
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "i" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
WORDS = """
backend: "fake-words" max_batch_size: 4 model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


class Fakes:
    """The fake backends by name."""

    def __init__(self) -> None:
        self.by_name = {
            "fake-count": FakeBackend(
                (TensorInfo(name="n", datatype="INT32", shape=(1,)),),
                (TensorInfo(name="i", datatype="INT32", shape=(1,)),),
                decoupled=True,
            ),
            "fake-words": FakeBackend(
                (TensorInfo(name="text_input", datatype="BYTES", shape=(-1, 1)),),
                (TensorInfo(name="text_output", datatype="BYTES", shape=(-1, 1)),),
                decoupled=True,
            ),
        }

    def find(self, name: str) -> Backend:
        return self.by_name.get(name) or find_backend(name)

    def session(self, name: str) -> FakeStreamSession:
        (session,) = self.by_name[name].sessions
        assert isinstance(session, FakeStreamSession)
        return session


@contextlib.asynccontextmanager
async def streaming(root: Path, fakes: Fakes, **changes: object) -> AsyncIterator[Unit]:
    models.put(root, "double", models.double(), models.DOUBLE)
    models.put(root, "echo", models.echo())
    models.put(root, "count", models.double(), COUNT)
    models.put(root, "words", models.double(), WORDS)
    settings = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, cores=2, drain_s=5.0)
    settings = dataclasses.replace(settings, **changes)  # type: ignore[arg-type]
    async with open_unit(settings, backends=fakes.find, sink=ListSink()) as unit:
        assert not [entry for entry in unit.catalog.index() if entry.reason]
        yield unit
