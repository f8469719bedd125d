"""The external scaler, called by a stand-in for KEDA."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import grpc
import pytest

from oriel_cli.up.units import free_ports
from oriel_gateway.admin.external_scaler import ExternalScaler
from oriel_policies.documents import compile_documents
from oriel_policies.scaling.members import MISSING_S, Members
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen

from ..waiting import until
from .certificates import certificate, needs_openssl
from .gate import INFER, idle
from .keda import PATH, keda, messages, reference
from .process import gateway_process
from .scaled import SCALING, scaled
from .scaler_stack import WAITING, stack
from .stack import Client, nobody, upstream


async def test_a_call_for_an_empty_pool_starts_a_replica_that_answers_it() -> None:
    async with upstream() as up, stack(up.port) as all_of, Client(all_of.port) as client:
        endpoints = all_of.core.pools["p"].endpoints
        woken = asyncio.Event()
        async with all_of.operator.listening("p", woken=woken.set):
            await until(lambda: all_of.operator.states.get("p") == [False])
            assert await all_of.operator.poll() == (1.0, 0.0, False)
            client.send(INFER, b"x", headers=WAITING)
            await woken.wait()
            assert await all_of.operator.poll() == (1.0, 1.0, True) and not up.seen
            endpoints.assign([("127.0.0.1", up.port)])  # the replica has started
            assert (await client.reply()).status == 200
            all_of.plan()
            assert await all_of.operator.poll() == (1.0, 1.0, True)  # the keep-alive time after a call
            assert set(all_of.operator.states["p"][1:]) == {True}
        assert idle(all_of.core)
        await until(lambda: not all_of.listeners())


async def test_true_comes_again_while_calls_wait_and_nobody_is_usable() -> None:
    """KEDA may lose a `true`: its replica count may be stale, or the object's status may have no metric yet."""
    with nobody() as closed:
        async with stack(closed) as all_of, Client(all_of.port) as client:
            planning = asyncio.ensure_future(all_of.core.scaled.run())
            async with all_of.operator.listening("p"):
                client.send(INFER, b"x", headers=WAITING)
                await until(lambda: all_of.operator.states.get("p", []).count(True) >= 3)
            planning.cancel()


async def test_a_stream_ends_with_ok_after_a_while_but_not_while_a_call_waits() -> None:
    with nobody() as closed:
        async with stack(closed, stream_s=(0.001, 0.001)) as all_of, Client(all_of.port) as client:
            async with all_of.operator.listening("p"):
                await until(lambda: all_of.operator.ended == [grpc.StatusCode.OK])
            client.send(INFER, b"x", headers=WAITING)
            await until(lambda: all_of.core.scaled.plans["p"].demand.total.held)
            async with all_of.operator.listening("p"):
                await until(lambda: all_of.operator.states["p"][1:] == [True])
                assert await all_of.operator.poll() == (1.0, 1.0, True)
                assert all_of.listeners() == 1 and len(all_of.operator.ended) == 1


