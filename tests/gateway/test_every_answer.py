"""Every answer of the gateway's own carries ids, timing and a reason, and appears once in `/decisions`."""

import asyncio
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_wire.engine.limits import HttpLimits

from ..waiting import until
from .grpc_stack import Backend, stack
from .stack import BRONZE, Client, Reply, Seen, documents, gateway, upstream

KEY = b"host: x\r\nauthorization: Bearer key-gold\r\n"
INFER = b"POST /v2/models/digits/infer HTTP/1.1\r\n" + KEY
CHUNKED = INFER + b"transfer-encoding: chunked\r\n\r\n"
TWO_KEYS = KEY + b"x-api-key: key-gold\r\n"

REFUSED = {
    "not a request": (b"hello\r\n\r\n", 400, "bad_request"),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\n" + KEY + b"\r\n", 400, "bad_request"),
    "OPTIONS *": (b"OPTIONS * HTTP/1.1\r\n" + KEY + b"\r\n", 404, "not_found"),
    "no key": (b"GET /v2 HTTP/1.1\r\nhost: x\r\n\r\n", 401, "unauthenticated"),
    "two keys": (b"GET /v2 HTTP/1.1\r\n" + TWO_KEYS + b"\r\n", 400, "ambiguous_credentials"),
    "a bad chunk": (CHUNKED + b"3\r\nabc\r\nzz\r\n", 400, "bad_request"),
    "a bad trailer": (CHUNKED + b"0\r\nno field\r\n\r\n", 400, "bad_request"),
    "a body that does not come": (INFER + b"content-length: 9\r\n\r\n", 408, "deadline_exceeded"),
    "a head that does not come": (INFER, 408, "deadline_exceeded"),
    "too large": (INFER + b"content-length: 99999999\r\n\r\n", 413, "too_large"),
    "too large, of HEAD": (b"HEAD /v2 HTTP/1.1\r\n" + KEY + b"content-length: 99999999\r\n\r\n", 413, "too_large"),
    "a long target": (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n" + KEY + b"\r\n", 414, "too_large"),
    "a long head": (b"GET / HTTP/1.1\r\nname: " + b"a" * 40_000 + b"\r\n\r\n", 431, "too_large"),
    "no such health": (b"GET /v2/health/other HTTP/1.1\r\nhost: x\r\n\r\n", 404, "not_found"),
    "health of another method": (b"DELETE /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
    "not ready": (b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\n\r\n", 503, "not_ready"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refusal_says_who_why_and_how_long_and_is_told_once(name: str) -> None:
    data, status, reason = REFUSED[name]
    limits = HttpLimits(head_timeout_s=0.05, body_timeout_s=0.05) if status == 408 else HttpLimits()
    async with upstream() as up, gateway(documents([up.port]), limits=limits) as (port, core):
        core.draining = name == "not ready"
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        async with asyncio.timeout(60):
            head, _, body = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n\r\n")
            reply = Reply(head, body)
            if not data.startswith(b"HEAD "):
                reply.body = await reader.readexactly(int(reply.headers["content-length"]))
                assert b'"reason":"%b"' % reason.encode() in reply.body
            if reply.headers.get("connection") == "close":
                assert await reader.read() == b"", "nothing follows"
        writer.close()
        assert reply.status == status and "server-timing" in reply.headers
        assert abs((parsedate_to_datetime(reply.headers["date"]) - datetime.now(UTC)).total_seconds()) < 60
        (decided,) = core.records.decisions.where()
        assert (decided.mark.request_id, decided.outcome, decided.status) == (
            reply.headers["x-request-id"],
            reason,
            status,
        )
        assert f"-{decided.mark.span_id:016x}-" in reply.headers["traceresponse"]
        if data.startswith(INFER) and b"\r\n\r\n" in data and status != 413:
            assert decided.tenant is not None and decided.target is not None, "the sender was known before the refusal"


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n",
        b"GET /v2/health/other HTTP/1.1\r\nhost: x\r\n",
        b"GET /v2 HTTP/1.1\r\n" + TWO_KEYS,
        b"OPTIONS /v2 HTTP/1.1\r\nhost: x\r\norigin: https://a\r\naccess-control-request-method: POST\r\n",
    ],
)
async def test_bodies_without_a_valid_key_are_bounded_whatever_they_come_with(head: bytes) -> None:
    files = documents([1], extra='[http]\ncors_origins = ["https://a"]')
    async with gateway(files) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        request = head + b"content-length: 30000\r\n\r\n" + bytes(30_000)
        answers = 0
        async with asyncio.timeout(60):
            while answers < 30:
                writer.write(request)
                answer = await reader.readuntil(b"\r\n\r\n")
                answers += 1
                await reader.readexactly(int(Reply(answer[:-4], b"").headers.get("content-length", "0")))
                if b"connection: close" in answer:
                    break
        writer.close()
        assert answers < 10


@pytest.mark.parametrize("method", ["/inference.GRPCInferenceService/Other", "/grpc.health.v1.Health/Other", "/x/Y"])
async def test_a_grpc_method_that_is_not_served_says_who_and_why(method: str) -> None:
    async with stack(Backend()) as (address, core), aio.insecure_channel(address) as channel:
        call = channel.unary_unary(method)(b"")
        assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        said = dict(await call.trailing_metadata())
        (decided,) = core.records.decisions.where()
        assert (
            said["x-oriel-reason"] == decided.outcome == "not_found" and said["x-request-id"] == decided.mark.request_id
        )
        assert "server-timing" in said and "traceresponse" in said


async def test_grpc_messages_are_on_the_pools_byte_budget_and_within_its_bound() -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    infer = "/inference.GRPCInferenceService/ModelInfer"

    def message(size: int) -> bytes:
        request = service_pb2.ModelInferRequest(model_name="digits", raw_input_contents=[bytes(size)])
        return bytes(request.SerializeToString())

    def files(port: int) -> dict[str, bytes]:
        return documents([port], pool='probe = ""\nmax_queue_bytes = 400000')

    async with stack(backend, files=files) as (address, core), aio.insecure_channel(address) as channel:
        ask = partial(channel.unary_unary(infer), metadata=(("x-api-key", BRONZE),))
        large = ask(message(1_000_001))
        assert await large.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(await large.trailing_metadata())["x-oriel-reason"] == "too_large"
        first = ask(message(200_000))
        await until(lambda: len(backend.seen) >= 1)
        second = ask(message(200_000))
        assert await second.code() is grpc.StatusCode.UNAVAILABLE, (
            "a quarter of the byte budget is reserved for the most urgent tier"
        )
        assert dict(await second.trailing_metadata())["x-oriel-reason"] == "queue_full"
        assert core.pools["p"].held_bytes > 200_000
        backend.hold.set()
        await first
        await until(lambda: not core.pools["p"].held_bytes)


async def test_an_answer_of_http_1_0_is_passed_on_in_http_1_1() -> None:
    """A chunked answer that says HTTP/1.0 must not be read from a kept connection (RFC 9112, section 6.1)."""

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nuntil it closes")
        writer.close()

    server = await asyncio.start_server(old, "127.0.0.1", 0)
    async with gateway(documents([server.sockets[0].getsockname()[1]])) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):  # the connection to the client is kept
            writer.write(b"GET /v2 HTTP/1.1\r\n" + KEY + b"\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"transfer-encoding: chunked" in head
            assert (await reader.readuntil(b"0\r\n\r\n")) == b"f\r\nuntil it closes\r\n0\r\n\r\n"
        writer.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("", "1"),
        ("7", "7"),
        ("0", "1"),
        ("3600", "60"),
        ("Fri, 31 Dec 1999 23:59:59 GMT", "1"),
        ("1.5", "1"),
        ("\xb2", "1"),
    ],
)
async def test_a_503_of_an_upstream_says_when_to_come_back_in_seconds(said: str, heard: str) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:

        async def busy(_: Seen) -> bytes:
            line = f"Retry-After: {said}\r\n".encode("latin-1") if said else b""
            return b"HTTP/1.1 503 Service Unavailable\r\n" + line + b"content-length: 0\r\n\r\n"

        up.answer = busy
        client.send("/v2/models/digits/infer", b"x")
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert [line[13:] for line in head.lower().split(b"\r\n") if line.startswith(b"retry-after:")] == [
            heard.encode()
        ]


