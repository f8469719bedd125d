"""Special routes over gRPC, with scripted servers behind and raw calls in front."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.routing.targets import chosen
from oriel_policies.documents import compile_documents
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from .grpc_stack import Backend
from .grpc_streams import INFER, STREAM
from .special_routes import OPERATOR, OTHER, metric
from .stack import GOLD, digest, grpc_server


@dataclass
class House:
    channel: aio.Channel
    core: Gateway
    backends: list[Backend]
    ingress: Any

    async def infer(self, body: bytes = b"x", *, model: str = "digits", version: str = "", **metadata: str) -> Any:
        """Return the answer and its metadata."""
        metadata.setdefault("x_api_key", GOLD)
        request = service_pb2.ModelInferRequest(model_name=model, model_version=version, raw_input_contents=[body])
        pairs = tuple((name.replace("_", "-"), value) for name, value in metadata.items())
        call = self.channel.unary_unary(INFER)(request.SerializeToString(), metadata=pairs)
        answer = service_pb2.ModelInferResponse.FromString(await call)
        return answer, dict(await call.trailing_metadata())

    def idle(self) -> bool:
        gates = self.core.pools.values()
        return (
            all(g.admission.inflight == 0 and not len(g.admission.queue) and not g.held_bytes for g in gates)
            and not self.core.routing.flights
            and not self.core.routing.detached
            and not self.core.routing.shadows
        )


@asynccontextmanager
async def house(routes: str) -> AsyncIterator[House]:
    backends = [Backend(), Backend()]
    async with AsyncExitStack() as exits:
        text = "[tiers.gold]\nband = 0\ntarget_ms = 2000\n"
        for number, backend in enumerate(backends):
            port = await exits.enter_async_context(grpc_server(backend))
            text += f'[pools.p{number}]\nendpoints = ["127.0.0.1:{port}"]\ngrpc_endpoints = ["127.0.0.1:{port}"]\n'
            text += 'probe = ""\nlearn_concurrency = false\n'
        for name, key, scopes in (("g", GOLD, "[]"), ("o", OTHER, "[]"), ("op", OPERATOR, '["operator"]')):
            text += f'[tenants.{name}]\ntier = "gold"\nmodels = ["*"]\nscopes = {scopes}\n'
            text += f'keys = [{{ sha256 = "{digest(key)}" }}]\n'
        core = Gateway(
            compile_documents({"a.toml": (text + routes).encode()}), limiter=EmbeddedLimiter(), sink=ListSink()
        )
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        ingress = await serve_public(core, sock)
        try:
            async with aio.insecure_channel(f"127.0.0.1:{ingress.port}") as channel:
                yield House(channel, core, backends, ingress)
        finally:
            await ingress.drain(0.0)
            await core.close()


async def test_headers_and_split_choose_pool_and_version() -> None:
    routes = """
[[routes]]
model = "*"
headers = { x-stage = "next" }
pool = "p1"
[[routes]]
model = "*"
name = "canary"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", version = "3", weight = 1 }]
split_by = "header:x-user"
"""
    async with house(routes) as it:
        await it.infer(x_stage="next")
        assert not it.backends[0].seen and it.backends[1].seen.pop()[1].model_version == ""
        for _ in range(2):
            for number in range(12):
                _, trailing = await it.infer(x_user=f"u{number}", x_api_key=OPERATOR)
                assert trailing["x-oriel-route"].startswith("canary; side=p")
        users = [{seen[2]["x-user"] for seen in backend.seen} for backend in it.backends]
        assert users[0] and users[1] and not users[0] & users[1]
        assert {seen[1].model_version for seen in it.backends[1].seen} == {"3"}
        assert {seen[1].model_version for seen in it.backends[0].seen} == {""}
        await it.infer(x_user=users[1].pop(), version="9")
        assert it.backends[1].seen[-1][1].model_version == "9"
        assert sum(metric(it.core, "oriel_gateway_split_calls_total").values()) == 25


async def test_http_and_grpc_put_a_key_on_the_same_side() -> None:
    routes = """
[[routes]]
model = "*"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", weight = 1 }]
split_by = "header:x-user"
"""
    async with house(routes) as it:
        tenant = it.core.snapshot.tenants["g"]
        http = it.core.targets.of_line(tenant, b"line", "POST", "/v2/models/digits/infer", "")
        rpc = it.core.targets.of_method(tenant, "ModelInfer", "model", "digits", "")
        for number in range(50):
            fields = {"x-user": f"u{number}"}
            assert chosen(http, fields.get, "r").pool == chosen(rpc, fields.get, "r").pool


async def test_a_streams_first_message_chooses_and_it_stays_there() -> None:
    routes = """
