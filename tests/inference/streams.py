"""A server with decoupled models of the fake backend, and real models beside them."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
from fake_backend import FakeBackend, FakeStreamSession

from oriel_inference.app import Unit, open_unit
from oriel_inference.backends import Backend, find_backend
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2

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


def stream(channel: grpc.aio.Channel, **options: Any) -> Any:
    return channel.stream_stream(
        f"/{SERVICE}/ModelStreamInfer",
        request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=v2_pb2.ModelStreamInferResponse.FromString,
    )(**options)


async def said(call: Any) -> list[Any]:
    """Return everything up to the end of the stream: a number, the text of an error, or "final"."""
    found: list[Any] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        if response.error_message:
            found.append(response.error_message)
        elif response.infer_response.raw_output_contents:
            raw = response.infer_response.raw_output_contents[0]
            found.append(np.frombuffer(raw, np.float32 if len(raw) == 16 else np.int32)[0])
        else:
            assert response.infer_response.parameters["triton_final_response"].bool_param
            found.append("final")
    return found
