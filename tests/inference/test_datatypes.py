"""Every datatype through a real ONNX model: binary and JSON over HTTP, raw-only bodies, gRPC."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import numpy as np
import pytest
import pytest_asyncio
from onnx import TensorProto, helper

from oriel_inference.app import Unit, open_unit
from oriel_wire.errors import BadMessage
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.grpc import SERVICE, decode_infer_response, encode_infer_request
from oriel_wire.v2.http import decode_response, encode_request
from oriel_wire.v2.messages import Array, InferRequest, tensor
from oriel_wire.v2.proto import v2_pb2

from . import models
from .clients import client_of
from .conftest import settings_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONNX = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16", "BYTES": "STRING"}


def values(datatype: str, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return np.array(["", "ü", "x" * 300][:count] + ["y"] * (count - 3), dtype=object).reshape(shape)
    entry = DATATYPES[datatype]
    if datatype == "BOOL":
        return (np.arange(count) % 2 == 0).reshape(shape)
    if entry.dtype.kind == "f":
        return np.linspace(-3, 3, count).astype(entry.dtype).reshape(shape)
    info = np.iinfo(entry.dtype)
    return np.array([info.min, info.max, *range(count - 2)], entry.dtype).reshape(shape)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("types")
    for datatype in DATATYPES:
        kind = getattr(TensorProto, ONNX.get(datatype, datatype))
        model = models.graph(
            [helper.make_node("Identity", ["x"], ["y"])], [("x", kind, ["n", 3])], [("y", kind, ["n", 3])]
        )
        models.put(root, datatype.lower(), model)
        one = models.graph(
            [helper.make_node("Identity", ["x"], ["y"])], [("x", kind, ["n", 1])], [("y", kind, ["n", 1])]
        )
        models.put(root, f"{datatype.lower()}-one", one)
        wide = models.graph(
            [helper.make_node("Identity", ["x"], ["y"])], [("x", kind, ["n", "w"])], [("y", kind, ["n", "w"])]
        )
        models.put(root, f"{datatype.lower()}-wide", wide)
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit(repository: Path) -> AsyncIterator[Unit]:
    async with open_unit(settings_of(repository), sink=ListSink()) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(unit: Unit) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(unit.http_port) as client:
        yield client


async def test_every_datatype_there_and_back(unit: Unit, http: httpx.AsyncClient) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=v2_pb2.ModelInferResponse.FromString,
        )
        for datatype, entry in DATATYPES.items():
            sent = tensor("x", values(datatype, (2, 3)), datatype)
            request = InferRequest(model_name=datatype.lower(), inputs=[sent])
            (back,) = decode_infer_response(await call(encode_infer_request(request))).outputs
            assert (back.datatype, back.array.tolist()) == (datatype, sent.array.tolist())
            for binary in (True, False):
                try:
                    parts, length = encode_request(request, binary=binary)
                except BadMessage:
                    assert not entry.json
                    continue
                headers = {"inference-header-content-length": str(length)} if length is not None else {}
                answer = await http.post(
                    f"/v2/models/{datatype.lower()}/infer", content=b"".join(parts), headers=headers
                )
                assert answer.status_code == 200, answer.text
                told = answer.headers.get("inference-header-content-length")
                assert (told is not None) == binary
                (back,) = decode_response(answer.content, int(told) if told else None).outputs
                assert (back.datatype, back.array.tolist()) == (datatype, sent.array.tolist())


async def test_raw_only_bodies_of_every_datatype(http: httpx.AsyncClient) -> None:
    for datatype, entry in DATATYPES.items():
        name = datatype.lower() + ("-one" if datatype == "BYTES" else "")
        body = "grün".encode() if datatype == "BYTES" else values(datatype, (1, 3)).astype(entry.dtype).tobytes()
        answer = await http.post(
            f"/v2/models/{name}/infer", content=body, headers={"inference-header-content-length": "0"}
        )
        assert answer.status_code == 200, answer.text
        (back,) = decode_response(answer.content, int(answer.headers["inference-header-content-length"])).outputs
        assert back.shape == ((1, 1) if datatype == "BYTES" else (1, 3))
        assert (back.array.item() if datatype == "BYTES" else back.array.tobytes()) == body
        short = await http.post(
            f"/v2/models/{datatype.lower()}/infer", content=body[:-1], headers={"inference-header-content-length": "0"}
        )
        assert short.status_code == 400 and "'x'" in short.json()["error"]


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_half_floats_are_refused_in_json_with_the_way_out(http: httpx.AsyncClient, datatype: str) -> None:
    data = {"name": "x", "shape": [1, 3], "datatype": datatype, "data": [1, 2, 3]}
    answer = await http.post(f"/v2/models/{datatype.lower()}/infer", json={"inputs": [data]})
    assert answer.status_code == 400 and "send it as binary" in answer.json()["error"]
    raw = await http.post(
        f"/v2/models/{datatype.lower()}/infer",
        content=np.zeros(3, np.uint16).tobytes(),
        headers={"inference-header-content-length": "0"},
    )
    assert raw.status_code == 200


async def test_typed_contents_and_classes_over_grpc(unit: Unit) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/ModelInfer",
            request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=v2_pb2.ModelInferResponse.FromString,
        )
        message = v2_pb2.ModelInferRequest(model_name="int8")
        given = message.inputs.add(name="x", datatype="INT8", shape=[1, 3])
        given.contents.int_contents.extend([-3, 7, 5])
        message.outputs.add(name="y").parameters["classification"].int64_param = 2
        (back,) = decode_infer_response(await call(message)).outputs
        assert back.array.tolist() == [[b"7:1", b"5:2"]]


async def test_every_datatype_in_bodies_that_come_in_pieces(unit: Unit, http: httpx.AsyncClient) -> None:
    """Several on one connection: after the first ones the text is known, and most of a body is read in place."""
    for datatype, entry in DATATYPES.items():
        for turn in range(4):
            count = 400_000 // max(1, entry.size or 5) + turn
            sent = tensor("x", np.resize(np.roll(values(datatype, (1, 100)), turn), (1, count)), datatype)
            parts, length = encode_request(InferRequest(model_name="m", inputs=[sent]))
            answer = await http.post(
                f"/v2/models/{datatype.lower()}-wide/infer",
                content=b"".join(parts),
                headers={"inference-header-content-length": str(length)},
            )
            assert answer.status_code == 200, answer.text
            (back,) = decode_response(answer.content, int(answer.headers["inference-header-content-length"])).outputs
            assert back.datatype == datatype and np.array_equal(
                back.array, sent.array, equal_nan=entry.dtype.kind == "f"
            )
            if datatype != "BYTES":
                raw = await http.post(
                    f"/v2/models/{datatype.lower()}-wide/infer",
                    content=bytes(parts[1]),
                    headers={"inference-header-content-length": "0"},
                )
                assert raw.status_code == 200, raw.text
                told = raw.headers["inference-header-content-length"]
                assert np.array_equal(decode_response(raw.content, int(told)).outputs[0].array, back.array)
