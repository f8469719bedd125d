"""The gRPC port at the level of HTTP/2: what is no call, what comes late or in pieces, and clients that do not read."""

import asyncio
import gzip
import zlib
from pathlib import Path
from typing import cast

import httpx
import numpy as np
import pytest
from fake_backend import AHEAD

from oriel_inference.app import Unit
from oriel_inference.errors import Outcome
from oriel_inference.servers import grpc_call
from oriel_inference.servers.grpc_call import GrpcConnection
from oriel_wire.h2 import grpc
from oriel_wire.h2.frames import NO_ERROR
from oriel_wire.h2.grpc import prefix
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2

from ..waiting import until
from ..wire.h2_peers import OurCodec, request
from .gated import batcher_of
from .grpc_calls import ones
from .grpc_port import MAX_BYTES, Port, begin, ended, port_of, send
from .streams import Fakes, streaming

READY = f"/{SERVICE}/ServerReady".encode()
INFER = f"/{SERVICE}/ModelInfer".encode()
STREAM = f"/{SERVICE}/ModelStreamInfer".encode()


def only(port: Port) -> GrpcConnection:
    (connection,) = port.server.connections
    return cast(GrpcConnection, connection)


# --- what is no call -------------------------------------------------------------------------------------------------


async def test_http1_is_answered_by_a_sentence(port: Port) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        for body in (b"", b"x" * 1000):
            answer = await client.post(f"http://127.0.0.1:{port.server.port}/v2/models/double/infer", content=body)
            assert answer.status_code == 400 and "gRPC" in answer.json()["error"]
    await until(lambda: not port.server.connections)


@pytest.mark.parametrize("changed", [{"content_type": b"application/json"}, {"content_type": b""}])
async def test_a_request_that_is_no_grpc_gets_415(port: Port, changed: dict[str, bytes]) -> None:
    client = await port.client()
    stream_id = begin(client, READY, end=True, **changed)
    await until(lambda: stream_id in client.ended)
    assert client.fields[stream_id] == [(b":status", b"415")]


@pytest.mark.parametrize("path", [b"/", b"/inference.GRPCInferenceService/Nothing", b"/grpc.health.v1.Health/check"])
async def test_a_method_that_nobody_has_is_unimplemented(port: Port, path: bytes) -> None:
    client = await port.client()
    stream_id = begin(client, path)
    assert (await ended(client, stream_id))[0] == grpc.UNIMPLEMENTED
    assert port.server.under_way == 1  # the client may still send
    port.sweep(10.0)
    await until(lambda: client.resets.get(stream_id) == NO_ERROR)


async def test_an_encoding_that_nobody_has_is_unimplemented(port: Port) -> None:
    client = await port.client()
    status, _, trailers = await ended(client, begin(client, READY, (b"grpc-encoding", b"zstd"), end=True))
    assert status == grpc.UNIMPLEMENTED and trailers[b"grpc-accept-encoding"] == b"identity, deflate, gzip"


async def test_large_metadata_is_refused_and_the_connection_goes_on(port: Port) -> None:
    client = await port.client()
    large = begin(client, READY, (b"x-large", b"x" * 16_000), (b"x-larger", b"y" * 1000), end=True)
    status, _, trailers = await ended(client, large)
    assert status == grpc.RESOURCE_EXHAUSTED and trailers[b"x-oriel-reason"] == b"too_large"
    small = begin(client, READY)
    send(client, small, prefix(0), end=True)
    assert (await ended(client, small))[0] == grpc.OK


async def test_calls_are_bounded_over_all_connections(unit: Unit) -> None:
    port = await port_of(unit, max_calls=3)
    clients = [await port.client() for _ in range(2)]
    for count, client in enumerate((*clients, clients[0]), 1):
        begin(client, READY)
        await until(lambda count=count: port.server.under_way == count)
    assert (await ended(clients[1], begin(clients[1], READY)))[0] == grpc.RESOURCE_EXHAUSTED
    clients[0].transport.abort()
    await until(lambda: len(port.server.connections) == 1)
    again = begin(clients[1], READY)
    send(clients[1], again, prefix(0), end=True)
    assert (await ended(clients[1], again))[0] == grpc.OK
    await port.server.drain(0.0)


