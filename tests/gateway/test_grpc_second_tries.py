"""gRPC upstreams that refuse, fail, hang or end: the rules for second tries are those of HTTP."""

import asyncio
import socket
from time import monotonic
from typing import Any

import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.pools import health
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.pool import PoolGate
from oriel_wire.discovery.discovery import Address

from ..waiting import until
from .grpc_endpoints import ABSENT, ANSWER, CODE, MESSAGE, Fails, house, never
from .grpc_stack import idle
from .grpc_streams import INFER, STREAM
from .stack import GOLD

FULL = Fails(CODE.UNAVAILABLE, "the queue is full", (("x-oriel-reason", "queue_full"),))
TRITON_FULL = Fails(CODE.UNAVAILABLE, "[request id: 1] Exceeds maximum queue size")
STOPS = Fails(CODE.UNAVAILABLE, "the server says so")


@pytest.mark.parametrize("refusal", [FULL, TRITON_FULL], ids=["oriel", "triton"])
async def test_what_a_full_server_did_not_execute_goes_to_another(refusal: Fails) -> None:
    async with house() as it:
        it.steps[:] = [refusal]
        assert await it.infer() == "OK" and len(it.asked) == 2 and it.asked[0] is not it.asked[1]
        it.asked.clear()
        it.steps[:] = [refusal] * 1000
        for _ in range(49):
            assert await it.infer() == "UNAVAILABLE"
        assert len(it.asked) == 49 + 4 and it.core.pools["p"].retries.spent == 5 and idle(it.core)
        metadata = it.error_metadata()
        assert (metadata["x-oriel-retry"], metadata["retry-after"]) == ("spent", "1")
        assert metadata["x-oriel-reason"] == dict(refusal.metadata).get("x-oriel-reason", "upstream_error")
        assert not it.these.ejections  # a full server is not a failing one


async def test_a_large_message_is_sent_again_as_it_came() -> None:
    """The message is not copied, so the bytes of the first attempt have to be kept for the second one."""
    async with house(calls=200) as it:
        for size in (70_000, 600_000, 999_000):
            it.asked.clear()
            it.steps[:] = [FULL]
            request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(size) + b"end"])
            request.inputs.add(name="x", datatype="UINT8", shape=[size + 3])
            assert await it.infer(request.SerializeToString()) == "OK", it.error
            assert len(it.asked) == 2
            assert it.asked[0] is not it.asked[1] and it.asked[0].message == it.asked[1].message
            assert service_pb2.ModelInferRequest.FromString(it.asked[1].message) == request
            assert not it.core.pools["p"].held_bytes and idle(it.core)


async def test_what_a_server_says_of_itself_is_not_sent_again_and_does_not_eject_it() -> None:
    """UNAVAILABLE with a server's own text is an answer: it does not count as a lost connection, of which three
    eject.
    """
    async with house("idempotent = true") as it:
        it.steps[:] = [STOPS] * 8
        assert [await it.infer() for _ in range(8)] == ["UNAVAILABLE"] * 8
        assert len(it.asked) == 8 and not it.these.ejections and it.error.details() == "the server says so"


async def test_a_server_that_fails_quickly_does_not_look_fast() -> None:
    """INTERNAL does not count as a quick answer, which would draw all calls to the failing server."""
    async with house() as it:
        it.servers[0].steps = [Fails(CODE.INTERNAL, "no device")] * 1000
        it.servers[1].steps = [0.003] * 1000
        codes = [await it.infer() for _ in range(60)]
        assert 1 <= codes.count("INTERNAL") <= 20


async def test_a_server_without_room_is_left_alone_for_a_while() -> None:
    async with house() as it:
        while len({id(asked) for asked in it.asked}) < 2:  # until both are connected
            assert await it.infer() == "OK"
        it.servers[0].steps = [Fails(CODE.RESOURCE_EXHAUSTED, "saturated", (("retry-after", "5"),))] * 1000
        it.servers[1].steps = [0.003] * 1000
        codes = [await it.infer() for _ in range(60)]
        assert codes.count("RESOURCE_EXHAUSTED") <= 1


