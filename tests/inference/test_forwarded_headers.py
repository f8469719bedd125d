"""Headers that models get as parameters: over both protocols, in streams, through ensembles, and none that they must
not see.
"""

import argparse
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import grpc.aio
import pytest
import pytest_asyncio

from oriel_inference.app import Unit, open_unit
from oriel_inference.servers.forwarded_headers import ForwardedHeaders, header_pattern
from oriel_inference.servers.restrictions import restriction_flag
from oriel_wire.h2.known_fields import Field
from oriel_wire.v2.grpc import SERVICE, decode_infer_response, encode_infer_request
from oriel_wire.v2.messages import InferRequest, ParameterValue, tensor
from oriel_wire.v2.proto import v2_pb2

from . import models
from .clients import client_of
from .conftest import settings_of
from .grpc_calls import infer
from .python_calls import BEHAVE, body, put

AROUND = """
platform: "ensemble" max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
ensemble_scheduling { step [ { model_name: "behave" model_version: -1
  input_map { key: "text" value: "text" } output_map { key: "said" value: "said" } } ] }
"""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unit(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Unit]:
    root = tmp_path_factory.mktemp("models")
    put(root, "behave", "behave", BEHAVE)
    models.put(root, "around", None, AROUND)
    pattern = header_pattern("my_.*|^traceparent|^timeout")
    async with open_unit(replace(settings_of(root), http_header_pattern=pattern, grpc_header_pattern=pattern)) as unit:
        yield unit


@pytest.mark.parametrize("model", ["behave", "around"])
async def test_http_headers_are_parameters_of_their_own_request(unit: Unit, model: str) -> None:
    async with client_of(unit.http_port) as client:

        async def seen(headers: dict[str, str], **parameters: ParameterValue) -> object:
            sent = body("about", parameters=parameters)
            answer = await client.post(f"/v2/models/{model}/infer", json=sent, headers=headers)
            return json.loads(answer.json()["outputs"][0]["data"][0])["parameters"]

        assert await seen({"X-My_A": "1", "other": "2", "timeout": "soon"}, my_b=3) == {"my_b": 3, "X-My_A": "1"}
        assert await seen({"my_a": "of the header"}, my_a="of the body") == {"my_a": "of the header"}
        assert await seen({}) == {}
        generated = await client.post(f"/v2/models/{model}/generate", json={"text": "about"}, headers={"my_a": "1"})
        assert json.loads(generated.json()["said"])["parameters"] == {"my_a": "1"}


@pytest.mark.parametrize("model", ["behave", "around"])
async def test_grpc_metadata_are_parameters_of_their_own_call(unit: Unit, model: str) -> None:
    request = InferRequest(model_name=model, inputs=[tensor("text", [[b"about"]])], parameters={"my_b": 3})
    trace = ("traceparent", f"00-{'1' * 32}-{'2' * 16}-00")
    expected = [{"my_b": 3, "my_a": "1", "traceparent": trace[1]}, {"my_b": 3}, {"my_b": 3, "my_a": "2"}]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=v2_pb2.ModelInferRequest.SerializeToString,
            response_deserializer=v2_pb2.ModelStreamInferResponse.FromString,
        )
        for metadata, parameters in zip(((("my_a", "1"), trace), (), (("my_a", "2"),)), expected, strict=True):
            message = encode_infer_request(request)
            for answer in (
                await infer(channel)(message, metadata=metadata),
                (await stream(iter([message]), metadata=metadata).read()).infer_response,
            ):
                (said,) = decode_infer_response(answer).outputs
                assert json.loads(said.array.item())["parameters"] == parameters


def of_names(pattern: str, *names: str) -> list[str]:
    secret = restriction_flag("api", "")("health:Admin-Key=secret")
    found = header_pattern(pattern)
    assert found is not None
    fields: list[Field] = [(name.encode(), b"value") for name in names]
    return list(ForwardedHeaders(found, (secret,)).of_call(fields, {}))


async def test_what_belongs_to_the_server_is_not_forwarded() -> None:
    kept = ["authorization", "user-agent"]
    private = ["admin-key", "x-oriel-tenant", "triton_x", ":path", "sequence_id", "priority", "a" * 65]
    assert of_names(".*", *private, *kept) == kept


async def test_patterns_are_found_in_any_case_unless_they_say_otherwise() -> None:
    assert of_names("MY_", "x-my_a") == ["x-my_a"]
    assert of_names("(?-i)MY_", "x-my_a") == []
    assert header_pattern("") is None
    with pytest.raises(argparse.ArgumentTypeError, match="not a regular expression"):
        header_pattern("(")


@pytest.mark.parametrize("pattern", ["([a-z]+-?)+$", "(a|b|ab)*c", "(x-){2,}", ".*a.*b.*c"])
async def test_patterns_whose_time_explodes_are_refused(pattern: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="repeats a group, or has more than two repetitions"):
        header_pattern(pattern)
    assert header_pattern("^(x-.*-id|my_.+|(a|b)?c.*)$") is not None