@pytest.mark.parametrize(
    ("status", "said", "heard"),
    [(500, "7", None), (504, "7", None), (429, "", "1"), (429, "7200", "7200"), (429, "0", "1"), (200, "7", "7")],
)
async def test_other_answers_of_an_upstream_say_when_to_come_back_where_that_helps(
    status: int, said: str, heard: str | None
) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:

        async def answer(_: Seen) -> bytes:
            line = f"Retry-After: {said}\r\n" if said else ""
            return f"HTTP/1.1 {status} Some\r\n{line}content-length: 0\r\n\r\n".encode()

        up.answer = answer
        for _ in range(3):
            assert (await client.ask("/v2/models/digits/infer", b"x")).headers.get("retry-after") == heard


@pytest.mark.parametrize("route", ["", "deterministic = true\ncache_s = 60\n"])
async def test_every_answer_has_one_date_the_upstreams_if_it_has_one(route: str) -> None:
    """RFC 9110 section 6.6.1; it holds for answers from the cache and for streamed ones as well."""
    old = "Sun, 06 Nov 1994 08:49:37 GMT"
    async with upstream() as up:
        files = documents([up.port])
        files["all.toml"] = files["all.toml"].replace(b'model = "*"\n', b'model = "*"\n' + route.encode(), 1)
        async with gateway(files) as (port, _), Client(port) as client:
            for line in (f"Date: {old}\r\n", ""):

                async def answer(_: Seen, line: str = line) -> bytes:
                    return f"HTTP/1.1 200 OK\r\n{line}content-length: 1\r\n\r\nx".encode()

                up.answer = answer
                for _ in range(4):
                    client.send("/v2/models/digits/infer", line.encode())
                    head = await client.reader.readuntil(b"\r\n\r\n")
                    await client.reader.readexactly(1)
                    (date,) = [each[6:] for each in head.decode().split("\r\n") if each.lower().startswith("date: ")]
                    assert (date == old) == bool(line)

            async def streamed(_: Seen) -> bytes:
                return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"

            up.answer = streamed
            client.send("/v2/models/digits/infer", b"other")
            assert b"\r\ndate: " in await client.reader.readuntil(b"\r\n\r\n")


async def test_what_an_upstream_says_of_limits_is_not_the_gateways_word() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:

        async def answer(_: Seen) -> bytes:
            return b'HTTP/1.1 200 OK\r\nRateLimit: "x";r=0\r\nratelimit-policy: "x";q=1\r\ncontent-length: 0\r\n\r\n'

        up.answer = answer
        assert not {"ratelimit", "ratelimit-policy"} & set((await client.ask("/v2/models/digits/infer")).headers)


async def test_tokens_that_an_upstream_has_left_are_passed_on_to_a_tenant_without_token_limits() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:

        async def answer(_: Seen) -> bytes:
            return b"HTTP/1.1 200 OK\r\nx-ratelimit-remaining-tokens: 7\r\ncontent-length: 0\r\n\r\n"

        up.answer = answer
        reply = await client.ask("/v1/chat/completions", b"{}")
        assert reply.headers["x-ratelimit-remaining-tokens"] == "7"