async def test_what_cannot_be_scaled_is_refused_with_the_reason() -> None:
    with nobody() as closed:
        async with stack(closed) as all_of:
            for target, code, text in (
                ("", grpc.StatusCode.INVALID_ARGUMENT, "has no `target`"),
                ("inference-cpu", grpc.StatusCode.NOT_FOUND, "no pool 'inference-cpu' with a `scaling` table"),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await all_of.operator.poll(target)
                assert caught.value.code() is code and text in (caught.value.details() or "")
            newer = all_of.operator.channel.unary_unary(PATH + "StreamMetricSpec")
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await newer(b"")
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_the_streams_of_a_pool_that_scales_no_more_end() -> None:
    with nobody() as closed:
        async with stack(closed) as all_of, all_of.operator.listening("p"):
            await until(all_of.listeners)
            all_of.core.adopt(compile_documents(scaled(closed, scaling="")))
            await until(lambda: all_of.operator.ended == [grpc.StatusCode.NOT_FOUND])


async def test_a_thousand_streams_over_one_connection() -> None:
    """grpcio's own default of streams per connection would hold back the calls of a poll."""
    with nobody() as closed:
        async with stack(closed) as all_of, all_of.operator.listening(*["p"] * 1000):
            await until(lambda: all_of.listeners() == 1000)
            assert await all_of.operator.poll() == (1.0, 0.0, False)


async def test_what_is_too_large_for_the_scaler_is_refused() -> None:
    with nobody() as closed:
        async with stack(closed) as all_of:
            ask = all_of.operator.channel.unary_unary(PATH + "IsActive")
            for message, metadata in ((bytes(70_000), ()), (b"", (("x", "y" * 20_000),))):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await ask(message, metadata=metadata)
                assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert await all_of.operator.poll() == (1.0, 0.0, False)


async def two_messages() -> AsyncIterator[bytes]:
    """Two messages and no end: grpcio reports a write after the refusal as an error of its own."""
    yield b""
    yield b""
    await asyncio.Event().wait()


async def test_what_is_no_message_is_refused_and_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Each one wrote a traceback into the log."""
    with nobody() as closed:
        async with stack(closed) as all_of:
            for method in ("IsActive", "GetMetrics", "StreamIsActive"):
                for message in (b"\xff\xff\xff", b"\x0a\xff\x01"):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await all_of.operator.channel.unary_unary(PATH + method)(message)
                    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            several = all_of.operator.channel.stream_unary(PATH + "IsActive")(two_messages())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await several
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert not [each for each in caplog.records if each.name.startswith("oriel")]
            assert await all_of.operator.poll() == (1.0, 0.0, False) and not all_of.scaler.calls


async def test_a_call_whose_message_does_not_come_is_given_up() -> None:
    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    with nobody() as closed:
        async with stack(closed) as all_of:
            call = all_of.operator.channel.stream_unary(PATH + "IsActive")(nothing())
            await until(lambda: all_of.scaler.calls)
            (begun,) = all_of.scaler.calls
            begun.ends_s = 0.0
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert not all_of.scaler.calls


async def test_after_a_minute_without_data_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with nobody() as closed:
        async with stack(closed) as all_of:
            plan = all_of.core.scaled.plans["p"]
            monkeypatch.setattr(Members, "read", lambda *_: None)
            plan.update(monotonic() + 2 * MISSING_S)
            # All of them: if only GetMetrics fails, KEDA's fallback wakes a pool at zero, or drops one to its minimum.
            for method, message in (
                ("GetMetricSpec", reference()),
                ("GetMetrics", messages.GetMetricsRequest(scaledObjectRef=reference(), metricName="replicas")),
                ("IsActive", reference()),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await all_of.operator.channel.unary_unary(PATH + method)(message.SerializeToString())
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE, method


async def test_the_bytes_are_those_of_kedas_protocol() -> None:
    with nobody() as closed:
        async with stack(closed) as all_of:
            ref = b"\n\x01o\x12\x05oriel\x1a\x0b\n\x06target\x12\x01p"
            channel = all_of.operator.channel
            # `false` is the default value, which protobuf does not write
            assert await channel.unary_unary(PATH + "IsActive")(ref) == b""
            spec = await channel.unary_unary(PATH + "GetMetricSpec")(ref)
            assert spec == b"\n\x15\n\x08replicas\x10\x01\x19\x00\x00\x00\x00\x00\x00\xf0\x3f"
            core = all_of.core
            core.adopt(compile_documents(scaled(closed, scaling=SCALING.replace("minimum = 0", "minimum = 2"))))
            all_of.plan()
            asked = b"\n" + bytes((len(ref),)) + ref + b"\x12\x08replicas"
            metrics = await channel.unary_unary(PATH + "GetMetrics")(asked)
            assert metrics == b"\n\x15\n\x08replicas\x10\x02\x19\x00\x00\x00\x00\x00\x00\x00\x40"


@needs_openssl
async def test_with_an_authority_only_its_clients_are_answered(tmp_path: Path) -> None:
    chain, key = certificate(tmp_path, "gateway")
    own, own_key = certificate(tmp_path, "keda")
    with nobody() as closed:
        async with stack(closed) as all_of:
            scaler = ExternalScaler(all_of.core.scaled)
            port = await scaler.open(
                listen("127.0.0.1", 0, "gateway scaler"), Certificates(chain, key, http2=True, authority=own)
            )
            root = chain.read_bytes()
            known = grpc.ssl_channel_credentials(root, own_key.read_bytes(), own.read_bytes())
            async with keda(port, known) as operator:
                assert await operator.poll() == (1.0, 0.0, False)
            async with keda(port, grpc.ssl_channel_credentials(root)) as stranger:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stranger.poll()
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            await scaler.close()
            with pytest.raises(StartFailed, match="--scaler-client-ca cannot be read"):
                Certificates(chain, key, http2=True, authority=tmp_path / "none")


async def test_a_gateway_serves_the_port_and_ends_its_streams_well(tmp_path: Path) -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with nobody() as closed:
        async with keda(port) as operator, AsyncExitStack() as listening:
            async with gateway_process(tmp_path, scaled(closed), "--scaler-port", str(port)) as process:
                await listening.enter_async_context(operator.listening("p"))
                await until(lambda: operator.states.get("p"))
                async with Client(process.port) as client:
                    client.send(INFER, b"x", headers=WAITING)
                    await until(lambda: operator.states["p"].count(True) >= 2)
                    assert (await operator.poll())[2]
            assert operator.ended == [grpc.StatusCode.OK]
