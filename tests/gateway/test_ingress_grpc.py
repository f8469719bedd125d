"""The gRPC pass-through with an unmodified tritonclient in front and a scripted gRPC server behind."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Sequence
from time import monotonic

import grpc
import numpy as np
import pytest
from grpc import aio
from tritonclient.grpc import aio as triton
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from oriel_gateway.call import call as grpc_call
from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_policies.documents import compile_documents
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .grpc_stack import Backend, Metadata, headers, idle, infer, stack
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, LIMITED, digest, documents, nobody


async def test_tritonclient_infers_through_the_gateway() -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        result = await infer(
            address,
            "digits",
            GOLD,
            request_id="7",
            extra={
                "traceparent": "00-000000000000000000000000000000aa-00000000000000bb-01",
                "x-request-id": "abc",
                "x-mine": "1",
                "x-oriel-tier": "forged",
                "x-forwarded-for": "1.2.3.4",
                "forwarded": "for=1.2.3.4",
                "endpoint-load-metrics-format": "text",
            },
        )
        assert result.get_response().model_name == "digits" and result.get_response().id == "7"
        _, request, metadata, remaining_s = backend.seen[0]
        assert request.raw_input_contents == [np.array([1, 2], np.float32).tobytes()]
        assert not {"endpoint-load-metrics-format", "x-forwarded-for", "forwarded"} & set(metadata)
        assert "authorization" not in metadata and metadata["x-mine"] == "1" and metadata["x-request-id"] == "abc"
        assert metadata["x-oriel-tier"] == "gold" and metadata["x-oriel-priority"] == "0"
        assert metadata["x-oriel-tenant"] == "g"
        assert metadata["traceparent"].startswith("00-000000000000000000000000000000aa-")
        assert 7.0 < remaining_s <= 8.1  # gRPC rounds a timeout up to its next unit
        assert idle(core) and isinstance(core.sink, ListSink)
        name = "inference.GRPCInferenceService/ModelInfer"
        assert [(s.name, s.kind) for s in core.sink.spans] == [(name, "server"), (name, "client")]
        assert all(s.attributes["rpc.status_code"] == "OK" and not s.failed for s in core.sink.spans)


async def test_health_and_metadata() -> None:
    async with stack(Backend()) as (address, _), triton.InferenceServerClient(address) as client:
        assert await client.is_server_live() and await client.is_server_ready()
        assert (await client.get_server_metadata(headers=headers(GOLD))).name == "backend"


@pytest.mark.parametrize(
    ("model", "key", "extra", "code", "reason"),
    [
        ("digits", None, {}, "UNAUTHENTICATED", "unauthenticated"),
        ("digits", "wrong", {}, "UNAUTHENTICATED", "unauthenticated"),
        ("digits", GOLD, {"x-api-key": GOLD}, "INVALID_ARGUMENT", "ambiguous_credentials"),
        ("mlp", BRONZE, {}, "NOT_FOUND", "not_found"),
        ("", BRONZE, {}, "NOT_FOUND", "not_found"),
        ("../digits", GOLD, {}, "NOT_FOUND", "not_found"),
    ],
)
async def test_refusals(model: str, key: str | None, extra: Metadata, code: str, reason: str) -> None:
    backend = Backend()
    async with stack(backend) as (address, core):
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, model, key, extra=extra)
        assert caught.value.status() == f"StatusCode.{code}", caught.value
        cause = caught.value.__context__
        assert isinstance(cause, aio.AioRpcError)
        assert ("x-oriel-reason", reason) in list(cause.trailing_metadata() or ())
        assert not backend.seen and idle(core)


async def test_too_many_requests_are_resource_exhausted_with_the_wait() -> None:
    async with stack(Backend()) as (address, _):
        for _ in range(2):
            await infer(address, "digits", LIMITED)
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", LIMITED)
        assert caught.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
        cause = caught.value.__context__
        assert isinstance(cause, aio.AioRpcError)
        assert dict(cause.trailing_metadata() or ())["retry-after"] == "2"


@pytest.mark.parametrize("shared", [False, True])
async def test_limits_are_counted_given_back_and_told(shared: bool) -> None:
    """Limits work as over HTTP, also if the limiter has to ask its ledger first."""
    backend = Backend()
    limits = (
        "limit = { concurrency = 1, compute_ms_per_day = 10000, bytes_per_s = 1000, bytes_burst = 1000 }\n"
        'limits = [{ model = "digits", requests_per_day = 1 }]'
    )
    extra = f'[tenants.t]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("key-t")}" }}]\n{limits}\n'
    async with stack(backend, shared=shared, extra=extra) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        key = (("x-api-key", "key-t"),)

        def message(model: str, size: int = 8) -> bytes:
            request = service_pb2.ModelInferRequest(model_name=model, id="i" * 200, raw_input_contents=[bytes(size)])
            return bytes(request.SerializeToString())

        began = monotonic()
        first = call(message("digits"), metadata=key)
        moved = len(message("digits")) + len(await first)
        refilled = 1000 * (monotonic() - began)
        trailing = dict(await first.trailing_metadata())
        left = int(re.findall(r'"bytes";r=([0-9]+)', trailing["ratelimit"])[0])
        assert 1000 - moved <= left <= min(1000, 1000 - moved + refilled), "both ways"
        assert '"concurrency";q=1;qu="concurrent-requests"' in trailing["ratelimit-policy"]
        assert '"model:digits/requests-day";r=0;' in trailing["ratelimit"]
        with pytest.raises(aio.AioRpcError) as caught:
            await call(message("digits"), metadata=key)
        metadata = dict(caught.value.trailing_metadata())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert metadata["x-oriel-reason"] == "quota_exceeded" and int(metadata["retry-after"]) > 0
        backend.hold = asyncio.Event()
        held = call(message("a"), metadata=key)
        async with asyncio.timeout(60):
            await until(lambda: len(backend.seen) >= 2)
        with pytest.raises(aio.AioRpcError, match="at once"):
            await call(message("b"), metadata=key)
        held.cancel()  # a caller that leaves releases its slot
        backend.hold = None

        async def let_through() -> bool:
            try:
                await call(message("c", 500_000), metadata=key)
            except aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                return False
            return True

        await until(let_through)
        # The time with a permit is charged: less than the 10 ms each that were reserved, but more than nothing.
        account = core.limiter._accounts["t", "all"]  # type: ignore[attr-defined]
        used_us = 10_000_000 - next(m for m in account.meters if m.bound.period).remaining(monotonic())[0]
        assert 0 < used_us < 10_000_000
        with pytest.raises(aio.AioRpcError, match="bytes per second"):
            await call(message("d"), metadata=key)
        await until(lambda: idle(core))


async def test_the_charge_a_server_reports_is_what_a_grpc_call_pays() -> None:
    """The reported cost counts over gRPC as it does over HTTP; without one the time with a permit is charged."""
    backend = Backend()
    limits = "limit = { compute_ms_per_day = 1000 }"
    extra = f'[tenants.t]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{digest("key-t")}" }}]\n{limits}\n'
    async with stack(backend, extra=extra) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        message = service_pb2.ModelInferRequest(model_name="a").SerializeToString()
        left, took_us = [], []
        for cost_us in ("400000", "-5", "1e6", "400000"):
            backend.cost_us = cost_us
            began = monotonic()
            sent = call(message, metadata=(("x-api-key", "key-t"),))
            await sent
            trailing = dict(await sent.trailing_metadata())
            assert "x-oriel-cost-us" not in trailing
            meter = core.limiter._accounts["t", "all"].meters[0]  # type: ignore[attr-defined]
            took_us.append((monotonic() - began) * 1e6)
            left.append(meter.remaining(monotonic())[0])
        assert left[0] == 600_000 and left[3] == left[2] - 400_000
        # A value that is not a number is ignored: the time with a permit is charged.
        assert all(0 < left[n - 1] - left[n] <= took_us[n] + 1 for n in (1, 2))


async def test_an_upstreams_own_error_passes_through() -> None:
    async with stack(Backend()) as (address, core):
        with pytest.raises(InferenceServerException, match="unexpected shape") as caught:
            await infer(address, "broken", GOLD)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT" and idle(core)


async def test_the_deadline_ends_a_wait_in_the_queue_and_cancels_the_upstream() -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend, max_inflight=1) as (address, core):
        first = asyncio.ensure_future(infer(address, "digits", GOLD))
        await until(lambda: backend.seen)
        with pytest.raises(InferenceServerException) as caught:
            await infer(address, "digits", GOLD, extra={"x-request-timeout-ms": "50"})
        assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED" and "waiting for a permit" in str(caught.value)
        assert len(backend.seen) == 1
        first.cancel()
        await until(lambda: backend.left and idle(core))


async def test_an_answer_after_the_deadline_is_not_ok_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend) as (address, core):
        asked = asyncio.ensure_future(infer(address, "digits", GOLD))
        await until(lambda: backend.seen)
        monkeypatch.setattr(grpc_call, "monotonic", lambda: monotonic() + 3600.0)
        backend.hold.set()
        with pytest.raises(InferenceServerException, match="DEADLINE_EXCEEDED"):
            await asked
        assert isinstance(core.sink, ListSink)
        assert {span.attributes["rpc.status_code"] for span in core.sink.spans} == {"DEADLINE_EXCEEDED"}


async def test_every_message_of_a_stream_is_judged() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
        allowed = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        secret = service_pb2.ModelInferRequest(model_name="mlp").SerializeToString()

        async def send(messages: Sequence[bytes]) -> list[str]:
            stream = call(iter(messages), metadata=(("x-api-key", BRONZE),))
            return [service_pb2.ModelStreamInferResponse.FromString(m).infer_response.model_name async for m in stream]

        assert await send([allowed, allowed]) == ["digits", "digits"]
        with pytest.raises(aio.AioRpcError) as caught:
            await send([allowed, secret])
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(aio.AioRpcError):
            await send([allowed + secret[:2] + b"\x03mlp"[:1]])
        assert {request.model_name for _, request, _, _ in backend.seen} == {"digits"}
        assert idle(core)


async def test_repository_methods_look_absent() -> None:
    async with stack(Backend()) as (address, _), triton.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.get_model_repository_index(headers=headers(GOLD))
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"


async def test_a_stranger_is_refused_before_it_has_sent_a_message() -> None:
    """A call without a message must not hold a place until it sends one."""
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer", None, None)()
        async with asyncio.timeout(60):
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = dict(await call.trailing_metadata())
        assert {"x-request-id", "traceresponse", "server-timing"} <= set(metadata)
        assert idle(core)


async def test_a_caller_that_sends_no_message_is_given_up_at_its_deadline() -> None:
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        metadata = (("x-api-key", GOLD), ("x-request-timeout-ms", "50"))
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer", None, None)(metadata=metadata)
        async with asyncio.timeout(60):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert idle(core)


def operator(port: int) -> dict[str, bytes]:
    files = documents([port])
    return {"all.toml": files["all.toml"].replace(b"[tenants.g]", b'[tenants.g]\nscopes = ["operator"]')}


SHARED = [f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")]
OPERATORS = ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings", *SHARED]


@pytest.mark.parametrize("method", OPERATORS)
async def test_the_operators_methods_are_absent_for_everybody_else(method: str) -> None:
    backend = Backend()
    async with stack(backend, files=operator) as (address, _), aio.insecure_channel(address) as channel:
        call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}", None, None)
        with pytest.raises(aio.AioRpcError) as caught:
            await call(b"", metadata=(("x-api-key", BRONZE),))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED and not backend.seen
        await call(b"", metadata=(("x-api-key", GOLD),))
        assert [seen[0] for seen in backend.seen] == [method]


async def test_statistics_of_all_models_are_the_operators() -> None:
    backend = Backend()
    async with stack(backend, files=operator) as (address, _), triton.InferenceServerClient(address) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.get_inference_statistics(headers=headers(BRONZE))
        assert caught.value.status() == "StatusCode.NOT_FOUND" and not backend.seen
        await client.get_inference_statistics("digits", headers=headers(BRONZE))
        await client.get_inference_statistics(headers=headers(GOLD))
        assert [request.name for _, request, _, _ in backend.seen] == ["digits", ""]


@pytest.mark.parametrize("scope", ["tenant", "operator"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer", "ModelReady", "ModelMetadata", "ModelConfig"])
async def test_no_name_is_no_model(method: str, scope: str) -> None:
    """A route for all models and a right to all of them do not cover a request that names no model."""
    backend = Backend()
    files = operator if scope == "operator" else None
    async with stack(backend, files=files) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/inference.GRPCInferenceService/{method}", None, None)
        metadata = (("x-api-key", GOLD),)
        for message in (b"", service_pb2.ModelInferRequest(model_version="1").SerializeToString()):
            with pytest.raises(aio.AioRpcError) as caught:
                await call(iter([message]), metadata=metadata).read()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert dict(caught.value.trailing_metadata() or ())["x-oriel-reason"] == "not_found"
        assert not backend.seen
        if method == "ModelStreamInfer":
            named = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
            stream = call(metadata=metadata)
            await stream.write(named)
            assert await stream.read() is not aio.EOF
            await stream.write(b"")
            with pytest.raises(aio.AioRpcError) as caught:
                await stream.read()
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            assert [request.model_name for _, request, _, _ in backend.seen] == ["digits"]
        assert idle(core)


async def test_a_version_that_is_no_number_is_refused_as_triton_does() -> None:
    backend = Backend()
    async with stack(backend) as (address, _), triton.InferenceServerClient(address) as client:
        for name, said in (("digits", "failed to get model version from specified .* 'first'"), ("others", "no model")):
            with pytest.raises(InferenceServerException, match=said):
                await client.get_model_metadata(name, "first", headers=headers(BRONZE))
        assert not backend.seen


async def test_nothing_of_the_callers_own_hop_reaches_the_upstream() -> None:
    backend = Backend()
    forged = {
        "x-oriel-tenant": "other",
        "x-oriel-models": "*",
        "x_oriel_tier": "forged",
        "proxy-authorization": "Basic c2VjcmV0",
        "x-oriel-timeout-ms": "99999999",
    }
    async with stack(backend) as (address, _):
        await infer(address, "digits", BRONZE, extra=forged)
        metadata = backend.seen[0][2]
        assert BRONZE not in str(metadata) and "c2VjcmV0" not in str(metadata) and "forged" not in str(metadata)
        ours = {name: value for name, value in metadata.items() if name.startswith("x-oriel")}
        assert ours == {"x-oriel-tier": "bronze", "x-oriel-priority": "2", "x-oriel-tenant": "b"}


async def test_the_tiers_priority_replaces_the_callers_where_the_pool_maps_it() -> None:
    def files(port: int) -> dict[str, bytes]:
        text = documents([port])["all.toml"]
        return {"all.toml": text.replace(b"max_queue =", b"triton_priorities = { bronze = 3 }\nmax_queue =")}

    backend = Backend()
    async with stack(backend, files=files) as (address, _):
        for key in (BRONZE, GOLD):
            await infer(address, "digits", key, priority=1, timeout=10**15)
        bronze, gold = (request.parameters for _, request, _, _ in backend.seen)
        assert bronze["priority"].uint64_param == 3 and 0 < bronze["timeout"].int64_param <= 8_000_000
        # this route maps no priorities: the value stays
        assert gold["priority"].uint64_param == 1 and gold["timeout"].int64_param == 10**15


async def test_a_revoked_sender_sends_no_further_message_on_its_stream() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
        message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        go_on = asyncio.Event()

        async def messages() -> AsyncIterator[bytes]:
            yield message
            await go_on.wait()
            yield message

        stream = call(messages(), metadata=(("x-api-key", BRONZE),))
        assert await stream.read()
        port = core.pools["p"].pool.grpc_endpoints[0][1]
        files = documents([port])["all.toml"].replace(digest(BRONZE).encode(), digest("new").encode())
        core.adopt(compile_documents({"all.toml": files}))
        go_on.set()
        with pytest.raises(aio.AioRpcError) as caught:
            while await stream.read():
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(backend.seen) == 1 and idle(core)


async def test_a_stream_goes_on_across_new_documents() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer", None, None)
        message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()

        async def messages() -> AsyncIterator[bytes]:
            yield message
            core.adopt(compile_documents(documents([core.pools["p"].pool.grpc_endpoints[0][1]])))
            yield message

        assert len([answer async for answer in call(messages(), metadata=(("x-api-key", BRONZE),))]) == 2
        assert len(backend.seen) == 2


async def test_over_grpc_a_call_waits_for_the_first_server_and_passes_over_one_that_is_gone() -> None:
    backend = Backend()
    held = socket.socket()  # refuses connections; gRPC's own sockets may share the port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    nowhere = held.getsockname()[1]
    files = documents([nowhere])
    core = Gateway(compile_documents(files), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    ingress = await serve_public(core, sock)
    address = f"127.0.0.1:{ingress.port}"
    server = aio.server()
    server.add_generic_rpc_handlers((backend,))
    try:
        with pytest.raises(InferenceServerException, match="reached before the deadline"):
            await infer(address, "digits", GOLD, extra={"x-request-timeout-ms": "200"})
        waiting = asyncio.create_task(infer(address, "digits", GOLD))
        async with asyncio.timeout(60):
            await until(lambda: core.pools["p"].grpc.parked)
        assert core.pools["p"].admission.inflight == 0
        assert server.add_insecure_port(f"127.0.0.1:{nowhere}") == nowhere
        await server.start()
        await waiting
        assert len(backend.seen) >= 1 and idle(core)
        with nobody() as dead:
            core.pools["p"].grpc.assign((("127.0.0.1", nowhere), ("127.0.0.1", dead)))
            for _ in range(6):
                await infer(address, "digits", GOLD)
    finally:
        await ingress.drain(0.0)
        await core.close()
        await server.stop(0.0)
        held.close()


async def test_a_stream_whose_first_message_is_its_last_ends_at_the_upstream() -> None:
    """If the first message can be sent on at once, the end of the stream has to be sent on as well."""
    async with stack(Backend()) as (address, _):
        for _ in range(2):  # the second call has a connection to the upstream
            message = framed(service_pb2.ModelInferRequest(model_name="digits").SerializeToString())
            path = "/inference.GRPCInferenceService/ModelStreamInfer"
            answer = await asyncio.wait_for(raw_call(address, path, headers(GOLD), message), 30)
            assert answer.status == 0 and b"digits" in answer.data


async def test_a_message_in_pieces_that_is_over_the_limits_leaves_the_byte_budget() -> None:
    """The bytes of the pieces that have arrived are released."""
    async with stack(Backend()) as (address, core):
        request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(100_000)])
        path, message = "/inference.GRPCInferenceService/ModelInfer", framed(request.SerializeToString())
        codes = [(await raw_call(address, path, headers(LIMITED), message)).status for _ in range(3)]
        assert codes == [0, 0, 8] and not core.pools["p"].held_bytes


async def test_bytes_behind_the_message_of_a_call_are_refused_at_once() -> None:
    """They are not collected until the time for the first message has passed."""
    async with stack(Backend()) as (address, core):
        request = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        path, body = "/inference.GRPCInferenceService/ModelInfer", framed(request) + b"\0"
        answer = await asyncio.wait_for(raw_call(address, path, headers(GOLD), body, end=False), 30)
        assert answer.status == 3 and not core.pools["p"].held_bytes
