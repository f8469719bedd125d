from pathlib import Path

import grpc
import pytest

from oriel_cli.errors import CommandFailed
from oriel_tools.load.bodies import prepare
from oriel_tools.load.scenario import Stream
from oriel_wire.v2.grpc import SERVICE, decode_infer
from oriel_wire.v2.http import decode_request, parse_header_length
from oriel_wire.v2.proto import v2_pb2

V2 = b'{"id": "7", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}'


@pytest.fixture
def body(tmp_path: Path) -> str:
    (tmp_path / "v2.json").write_bytes(V2)
    return str(tmp_path / "v2.json")


async def test_a_body_travels_as_it_is_unless_asked_otherwise(body: str) -> None:
    found = await prepare(Stream(url="http://h:1/v2/models/m/infer?a=b", body=body))
    assert found.body == V2 and found.path == "/v2/models/m/infer?a=b"
    assert dict(found.fields)["content-type"] == "application/json"


@pytest.mark.parametrize("encoding", ["json", "binary"])
async def test_one_v2_file_serves_both_http_forms(body: str, encoding: str) -> None:
    found = await prepare(Stream(url="http://h:1/v2/models/m/versions/3/infer", body=body, encoding=encoding))  # type: ignore[arg-type]
    fields = dict(found.fields)
    header_length = parse_header_length(fields.get("inference-header-content-length"))
    assert (header_length is not None) == (encoding == "binary") == (fields["content-type"] != "application/json")
    request = decode_request("m", "3", found.body, header_length)
    assert request.id == "7" and request.inputs[0].array.tolist() == [[1, 2]]


async def test_the_same_file_serves_grpc(body: str) -> None:
    found = await prepare(Stream(url="grpc://h:1/v2/models/m/versions/3", body=body, key="k"))
    assert found.grpc and found.path == f"/{SERVICE}/ModelInfer" and ("authorization", "Bearer k") in found.fields
    request = decode_infer(v2_pb2.ModelInferRequest.FromString(found.body))
    assert (request.model_name, request.model_version, request.inputs[0].array.tolist()) == ("m", "3", [[1, 2]])


async def test_random_rows_follow_the_models_metadata_over_grpc() -> None:
    kinds = ("FP16", "BF16", "INT64", "BOOL", "BYTES", "UINT8")

    class Metadata(grpc.GenericRpcHandler):
        def service(self, details: object) -> object:
            async def answer(request: bytes, context: object) -> bytes:
                message = v2_pb2.ModelMetadataResponse(name="m")
                for kind in kinds:
                    message.inputs.add(name=kind, datatype=kind, shape=[-1, 2, -1])
                return message.SerializeToString()

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Metadata(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        found = await prepare(Stream(url=f"grpc://127.0.0.1:{port}/v2/models/m", rows=3))
    finally:
        await server.stop(0)
    request = decode_infer(v2_pb2.ModelInferRequest.FromString(found.body))
    assert [(each.datatype, each.shape) for each in request.inputs] == [(kind, (3, 2, 1)) for kind in kinds]


async def test_what_is_no_v2_request_is_refused(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"{}")
    for url in ("http://h:1/v2/models/m/infer", "grpc://h:1/v2/models/m"):
        with pytest.raises(CommandFailed, match="stream 'load'"):
            await prepare(Stream(url=url, body=str(tmp_path / "b"), encoding="binary"))
    with pytest.raises(CommandFailed, match=r"\.\.\./infer"):
        (tmp_path / "b").write_bytes(V2)
        await prepare(Stream(url="http://h:1/v2/models/m", body=str(tmp_path / "b"), encoding="json"))
