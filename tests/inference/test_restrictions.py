"""APIs that need a secret: which paths and methods of each group, what callers without it get, and what is shown."""

from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message

from oriel_inference.app import Unit
from oriel_inference.servers import http
from oriel_inference.servers.restrictions import GROUPS, GRPC_PREFIX, Restriction, by_name, restriction_flag
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.v2.grpc import HEALTH_METHODS, METHODS, SERVICE
from oriel_wire.v2.proto import v2_pb2

from .clients import client_of
from .conftest import settings_of
from .grpc_calls import infer, ones

INFER = "/v2/models/double/infer"
ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
KEY, SECRET = "Admin-Key", "se=c:ret"
RESTRICTED = ("model-repository", "inference", "statistics")


def restriction(prefix: str = "") -> Restriction:
    return restriction_flag("api", prefix)(f"{','.join(RESTRICTED)}:{KEY}={SECRET}")


@pytest.fixture
def settings(repository: Path) -> Settings:
    return replace(
        settings_of(repository),
        http_restrictions=(restriction(),),
        grpc_restrictions=(restriction(GRPC_PREFIX),),
    )


def test_every_route_and_method_belongs_to_one_group() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert len(grouped) == len(set(grouped))
    routes = {*http._SERVER_PATHS.values(), *http._MODEL_PATHS.values(), *http._POSTED, *http._REGIONS} - {"keep"}
    assert set(grouped) >= routes | METHODS.keys() | HEALTH_METHODS.keys()


async def test_http_needs_the_secret_of_the_group(unit: Unit) -> None:
    async with client_of(unit.http_port) as client:
        for path, status in {"/v2/repository/memory": 403, "/v2/models/double/stats": 403, "/v2": 200}.items():
            assert (await client.get(path)).status_code == status
            assert (await client.get(path, headers={KEY.upper(): SECRET})).status_code == 200
        for headers in ({}, {KEY: SECRET + "x"}, {KEY: ""}, {"other": SECRET}):
            refused = await client.post(INFER, json=ONES, headers=headers)
            assert refused.status_code == 403
            assert refused.json()["error"] == f"This API is restricted, expecting header '{KEY}'"
            assert refused.json()["reason"] == "restricted"
        assert (await client.post("/v2/models/nobody/infer", json=ONES)).status_code == 403
        assert (await client.post(INFER, json=ONES, headers={KEY: SECRET})).status_code == 200


async def test_grpc_needs_the_secret_of_the_group(unit: Unit) -> None:
    secret, header = (GRPC_PREFIX + KEY).lower(), GRPC_PREFIX + KEY
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:

        def method(name: str, answer: type[Message]) -> grpc.aio.UnaryUnaryMultiCallable:
            return channel.unary_unary(f"/{SERVICE}/{name}", response_deserializer=answer.FromString)

        assert (await method("ServerLive", v2_pb2.ServerLiveResponse)(b"")).live
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")
        for metadata in ((), ((secret, "wrong"),), ((KEY.lower(), SECRET),)):
            calls = (
                infer(channel)(ones(), metadata=metadata),
                method("ModelStatistics", v2_pb2.ModelStatisticsResponse)(b"", metadata=metadata),
                stream(metadata=metadata),
            )
            for call in calls:
                assert await call.code() == grpc.StatusCode.UNAVAILABLE
                assert await call.details() == f"This protocol is restricted, expecting header '{header}'"
        assert (await infer(channel)(ones(), metadata=((secret, SECRET),))).model_name == "double"


def test_a_group_named_twice_stops_the_start() -> None:
    with pytest.raises(StartFailed, match="restricted api 'statistics' can not be specified in multiple config groups"):
        by_name((restriction(), restriction_flag("api", "")("logging,statistics:other=1")), "api")


@pytest.mark.parametrize(
    "text", ["health", "health:key", "health:key=", "key=secret:x=y", ":=secret", "nothing:key=secret"]
)
def test_wrong_flags_are_refused_without_the_secret(text: str) -> None:
    with pytest.raises(Exception, match=r"unknown restricted api 'nothing'|GROUP,GROUP:KEY=VALUE") as refused:
        restriction_flag("api", "")(text)
    assert "secret" not in str(refused.value)
    assert SECRET not in repr(restriction())