[[routes]]
model = "*"
split = [{ pool = "p0", version = "1", weight = 1 }, { pool = "p1", version = "2", weight = 1 }]
split_by = "request"
"""
    async with house(routes) as it:
        message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()
        for number in range(6):
            call = it.channel.stream_stream(STREAM)(
                iter([message] * 3), metadata=(("x-api-key", GOLD), ("x-request-id", f"r{number}"))
            )
            assert len([answer async for answer in call]) == 3
        for backend, version in zip(it.backends, ("1", "2"), strict=True):
            assert len(backend.seen) % 3 == 0 and {seen[1].model_version for seen in backend.seen} <= {version}


async def test_equal_calls_are_made_once_and_kept() -> None:
    routes = '[[routes]]\nmodel = "*"\nname = "d"\npool = "p0"\ndeterministic = true\ncache_s = 60.0\n'
    async with house(routes) as it:
        backend, requested_s = it.backends[0], monotonic()
        backend.hold = asyncio.Event()
        asking = [asyncio.ensure_future(it.infer(x_request_id=f"r{n}")) for n in range(4)]
        await until(lambda: bool(backend.seen) and len(it.core.routing.flights) == 1)
        flight = next(iter(it.core.routing.flights.values()))
        await until(lambda: len(flight.members) == 4)
        backend.hold.set()
        answers = await asyncio.gather(*asking)
        assert len(backend.seen) == 1 and {answer.model_name for answer, _ in answers} == {"digits"}
        assert sorted(trailing["x-oriel-cache"] for _, trailing in answers) == ["joined"] * 3 + ["miss"]
        for _, trailing in answers:  # one answer's metadata is that of the call which was made
            assert ("gateway-upstream" in trailing["server-timing"]) == (trailing["x-oriel-cache"] == "miss")
        assert {trailing["x-request-id"] for _, trailing in answers} == {f"r{n}" for n in range(4)}
        decisions = [one for n in range(4) for one in it.core.records.decisions.of(f"r{n}")]
        assert sorted(bool(one.endpoint and one.response_s) for one in decisions) == [False] * 3 + [True]
        assert len({one.bytes_out for one in decisions}) == 1 and decisions[0].bytes_out > 0
        _, trailing = await it.infer()
        assert trailing["x-oriel-cache"] == "hit" and len(backend.seen) == 1
        assert 0 <= int(trailing["age"]) <= monotonic() - requested_s
        await it.infer(x_api_key=OTHER)
        await it.infer(b"other")
        assert len(backend.seen) == 3 and it.idle()
        assert sum(series.count for series in it.core.records.stats.series.values()) == 7


async def test_only_calls_with_equal_metadata_share_an_answer() -> None:
    async with house('[[routes]]\nmodel = "*"\nname = "d"\npool = "p0"\ndeterministic = true\ncache_s = 60.0\n') as it:
        for metadata, how in (({"x_lang": "de"}, "miss"), ({}, "miss"), ({"x_lang": "de"}, "hit"), ({}, "hit")):
            _, trailing = await it.infer(**metadata)
            assert trailing["x-oriel-cache"] == how, metadata
        assert [seen[2].get("x-lang") for seen in it.backends[0].seen] == ["de", None]


async def test_a_founder_that_leaves_fails_nobody_and_an_error_is_its_own() -> None:
    routes = '[[routes]]\nmodel = "*"\nname = "d"\npool = "p0"\ndeterministic = true\n'
    async with house(routes) as it:
        backend = it.backends[0]
        backend.hold = asyncio.Event()
        founder = asyncio.ensure_future(it.infer())
        await until(lambda: bool(backend.seen))
        flight = next(iter(it.core.routing.flights.values()))
        follower = asyncio.ensure_future(it.infer())
        await until(lambda: len(flight.members) == 2)
        founder.cancel()
        await until(lambda: len(flight.members) == 1)
        backend.hold.set()
        _, trailing = await follower
        assert trailing["x-oriel-cache"] == "miss" and len(backend.seen) == 1 and not backend.left
        backend.hold = asyncio.Event()
        failing = [asyncio.ensure_future(it.infer(model="broken")) for _ in range(2)]
        await until(lambda: len(backend.seen) == 2)
        flight = next(iter(it.core.routing.flights.values()))
        await until(lambda: len(flight.members) == 2)
        backend.hold.set()
        for outcome in await asyncio.gather(*failing, return_exceptions=True):
            assert isinstance(outcome, aio.AioRpcError) and outcome.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len(backend.seen) == 3  # the second caller's call was made for itself
        backend.hold = asyncio.Event()
        last = asyncio.ensure_future(it.infer(b"last"))
        await until(lambda: len(backend.seen) == 4)
        last.cancel()
        await until(lambda: backend.left == 1 and it.idle())


@pytest.mark.parametrize(("model", "result"), [("digits", "same"), ("broken", "same")])
async def test_a_copy_is_compared(model: str, result: str) -> None:
    routes = '[[routes]]\nmodel = "*"\nname = "s"\npool = "p0"\nshadow = { pool = "p1" }\n'
    async with house(routes) as it:
        if model == "broken":
            with pytest.raises(aio.AioRpcError):
                await it.infer(model=model)
        else:
            await it.infer(model=model)
        await until(lambda: metric(it.core, "oriel_gateway_shadow_copies_total") == {("s", "p1", result): 1.0})
        (original,), (copy,) = (backend.seen for backend in it.backends)
        assert (original[2]["x-oriel-priority"], copy[2]["x-oriel-priority"]) == ("0", "255")
        assert it.idle() and sum(series.count for series in it.core.records.stats.series.values()) == 1


ON = '[[routes]]\nmodel = "*"\nname = "r"\npool = "p0"\nfallback = ["p1"]\n'


async def test_a_call_that_finds_no_server_goes_on_to_the_next_pool() -> None:
    async with house(ON) as it:
        it.core.pools["p0"].grpc.assign([])
        answer, trailing = await it.infer(x_api_key=OPERATOR, x_request_id="one")
        assert answer.model_name == "digits" and trailing["x-oriel-route"] == "r; fallback=p1"
        (_, _, metadata, left_s) = it.backends[1].seen[0]
        assert metadata["x-oriel-fallback"] == "true" and metadata["x-oriel-tenant"] == "op" and 0.0 < left_s <= 8.0
        with pytest.raises(aio.AioRpcError) as caught:  # another gateway has already sent the call on
            await it.channel.unary_unary(INFER)(
                service_pb2.ModelInferRequest(model_name="digits").SerializeToString(),
                metadata=(("x-api-key", GOLD), ("x-oriel-fallback", "true")),
                timeout=0.1,
            )
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        assert len(it.backends[1].seen) == 1
        spills = it.core.records.decisions.of("one")[0].target
        assert spills is not None and [each.pool for each in spills.spills] == ["p0"]
        await until(it.idle)


async def test_another_model_is_named_in_the_message_that_goes_on() -> None:
    limited = f'[tenants.l]\ntier = "gold"\nmodels = ["digits"]\nkeys = [{{ sha256 = "{digest("l")}" }}]\n'
    route = ON.replace('["p1"]', '[{ pool = "p1", model = "tiny" }]')
    async with house(limited + route) as it:
        it.core.pools["p0"].grpc.assign([])
        answer, _ = await it.infer(bytes(200_000))
        assert answer.model_name == "tiny"
        request = it.backends[1].seen[0][1]
        assert (request.model_name, request.model_version) == ("tiny", "")
        assert request.raw_input_contents == [bytes(200_000)]
        for refused in ({"x_api_key": "l"}, {"version": "3"}):
            with pytest.raises(aio.AioRpcError):
                await it.infer(x_request_timeout_ms="50", **refused)
        assert len(it.backends[1].seen) == 1
        await until(it.idle)


async def test_a_stream_goes_on_before_anything_of_it_was_sent_and_not_with_another_model() -> None:
    message = service_pb2.ModelInferRequest(model_name="digits").SerializeToString()

    async def answers(it: House, *more: tuple[str, str]) -> int:
        call = it.channel.stream_stream(STREAM)(iter([message] * 3), metadata=(("x-api-key", GOLD), *more))
        return len([answer async for answer in call])

    async with house(ON) as it:
        it.core.pools["p0"].grpc.assign([])
        assert await answers(it) == 3 and len(it.backends[1].seen) == 3 and not it.backends[0].seen
        await until(it.idle)
    async with house(ON.replace('["p1"]', '[{ pool = "p1", model = "tiny" }]')) as it:
        it.core.pools["p0"].grpc.assign([])
        with pytest.raises(aio.AioRpcError):
            await answers(it, ("x-request-timeout-ms", "50"))
        assert not it.backends[1].seen
        await until(it.idle)


async def test_a_call_that_was_executed_is_not_sent_on() -> None:
    async with house(ON) as it:
        with pytest.raises(aio.AioRpcError):
            await it.infer(model="broken")
        assert len(it.backends[0].seen) == 1 and not it.backends[1].seen and it.idle()


@pytest.mark.parametrize(("reason", "goes_on"), [("", False), ("queue_full", True)], ids=["perhaps", "surely not"])
async def test_only_what_a_server_refused_before_it_ran_goes_on(reason: str, goes_on: bool) -> None:
    async def refuse(method: str, message: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("x-oriel-reason", reason),) if reason else ())
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the server says so")
        raise AssertionError

    async with house(ON) as it:
        it.backends[0].unary = refuse  # type: ignore[method-assign]
        if goes_on:
            assert (await it.infer())[0].model_name == "digits"
        else:
            with pytest.raises(aio.AioRpcError):
                await it.infer()
        assert len(it.backends[1].seen) == goes_on
        await until(it.idle)
