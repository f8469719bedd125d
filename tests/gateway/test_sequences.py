"""Sequences through the gateway: two servers that keep states, over HTTP/1.1, HTTP/2, gRPC and gRPC streams."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from tests.waiting import until
from tritonclient.grpc import service_pb2

from oriel_gateway.core import Gateway
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.sequences import Sequences
from oriel_gateway.shared import sequence_steps

from .endpoint_pools import first_route
from .grpc_streams import INFER, STREAM
from .special_routes import ok
from .stack import BRONZE, GOLD, Seen, documents, gateway, grpc_server, upstream

PATH = "/v2/models/digits/infer"
ROUTE = '[[routes]]\nmodel = "*"\npool = "p"\nsticky = "sequence"\n'
PROTOCOLS = ("HTTP/1.1", "HTTP/2", "gRPC", "stream")


class States(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """One server: the state of a sequence counts its steps.

    foreign: steps without START for which it has no state.
    cost: what it reports, as servers do that know tenants; b"" for another one.
    """

    cost = b"x-oriel-cost-us: 5\r\n"

    def __init__(self) -> None:
        self.kept: dict[int | str, int] = {}
        self.foreign = 0

    def step(self, flags: dict[str, Any]) -> int:
        """Return the new state; 0 if there is none to go on with."""
        sequence = flags["sequence_id"]
        if flags.get("sequence_start"):
            self.kept[sequence] = 0
        if sequence not in self.kept:
            self.foreign += 1
            return 0
        self.kept[sequence] += 1
        return self.kept.pop(sequence) if flags.get("sequence_end") else self.kept[sequence]

    async def http(self, seen: Seen) -> bytes:
        length = seen.get("inference-header-content-length")
        body = json.loads(seen.body[: int(length)] if length else seen.body)
        value = self.step(body | body.get("parameters", {}))
        answer = ok(str(value).encode(), status="200 OK" if value else "400 No")
        return answer.replace(b"\r\n", b"\r\n" + self.cost, 1)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self.stream)
        return grpc.unary_unary_rpc_method_handler(self.unary)

    def answer(self, message: bytes) -> service_pb2.ModelInferResponse:
        parameters = service_pb2.ModelInferRequest.FromString(message).parameters
        flags = {name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in parameters.items()}
        return service_pb2.ModelInferResponse(model_name="digits", id=str(self.step(flags)))

    async def unary(self, message: bytes, context: Any) -> bytes:
        answer = self.answer(message)
        if answer.id == "0":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no state")
        return answer.SerializeToString()

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield service_pb2.ModelStreamInferResponse(infer_response=self.answer(message)).SerializeToString()


def message_of(sequence: int | str, *, start: bool = False, end: bool = False) -> bytes:
    request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[b"x"])
    if isinstance(sequence, str):
        request.parameters["sequence_id"].string_param = sequence
    else:
        request.parameters["sequence_id"].int64_param = sequence
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    return request.SerializeToString()


@dataclass
class House:
    """A gateway before two servers, and a client of one protocol."""

    core: Gateway
    port: int
    protocol: str
    servers: list[States]
    stops: list[AsyncExitStack]
    client: httpx.AsyncClient
    channel: aio.Channel

    @property
    def these(self) -> EndpointSet[Any]:
        return self.core.pools["p"].endpoints_for(grpc=not self.protocol.startswith("HTTP"))

    async def step(self, sequence: int | str, *, start: bool = False, end: bool = False, key: str = GOLD) -> int | str:
        """Send one step. Returns the state, 0 where the server has none, or the reason of a refusal."""
        metadata = (("x-api-key", key),)
        if self.protocol.startswith("HTTP"):
            flags = {"sequence_id": sequence, "sequence_start": start, "sequence_end": end}
            answer = await self.client.post(PATH, json={"parameters": flags, "inputs": []}, headers=dict(metadata))
            return int(answer.content) if answer.content.isdigit() else answer.json()["reason"]  # type: ignore[no-any-return]
        try:
            message = message_of(sequence, start=start, end=end)
            if self.protocol == "gRPC":
                found = await self.channel.unary_unary(INFER)(message, metadata=metadata)
                return int(service_pb2.ModelInferResponse.FromString(found).id)
            call = self.channel.stream_stream(STREAM)(iter([message]), metadata=metadata)
            async for each in call:
                return int(service_pb2.ModelStreamInferResponse.FromString(each).infer_response.id)
            raise AssertionError("the stream ended without an answer")
        except aio.AioRpcError as error:
            reason = dict(error.trailing_metadata() or ()).get("x-oriel-reason", "")
            assert error.code() is not grpc.StatusCode.ABORTED or reason == "sequence_lost"
            return 0 if error.code() is grpc.StatusCode.INVALID_ARGUMENT else str(reason)

    def home(self, sequence: int | str) -> int:
        """Return the number of the server with the state of a sequence."""
        (number,) = [number for number, server in enumerate(self.servers) if sequence in server.kept]
        return number

    def leaves(self, number: int) -> None:
        """Let the discovery name the other server only."""
        self.these.assign([self.these[1 - number].address])

    def live(self) -> int:
        return len(self.these.sequences._latest)


@asynccontextmanager
async def house(protocol: str = "HTTP/1.1") -> AsyncIterator[House]:
    servers, stops, ports = [States(), States()], [AsyncExitStack(), AsyncExitStack()], []
    async with AsyncExitStack() as exits:
        for server, stop in zip(servers, stops, strict=True):
            await exits.enter_async_context(stop)
            if protocol.startswith("HTTP"):
                up = await stop.enter_async_context(upstream())
                up.answer = server.http
                ports.append(up.port)
            else:
                ports.append(await stop.enter_async_context(grpc_server(server)))
        port, core = await exits.enter_async_context(gateway(first_route(documents(ports), ROUTE)))
        http2 = protocol == "HTTP/2"
        client = httpx.AsyncClient(
            http1=not http2, http2=http2, base_url=f"http://127.0.0.1:{port}", headers={"x-api-key": GOLD}
        )
        await exits.enter_async_context(client)
        channel = await exits.enter_async_context(aio.insecure_channel(f"127.0.0.1:{port}"))
        yield House(core, port, protocol, servers, stops, client, channel)


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_steps_of_a_sequence_reach_one_server(protocol: str) -> None:
    async with house(protocol) as it:
        ids: list[int | str] = [*range(1, 9), *(f"text-{number}" for number in range(8))]
        for sequence in ids:
            assert await it.step(sequence, start=True) == 1
        assert all(server.kept for server in it.servers), "one of the servers got all sequences"
        for value in (2, 3):
            assert [await it.step(sequence) for sequence in ids] == [value] * len(ids)
        assert it.live() == len(ids)
        assert [await it.step(sequence, end=True) for sequence in ids] == [4] * len(ids)
        await until(lambda: it.live() == 0)  # a stream's call ends a moment after its answer
        assert not any(server.kept or server.foreign for server in it.servers)
        assert await it.step(1) == 0, "the server judges a step of a sequence that is not known"


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_draining_server_finishes_its_sequences_and_gets_no_new_ones(protocol: str) -> None:
    async with house(protocol) as it:
        assert await it.step(7, start=True) == 1
        old = it.home(7)
        member = it.these[old]
        it.leaves(old)
        assert await it.step(7) == 2 and it.these.gone() == [] and it.these.leaving == [member]
        for sequence in range(20, 30):
            assert await it.step(sequence, start=True) == 1 and it.home(sequence) == 1 - old
        assert await it.step(7, end=True) == 3 and not it.servers[old].foreign

        async def left() -> bool:
            for gone in it.these.gone():  # unless the watch has taken it
                await gone.close()
            return not it.these.leaving

        await until(left)  # a stream's call ends a moment after its answer


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_the_last_server_finishes_its_sequences_while_it_is_not_ready(protocol: str) -> None:
    async with house(protocol) as it:
        assert await it.step(7, start=True) == 1
        for member in it.these:
            it.these.note_reach(member, Reach.NOT_READY)
        assert not it.these.usable
        assert [await it.step(7), await it.step(7, end=True)] == [2, 3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_a_sequence_whose_server_died_is_lost_until_it_begins_again(protocol: str) -> None:
    async with house(protocol) as it:
        assert await it.step(7, start=True) == 1
        dead = it.home(7)
        await it.stops[dead].aclose()
        first = await it.step(7)
        assert first in ("sequence_lost", "upstream_broken")  # the latter where the step met the end of a connection
        assert [await it.step(7), await it.step(7)] == ["sequence_lost"] * 2
        assert it.servers[1 - dead].foreign == 0, "a step was sent to a server without the state"
        assert await it.step(7, start=True) == 1 and await it.step(7) == 2
        assert not it.core.pools["p"].admission.inflight


async def test_a_gateway_that_knows_nothing_sends_a_sequence_to_the_same_server() -> None:
    async with house() as it:
        ids = range(1, 9)
        for sequence in ids:
            await it.step(sequence, start=True)
        it.these.sequences = Sequences()
        assert [await it.step(sequence) for sequence in ids] == [2] * len(ids)


async def test_ids_of_two_tenants_models_or_kinds_are_sequences_of_their_own() -> None:
    async with house() as it:
        await it.step(7, start=True)
        await it.step("7", start=True)
        assert it.live() == 2
        body = {"parameters": {"sequence_id": 7, "sequence_start": True}}
        await it.client.post("/v2/models/other/infer", json=body)
        await it.client.post(PATH, json=body, headers={"x-api-key": BRONZE})
        assert it.live() == 4


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_no_tenant_reaches_the_state_of_another_at_servers_that_do_not_know_tenants(protocol: str) -> None:
    async with house(protocol) as it:
        for server in it.servers:
            server.cost = b""
        assert await it.step(7, start=True) == 1
        for start in (False, True):
            assert await it.step(7, start=start, key=BRONZE) in ("bad_request", 0)  # over gRPC INVALID_ARGUMENT
        assert [await it.step(7), await it.step(7, end=True)] == [2, 3]
        assert await it.step(7, start=True, key=BRONZE) == 1 and not any(server.foreign for server in it.servers)


ID = b'"parameters": {"sequence_id": 7}, "inputs": []'
DOUBTFUL = {
    "twice": b'{"parameters": {"sequence_id": 7, "sequence_id": 8}}',
    "twice, once escaped": rb'{"parameters": {"sequence\u005fid": 7, "sequence_id": 8}}',
    "twice, both escaped": rb'{"parameters": {"\u0073equence_id": 7, "sequence_i\u0064": 8}}',
    "parameters twice": b'{"parameters": {"sequence_id": 7}, "parameters": {}}',
    "in an input": b'{"parameters": {}, "inputs": [{"parameters": {"sequence_id": 7}}]}',
    "NUL in the id": rb'{"parameters": {"sequence_id": "victim\u0000x"}}',
    "long id": b'{"parameters": {"sequence_id": "%s"}}' % (b"x" * 129),
    "number with a fraction": b'{"parameters": {"sequence_id": 7.0}}',
    "no JSON": b'{"x": NaN, %s}' % ID,
    "mark of the byte order": b"\xef\xbb\xbf{%s}" % ID,
    "NUL behind the JSON": b"{%s}\0x" % ID,
}


@pytest.mark.parametrize("length", [False, True], ids=["JSON", "binary"])
@pytest.mark.parametrize("kind", DOUBTFUL)
async def test_servers_that_do_not_know_tenants_get_no_json_whose_id_is_in_doubt(kind: str, length: bool) -> None:
    async with house() as it:
        body = DOUBTFUL[kind]
        headers = {"inference-header-content-length": str(len(body))} if length else {}
        answer = await it.client.post(PATH, content=body + b"tensor" * length, headers=headers)
        assert (answer.status_code, answer.json()["reason"]) == (400, "bad_request") and "for sure" in answer.text
        assert await it.step(1, start=True) == 1, "the servers know tenants, and judge for themselves from here on"
        assert b"for sure" not in (await it.client.post(PATH, content=body, headers=headers)).content


@pytest.mark.parametrize("protocol", ["gRPC", "stream"])
async def test_servers_that_do_not_know_tenants_get_no_message_whose_id_is_in_doubt(protocol: str) -> None:
    async with house(protocol) as it:
        for server in it.servers:
            server.cost = b""
        for sequence in ("victim\0x", "x" * 129):
            assert await it.step(sequence, start=True) == 0
        assert await it.step(-1, start=True) == 1
        assert not any("x" in str(sequence) for server in it.servers for sequence in server.kept)


async def test_one_escaped_id_and_numbers_equal_modulo_two_to_the_64th_are_one_sequence() -> None:
    async with house() as it:
        for server in it.servers:
            server.cost = b""
        assert await it.step(2**64 - 1, start=True) == 1
        for sequence in (-1, 2**65 - 1):
            assert await it.step(sequence, start=True, key=BRONZE) == "bad_request"
        body = rb'{"parameters": {"sequence\u005Fid": 18446744073709551615}}'
        answer = await it.client.post(PATH, content=body, headers={"x-api-key": BRONZE})
        assert answer.status_code == 400 and "another tenant" in answer.text
        assert (await it.client.post(PATH, content=body)).content == b"2"


async def test_the_id_is_read_from_the_json_of_binary_and_generate_requests() -> None:
    async with house() as it:
        await it.step(7, start=True)
        head = b'{"parameters": {"sequence_id": 7}, "inputs": []}'
        length = {"inference-header-content-length": str(len(head))}
        it.leaves(it.home(7))
        for body, headers, target in (
            (head + bytes(900_000), length, PATH),
            (b'{"text_input": "a", "sequence_id": 7}', {}, "/v2/models/digits/generate"),
            (b'{"parameters": {"top_k": 1}, "sequence_id": 7}', {}, "/v2/models/digits/generate"),
        ):
            answer = await it.client.post(target, content=body, headers=headers)
            assert answer.status_code == 200, answer.text


async def test_a_body_whose_sequence_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with house() as it:
        body = b'{"parameters": {"sequence_id": 7, "sequence_start": true}}'
        packed = await it.client.post(PATH, content=gzip.compress(body), headers={"content-encoding": "gzip"})
        assert (packed.status_code, packed.json()["reason"]) == (415, "encoding_unsupported")
        monkeypatch.setattr(sequence_steps, "READ_BYTES", len(body) - 1)
        for each in (
            body,
            body.replace(b"_id", rb"\u005Fid"),
            rb'{"inputs": [], "parameters": {"text": "may hide one: \u0041"}}',
        ):
            large = await it.client.post(PATH, content=each)
            assert (large.status_code, large.json()["reason"]) == (413, "too_large")
        monkeypatch.undo()
        for wrong in ("true", "9" * 200, "0", '""', "1.5", "["):
            await it.client.post(PATH, content=f'{{"parameters": {{"sequence_id": {wrong}}}}}')
        assert it.live() == 0


async def test_a_stream_carries_sequences_of_its_own_server_only() -> None:
    async with house("stream") as it:
        for sequence in range(1, 33):
            assert await it.step(sequence, start=True) == 1
        here, there = (next(s for s in range(1, 33) if it.home(s) == number) for number in (0, 1))
        messages: asyncio.Queue[bytes] = asyncio.Queue()

        async def sending() -> AsyncIterator[bytes]:
            while message := await messages.get():
                yield message

        call = it.channel.stream_stream(STREAM)(sending(), metadata=(("x-api-key", GOLD),))
        answers = aiter(call)

        async def ask(message: bytes) -> str:
            messages.put_nowait(message)
            answer = service_pb2.ModelStreamInferResponse.FromString(await anext(answers))
            return str(answer.infer_response.id)

        assert await ask(message_of(here)) == "2"
        assert await ask(message_of(100, start=True)) == "1" and it.home(100) == 0
        assert await it.step(100) == 2, "another stream goes on with it at the same server"
        assert await ask(message_of(100, end=True)) == "3" and it.live() == 32
        with pytest.raises(aio.AioRpcError) as refused:
            await ask(message_of(there))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "a stream of their own" in str(refused.value.details()) and it.servers[0].foreign == 0