@pytest.mark.parametrize("probed", [True, False], ids=["probed", "unprobed"])
async def test_a_model_is_found_where_it_is_loaded(probed: bool) -> None:
    """One of four servers has the model. Calls go there, also after the model has moved."""
    async with house(servers=4, probed=probed) as it:
        it.these.model_locations.moved_s = 0.0
        for script in it.servers[:3]:
            script.has = False
        assert [await it.infer() for _ in range(30)] == ["OK"] * 30
        assert it.asked[-20:] == [it.servers[3]] * 20 and len(it.asked) <= (30 if probed else 31)
        it.servers[3].has, it.servers[1].has = False, True  # the model moves to another server
        assert [await it.infer() for _ in range(10)] == ["OK"] * 10 and it.asked[-1] is it.servers[1]
        it.servers[1].has = False
        questions = sum(script.questions for script in it.servers)
        assert {await it.infer() for _ in range(10)} == {"NOT_FOUND"}
        assert sum(script.questions for script in it.servers) <= questions + 4 and idle(it.core)


async def test_a_stream_is_opened_where_the_model_is() -> None:
    """On a stream a missing model is reported as a message, from which the gateway learns nothing; so probes have to
    tell it.
    """
    async with house(servers=4, probed=True) as it:
        for script in it.servers[:3]:
            script.has = False
        for _ in range(6):
            call = it.channel.stream_stream(STREAM)(iter([MESSAGE]), metadata=(("x-api-key", GOLD),))
            assert len([answer async for answer in call]) == 1
        assert it.asked == [it.servers[3]] * 6 and idle(it.core)


async def test_not_found_of_a_model_that_is_there_is_its_answer() -> None:
    async with house(servers=3, calls=50) as it:
        it.steps[:] = [Fails(CODE.NOT_FOUND, "no such user")] * 5
        assert [await it.infer() for _ in range(5)] == ["NOT_FOUND"] * 5 and len(it.asked) == 5


async def test_errors_are_noted_as_over_http() -> None:
    async with house(servers=1) as it:
        (one,) = it.these
        for step, rate in ((Fails(CODE.INTERNAL), 0.1), (Fails(CODE.UNKNOWN), 0.19), (STOPS, 0.19)):
            it.steps[:] = [step]
            await it.infer()
            assert one.record.error_rate == pytest.approx(rate) and one.record.broken == 0
        it.steps[:] = [Fails(CODE.INVALID_ARGUMENT)]
        await it.infer()
        assert one.record.error_rate < 0.19 and one.cost.cost_s > 0.001


async def test_a_connection_that_is_lost_names_no_address() -> None:
    """The client must not see an upstream's address, as in `ipv4:10.0.0.7:8001: Connection refused`."""
    async with house(servers=1) as it:
        it.steps[:] = [never]
        asking = asyncio.ensure_future(it.infer())
        await until(lambda: len(it.asked) == 1)
        server = it.servers[0].server
        assert server is not None
        await server.stop(0.0)
        assert await asking == "UNAVAILABLE" and it.error_metadata()["x-oriel-reason"] == "upstream_broken"
        assert it.error_metadata()["retry-after"] == "1"
        words = it.error.details() or ""
        assert words == "the upstream closed the connection before its answer was complete"
    async with house(servers=1) as it:
        it.steps[:] = [Fails(CODE.INTERNAL, "pod-7.models.svc:8001, localhost:8001 or unix:/run/x.sock; x:16 of 10:30")]
        assert await it.infer() == "INTERNAL"
        assert it.error.details() == "(an address), (an address) or (an address) x:16 of 10:30"
    async with house(servers=1) as it:
        it.steps[:] = [Fails(CODE.INTERNAL, "no backend at ipv4:10.1.2.3:8001, 10.1.2.3:99 or [fe80::1]:80 " * 20)]
        assert await it.infer() == "INTERNAL"
        words = it.error.details() or ""
        assert words.startswith("no backend at (an address) (an address) or (an address) ") and len(words) == 500
        assert (decided := it.core.records.decisions.where()[0]).status == 500 and "10.1" not in decided.error