# --- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"", grpc.UNIMPLEMENTED),
        (prefix(0) * 2, grpc.UNIMPLEMENTED),
        (prefix(9) + b"short", grpc.INVALID_ARGUMENT),
        (b"\0\0", grpc.INVALID_ARGUMENT),
        (b"\2" + bytes(4), grpc.INVALID_ARGUMENT),
        (b"\1" + bytes(4), grpc.INVALID_ARGUMENT),
        (prefix(MAX_BYTES + 1), grpc.RESOURCE_EXHAUSTED),
        (prefix(0), grpc.OK),
    ],
)
async def test_a_call_has_one_message_within_the_limit(port: Port, data: bytes, status: int) -> None:
    client = await port.client()
    for size in (1, 3, 100):
        stream_id = begin(client, READY)
        for start in range(0, len(data), size):
            if stream_id in client.ended:  # refused before the rest
                break
            send(client, stream_id, data[start : start + size])
            await asyncio.sleep(0)
        if stream_id not in client.ended:
            send(client, stream_id, b"", end=True)
        found, text, _ = await ended(client, stream_id)
        assert found == status, text


async def test_a_large_message_comes_at_once_and_in_pieces(port: Port) -> None:
    asked = v2_pb2.ModelInferRequest(model_name="pair")
    values = np.arange(10_000, dtype=np.float32)
    for name in "ab":
        asked.inputs.add(name=name, datatype="FP32", shape=[1, 10_000])
        asked.raw_input_contents.append(values.tobytes())
    message = prefix(asked.ByteSize()) + asked.SerializeToString()
    client = await port.client(window=1 << 20)
    for size in (len(message), 16_000, 5001):
        stream_id = begin(client, INFER)
        rest = message
        while rest:
            # The server lets the whole message come before it has read a part of it.
            room = min(size, len(rest), client.codec.local_flow_control_window(stream_id), 65_536)
            if room:
                send(client, stream_id, rest[:room], end=room == len(rest))
                rest = rest[room:]
            await asyncio.sleep(0)
        assert (await ended(client, stream_id))[0] == grpc.OK
        answer = v2_pb2.ModelInferResponse.FromString(bytes(client.bodies[stream_id][5:]))
        assert np.array_equal(np.frombuffer(answer.raw_output_contents[0], np.float32), 2 * values)


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
async def test_many_small_compressed_messages_of_a_stream_are_answered_in_order(port: Port, encoding: bytes) -> None:
    client = await port.client()
    stream_id = begin(client, STREAM, (b"grpc-encoding", encoding))
    count, data = 1200, b""
    for number in range(count):
        message = v2_pb2.ModelInferRequest(model_name="absent", id=str(number)).SerializeToString()
        packed = gzip.compress(message) if encoding == b"gzip" else zlib.compress(message)
        data += b"\1" + prefix(len(packed))[1:] + packed
    assert len(data) <= 65_535
    send(client, stream_id, data, end=True)
    assert (await ended(client, stream_id))[0] == grpc.OK
    found, got = [], bytes(client.bodies[stream_id])
    while got:
        size = int.from_bytes(got[1:5], "big")
        found.append(v2_pb2.ModelStreamInferResponse.FromString(got[5 : 5 + size]).infer_response.id)
        got = got[5 + size :]
    assert found == [str(number) for number in range(count)]


async def test_a_message_that_does_not_come_on_is_given_up(port: Port) -> None:
    client = await port.client()
    stream_id = begin(client, INFER)
    send(client, stream_id, prefix(50_000))
    await until(lambda: only(port).streams)
    call = only(port).streams[stream_id]
    assert isinstance(call, grpc_call.GrpcCall)
    before_s = call.ends_s
    send(client, stream_id, bytes(40_000))  # more than what puts it off
    await until(lambda: call.ends_s > before_s)
    port.sweep(0.0)
    assert not call.over
    port.sweep(31.0)
    status, text, trailers = await ended(client, stream_id)
    assert (status, trailers[b"x-oriel-reason"]) == (grpc.DEADLINE_EXCEEDED, b"deadline_exceeded")
    assert "arriving" in text


