"""What unmodified clients see of the extensions this server does not have: a sentence, over every protocol."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from oriel_inference.app import Unit
from oriel_inference.servers.not_served import why_not_served
from oriel_wire.v2.grpc import METHODS, SERVICE

SHARED = "shared memory is not served"
CALLS: list[tuple[str, tuple[Any, ...], str]] = [
    ("get_system_shared_memory_status", ("a region",), SHARED),
    ("register_system_shared_memory", ("r", "/key", 64), SHARED),
    ("get_cuda_shared_memory_status", ("r",), SHARED),
    ("register_cuda_shared_memory", ("r", b"aGFuZGxl", 0, 64), SHARED),
]
FREE: list[tuple[str, tuple[Any, ...]]] = [
    ("unregister_system_shared_memory", ()),
    ("unregister_system_shared_memory", ("r",)),
    ("unregister_cuda_shared_memory", ()),
    ("unregister_cuda_shared_memory", ("r",)),
]


def judged(failed: pytest.ExceptionInfo[InferenceServerException], said: str, status: str) -> None:
    message = failed.value.message()
    assert said in message and "extensions" in message and failed.value.status() == status


def asked(client: Any, status: str) -> None:
    for name, arguments, said in CALLS:
        with pytest.raises(InferenceServerException) as failed:
            getattr(client, name)(*arguments)
        judged(failed, said, status)


async def test_blocking_clients_raise_with_the_sentence(kept_unit: Unit) -> None:
    def ask() -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{kept_unit.http_port}") as over_http:
            asked(over_http, "501")
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{kept_unit.grpc_port}") as over_grpc:
            asked(over_grpc, "StatusCode.UNIMPLEMENTED")

    await asyncio.to_thread(ask)


async def test_programs_may_first_release_the_regions_that_are_left(kept_unit: Unit) -> None:
    """They do it to be sure, and ended with an error; there is none here."""

    def ask() -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{kept_unit.http_port}") as over_http:
            with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{kept_unit.grpc_port}") as over_grpc:
                for client in (over_http, over_grpc):
                    for name, arguments in FREE:
                        getattr(client, name)(*arguments)
                assert over_http.get_system_shared_memory_status() == over_http.get_cuda_shared_memory_status() == []
                assert not over_grpc.get_system_shared_memory_status().regions
                assert not over_grpc.get_cuda_shared_memory_status().regions

    await asyncio.to_thread(ask)


async def test_inputs_in_shared_memory_are_refused_by_name(kept_unit: Unit) -> None:
    """A regression: with one input in the message and one in a region, gRPC reported only too few raw contents."""

    def ask() -> None:
        for kind, port in ((tritonclient.http, kept_unit.http_port), (tritonclient.grpc, kept_unit.grpc_port)):
            given, shared = (kind.InferInput(name, [1, 2], "FP32") for name in "ab")
            given.set_data_from_numpy(np.zeros((1, 2), np.float32))
            shared.set_shared_memory("region", 8)
            with kind.InferenceServerClient(f"127.0.0.1:{port}") as client:
                with pytest.raises(InferenceServerException, match="input 'b'.*: shared memory is not supported"):
                    client.infer("pair", [given, shared])

    await asyncio.to_thread(ask)


async def test_plain_http_says_it_as_any_refusal(kept_http: httpx.AsyncClient) -> None:
    for method in ("GET", "POST"):
        answer = await kept_http.request(method, "/v2/cudasharedmemory/region/r/status", content=b"{")
        assert answer.status_code == 501 and answer.json()["reason"] == "not_supported"
        assert answer.headers["x-request-id"] and SHARED in answer.json()["error"]


async def test_the_extensions_say_the_same(kept_http: httpx.AsyncClient) -> None:
    extensions = (await kept_http.get("/v2")).json()["extensions"]
    assert not {"system_shared_memory", "cuda_shared_memory"} & set(extensions)
    assert "schedule_policy" in extensions, "priority and timeout of a request are read"


async def test_a_caller_through_a_gateway_is_not_told_of_what_only_operators_may_use(
    kept_http: httpx.AsyncClient, kept_unit: Unit
) -> None:
    operators = {"model_repository", "model_repository(unload_dependents)", "trace", "logging"}
    sent = {"x-oriel-tenant": "acme"}
    async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{kept_unit.grpc_port}") as over_grpc:
        for headers in ({}, sent):
            for listed in (
                set((await kept_http.get("/v2", headers=headers)).json()["extensions"]),
                set((await over_grpc.get_server_metadata(headers=headers)).extensions),
            ):
                assert {"statistics", "parameters"} < listed
                assert listed & operators == (set() if headers else operators)


@pytest.mark.parametrize(
    "path",
    [
        "/v2/systemsharedmemory",
        "/v2/systemsharedmemory/region/status",
        "/v2/models/m/versions/1/trace/setting",
        "/v2/trace",
    ],
)
def test_other_paths_are_not_found_as_before(path: str) -> None:
    assert why_not_served(path) is None


async def test_every_method_of_the_service_has_an_answer(kept_unit: Unit) -> None:
    """Unknown methods get gRPC's own words; none of Triton's is unknown here."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{kept_unit.grpc_port}") as channel:
        for method in METHODS.keys() - {"ModelStreamInfer"}:
            call = channel.unary_unary(f"/{SERVICE}/{method}")
            try:
                await call(b"")
            except grpc.aio.AioRpcError as refused:
                assert "Method not found" not in (refused.details() or ""), method