@pytest.mark.parametrize(
    ("second", "code"),
    [
        (FULL, "OK"),  # the second copy is refused, so the first one's answer counts
        (ABSENT, "OK"),
        (STOPS, "OK"),
        (Fails(CODE.INVALID_ARGUMENT), "INVALID_ARGUMENT"),  # any server would say this, so it ends the call
    ],
)
async def test_two_copies_are_two_requests_in_all(second: Fails, code: str) -> None:
    async with house("idempotent = true\nhedge_ms = 20", servers=3, calls=50) as it:

        async def late() -> None:
            """Answer the first copy after the second one has been answered."""
            await until(lambda: len(it.asked) == 2 and sum(e.outstanding for e in it.these) == 1)

        it.steps[:] = [late if code == "OK" else never, second]
        assert await it.infer() == code and len(it.asked) == 2
        await until(lambda: idle(it.core) and not any(e.outstanding for e in it.these))


async def test_a_caller_that_leaves_takes_both_copies_along() -> None:
    async with house("idempotent = true\nhedge_ms = 20") as it:
        it.steps[:] = [never, never]
        asking = asyncio.ensure_future(it.infer())
        await until(lambda: len(it.asked) == 2)
        asking.cancel()
        await until(lambda: [s.left for s in it.servers] == [1, 1] and idle(it.core))
        assert not any(e.outstanding for e in it.these)