# --- deadlines -------------------------------------------------------------------------------------------------------


async def test_a_stream_ends_at_its_own_deadline_and_frees_its_places(port: Port) -> None:
    batcher = batcher_of(port.unit)
    held, batcher._cores.free = batcher._cores.free, 0  # nothing can run
    client = await port.client()
    stream_id = begin(client, STREAM, (b"grpc-timeout", b"1H"))
    message = ones().SerializeToString()
    send(client, stream_id, prefix(len(message)) + message)
    await until(lambda: batcher.pending)
    port.sweep(0.0)
    assert batcher.pending
    port.sweep(3605.0)
    assert (await ended(client, stream_id))[0] == grpc.DEADLINE_EXCEEDED
    assert not batcher.pending and batcher.statistics.failures[Outcome.CALLER_LEFT] == 1
    batcher._cores.release(held)


async def test_the_shorter_one_of_two_deadlines_holds(port: Port) -> None:
    client = await port.client()
    message = ones().SerializeToString()
    for own, passed_on in ((b"1n", b"60000"), (b"1H", b"0")):
        fields = (b"grpc-timeout", own), (b"x-oriel-timeout-ms", passed_on)
        stream_id = begin(client, INFER, *fields)
        send(client, stream_id, prefix(len(message)) + message, end=True)
        assert (await ended(client, stream_id))[0] == grpc.DEADLINE_EXCEEDED


async def test_watchers_end_at_their_deadline(port: Port) -> None:
    client = await port.client()
    stream_id = begin(client, b"/grpc.health.v1.Health/Watch", (b"grpc-timeout", b"1H"))
    send(client, stream_id, prefix(0), end=True)
    await until(lambda: client.bodies.get(stream_id))
    port.sweep(3605.0)
    assert (await ended(client, stream_id))[0] == grpc.DEADLINE_EXCEEDED


# --- clients that do not read ----------------------------------------------------------------------------------------


async def test_a_model_waits_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    fakes = Fakes()
    async with streaming(tmp_path, fakes) as unit:
        port = await port_of(unit)
        client = await port.client(window=0)
        asked = v2_pb2.ModelInferRequest(model_name="count")
        asked.inputs.add(name="n", datatype="INT32", shape=[1])
        asked.raw_input_contents.append(np.array([500], np.int32).tobytes())
        stream_id = begin(client, STREAM)
        send(client, stream_id, prefix(asked.ByteSize()) + asked.SerializeToString(), end=True)
        await until(lambda: port.server.under_way and only(port).streams[stream_id].pending is not None)
        pending = only(port).streams[stream_id].pending
        assert pending is not None and len(pending) <= AHEAD and not client.bodies.get(stream_id)
        client.codec.increment_flow_control_window(1 << 20, stream_id)
        client.flush()
        assert (await ended(client, stream_id))[0] == grpc.OK
        data, responses = bytes(client.bodies[stream_id]), 0
        while data:
            size = int.from_bytes(data[1:5], "big")
            answer = v2_pb2.ModelStreamInferResponse.FromString(data[5 : 5 + size])
            assert np.frombuffer(answer.infer_response.raw_output_contents[0], np.int32) == [responses]
            data, responses = data[5 + size :], responses + 1
        assert responses == 500
        await port.server.drain(0.0)


async def test_a_connection_ends_at_its_age_and_its_calls_do_not(unit: Unit) -> None:
    port = await port_of(unit, max_age_s=3600.0)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(OurCodec, "127.0.0.1", port.server.port)
    codec = client.codec
    held = codec.start([*request(STREAM), (b"content-type", b"application/grpc")], end=False)
    client.flush()
    await until(lambda: port.server.under_way and only(port).settings_acknowledged)
    assert not only(port).draining
    port.sweep(4000.0)
    await until(lambda: len(codec.goaways) == 2)
    assert codec.goaways[1][:2] == (held.id, NO_ERROR) and not held.ended
    codec.send_data(held, b"", True)
    client.flush()
    await until(lambda: held.ended and client.transport.is_closing())
    assert held.fields is not None and dict(held.fields)[b"grpc-status"] == b"0"
    await port.server.drain(0.0)