async def test_a_session_on_an_idle_server_does_not_make_it_look_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time without an answer is counted from the call on, not from the last answer of a server that was idle."""
    async with house('sticky = "header:x-session"') as it:
        it.core.endpoint_watch.tick_s = 0.01
        assert await it.infer(x_session="one") == "OK"
        stuck = it.asked[0]
        await until(lambda: not any(one.heard for one in it.these))
        for one in it.these:
            for _ in range(30):
                it.these.note_answer(one, monotonic(), 0.001)
            one.record.heard_s = monotonic() - 60.0
        other = it.these[1 - it.servers.index(stuck)]
        ticks = 0

        async def looked_at() -> None:
            """Answer after the server was checked some times, while the other server has always just answered."""
            began, busy = ticks, it.these[it.servers.index(stuck)]
            await until(lambda: ticks > began + 3 and busy.outstanding == 1)

        look_after = health.Watch._look_after

        def ticking(watch: health.Watch, gate: PoolGate, these: EndpointSet[Any], name: Address | None) -> None:
            nonlocal ticks
            if these is it.these:
                ticks += 1
                other.record.heard_s = monotonic()
            look_after(watch, gate, these, name)

        monkeypatch.setattr(health.Watch, "_look_after", ticking)
        it.steps[:] = [looked_at]
        assert await it.infer(x_session="one") == "OK" and it.asked == [stuck, stuck] and not it.these.ejections
        it.steps[:] = [FULL]
        assert await it.infer(x_session="one") == "UNAVAILABLE" and it.asked[2] is stuck


async def test_a_stream_is_opened_where_a_connection_can_be_made() -> None:
    """One of two servers is down, and no probe has found it out: a stream is opened at the other one."""
    async with house() as it:
        gone = it.servers[0].server
        assert gone is not None
        await gone.stop(0.0)
        for _ in range(6):
            for one in it.these:
                it.these.note_reach(one, Reach.UNKNOWN)
            call = it.channel.stream_stream(STREAM)(iter([MESSAGE] * 2), metadata=(("x-api-key", GOLD),))
            assert len([answer async for answer in call]) == 2
        assert it.asked == [it.servers[1]] * 6 and idle(it.core)


async def test_callers_are_let_in_for_a_while_after_the_end_began() -> None:
    """Callers that have just looked the address up may still connect and call, although readiness is already false."""
    async with house() as it:
        it.ingress.lame_duck_s = 3600.0
        it.core.draining = True
        draining = asyncio.ensure_future(it.ingress.drain(7200.0))
        await asyncio.sleep(0)
        for _ in range(3):
            options = (("grpc.use_local_subchannel_pool", 1),)
            async with aio.insecure_channel(f"127.0.0.1:{it.ingress.port}", options=options) as channel:
                ready = await channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"")
                assert not service_pb2.ServerReadyResponse.FromString(ready).ready
                assert await channel.unary_unary(INFER)(MESSAGE, metadata=(("x-api-key", GOLD),)) == ANSWER
        assert not draining.done() and idle(it.core)
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining


async def test_a_call_that_is_under_way_when_nobody_is_let_in_any_more_is_answered() -> None:
    go = asyncio.Event()
    async with house() as it:
        it.ingress.accept_share = 0.0
        it.steps[:] = [go.wait]
        asking = asyncio.ensure_future(it.infer())
        await until(lambda: len(it.asked) == 1)
        it.core.draining = True
        draining = asyncio.ensure_future(it.ingress.drain(3600.0))

        def let_in() -> bool:
            try:
                socket.create_connection(("127.0.0.1", it.ingress.port)).close()
            except ConnectionError:  # reset, because the listener closed while it was in the queue
                return False
            return True

        await until(lambda: not let_in())
        assert not asking.done() and not draining.done()
        go.set()
        assert await asking == "OK"
        await draining
        assert await it.infer() == "UNAVAILABLE" and idle(it.core)


async def test_a_stream_whose_time_ends_before_there_is_a_connection_blames_nobody() -> None:
    silent = socket.create_server(("127.0.0.1", 0))  # accepts connections and sends nothing
    async with house() as it:
        it.these.assign([silent.getsockname()])
        call = it.channel.stream_stream(STREAM)(
            iter([MESSAGE]), metadata=(("x-api-key", GOLD), ("x-request-timeout-ms", "100"))
        )
        with pytest.raises(aio.AioRpcError) as failed:
            async for _ in call:
                pass
        assert failed.value.code() is CODE.DEADLINE_EXCEEDED
        assert it.these[0].reach is Reach.UNKNOWN and not it.these[0].outstanding and idle(it.core)
    silent.close()


async def test_a_server_that_leaves_while_a_stream_waits_for_its_connection_is_not_closed_under_it() -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    async with house() as it:
        it.these.assign([silent.getsockname()])
        call = it.channel.stream_stream(STREAM)(
            iter([MESSAGE]), metadata=(("x-api-key", GOLD), ("x-request-timeout-ms", "600"))
        )
        reading = asyncio.ensure_future(call.read())
        await until(lambda: bool(it.core.pools["p"].admission.inflight))
        (gone,) = it.these
        it.these.assign([])
        await it.core.pools["p"].close_left()
        assert it.these.leaving == [gone]
        with pytest.raises(aio.AioRpcError) as failed:
            await reading
        assert failed.value.code() is CODE.DEADLINE_EXCEEDED and idle(it.core)
        await it.core.pools["p"].close_left()
        assert not it.these.leaving
    silent.close()


async def test_a_broken_model_takes_no_other_model_of_its_server_out_of_service() -> None:
    async with house(servers=1, probed=True) as it:
        it.servers[0].states = [*["READY"] * 9000, "UNAVAILABLE"]
        await until(lambda: it.these[0].reach is Reach.READY)
        assert await it.infer() == "OK"
        it.servers[0].states = ["UNAVAILABLE"]
        await until(lambda: it.these[0].reach is Reach.NOT_READY)
