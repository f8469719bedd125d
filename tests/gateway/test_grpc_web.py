"""gRPC-Web at the public port: what a page in a browser can send and read, over HTTP/1.1 and HTTP/2."""

import asyncio
import json
import re
import shutil
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from oriel_gateway.call.call import GatewayCall
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused

from ..waiting import until
from .grpc_stack import Backend, idle, stack
from .raw_grpc import raw_call
from .stack import GOLD, LIMITED

BINARY, TEXT = "application/grpc-web+proto", "application/grpc-web-text"
SERVICE = "/inference.GRPCInferenceService/"
INFER = SERVICE + "ModelInfer"
PAGE = "https://app.example"
CORS = f'[http]\ncors_origins = ["{PAGE}"]'
KEY = {"authorization": f"Bearer {GOLD}"}
DOCUMENTED = Path(__file__).resolve().parents[2] / "docs" / "http.md"
VERSIONS = pytest.mark.parametrize("http2", [False, True], ids=["http1", "http2"])
FORMS = pytest.mark.parametrize("kind", [BINARY, TEXT])


def message(model: str = "digits", size: int = 8) -> bytes:
    request = service_pb2.ModelInferRequest(model_name=model, raw_input_contents=[bytes(size)])
    return bytes(request.SerializeToString())


def framed(*messages: bytes, kind: str = BINARY) -> bytes:
    body = b"".join([b"\0" + len(each).to_bytes(4, "big") + each for each in messages])
    return b64encode(body) if kind == TEXT else body


def plain(answer: httpx.Response, body: bytes) -> bytes:
    """Return the body of an answer as bytes; each piece of the text form may be padded."""
    if not answer.headers["content-type"].startswith(TEXT):
        return body
    return b"".join([b64decode(body[at : at + 4], validate=True) for at in range(0, len(body), 4)])


def read(answer: httpx.Response, body: bytes | None = None) -> tuple[list[bytes], dict[str, str]]:
    """Return the messages of an answer, and its trailers."""
    data = plain(answer, answer.content if body is None else body)
    messages: list[bytes] = []
    while data:
        size = int.from_bytes(data[1:5], "big")
        frame, first, data = data[5 : 5 + size], data[0], data[5 + size :]
        assert len(frame) == size
        if first == 0x80:
            assert not data and frame.endswith(b"\r\n")
            pairs = [line.split(": ", 1) for line in frame.decode("ascii").split("\r\n")[:-1]]
            return messages, dict(pairs)  # type: ignore[arg-type]
        assert first == 0
        messages.append(frame)
    return messages, dict(answer.headers)


@asynccontextmanager
async def web(backend: Backend, http2: bool, **more: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Gateway]]:
    async with (
        stack(backend, **more) as (address, core),
        httpx.AsyncClient(
            base_url=f"http://{address}", http1=not http2, http2=http2, trust_env=False, timeout=60, headers=KEY
        ) as client,
    ):
        yield client, core
        await until(lambda: idle(core) and not core.pools["p"].held_bytes and not core.unread.bytes)


class Many(Backend):
    """Answers each message of a stream with `count` messages of `size` bytes."""

    def __init__(self, count: int = 3, size: int = 8) -> None:
        super().__init__()
        self.count, self.size, self.sent, self.ended = count, size, 0, asyncio.Event()

    async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for received in messages:
            request = service_pb2.ModelInferRequest.FromString(received)
            for number in range(self.count):
                inferred = service_pb2.ModelInferResponse(
                    model_name=request.model_name, id=str(number), raw_output_contents=[bytes(self.size)]
                )
                self.sent += 1
                yield service_pb2.ModelStreamInferResponse(infer_response=inferred).SerializeToString()
        self.ended.set()


@VERSIONS
@FORMS
async def test_a_call_is_answered_with_its_trailers_in_the_body(http2: bool, kind: str) -> None:
    backend = Backend()
    async with web(backend, http2) as (client, core):
        more = {"content-type": kind, "x-mine": "1", "x-grpc-web": "1", "x-user-agent": "u", "cookie": "a=b"}
        more |= {"origin": PAGE, "sec-fetch-mode": "cors", "grpc-timeout": "5S", "x-request-id": "abc"}
        for _ in range(2):
            answer = await client.post(INFER, headers=more, content=framed(message(), kind=kind))
            assert answer.status_code == 200 and "connection" not in answer.headers and "date" in answer.headers
            assert answer.headers["content-type"] == (kind if "+" in kind else kind + "+proto")
            (inferred,), trailers = read(answer)
            assert service_pb2.ModelInferResponse.FromString(inferred).model_name == "digits"
            assert trailers["grpc-status"] == "0" and trailers["x-request-id"] == "abc"
            assert {"traceresponse", "server-timing"} <= set(trailers)
        assert len(backend.seen) == 2
        _, request, metadata, left_s = backend.seen[0]
        assert request.raw_input_contents == [bytes(8)] and left_s <= 5.1
        assert metadata["x-mine"] == "1" and metadata["x-oriel-tenant"] == "g" and metadata["x-oriel-tier"] == "gold"
        unwanted = {"x-grpc-web", "x-user-agent", "cookie", "origin", "sec-fetch-mode", "accept", "authorization"}
        assert not unwanted & set(metadata)


@pytest.mark.parametrize(
    ("kind", "accepted", "answered"),
    [
        ("application/grpc-web", "*/*", BINARY),
        ("application/grpc-web; charset=x", TEXT, TEXT + "+proto"),
        (TEXT, BINARY, BINARY),
        (TEXT + "+proto", "*/*", TEXT + "+proto"),
    ],
)
async def test_the_form_of_the_answer_is_the_one_that_is_accepted(kind: str, accepted: str, answered: str) -> None:
    async with web(Backend(), False) as (client, _):
        body = framed(message(), kind=kind[: len(TEXT)])
        answer = await client.post(INFER, headers={"content-type": kind, "accept": accepted}, content=body)
        assert answer.headers["content-type"] == answered and read(answer)[1]["grpc-status"] == "0"


@VERSIONS
@pytest.mark.parametrize(
    ("path", "more", "body", "code", "reason"),
    [
        (INFER, {"authorization": ""}, framed(message()), 16, "unauthenticated"),
        (INFER, {"authorization": "Bearer wrong"}, framed(message()), 16, "unauthenticated"),
        (INFER, {"x-api-key": GOLD}, framed(message()), 3, "ambiguous_credentials"),
        (INFER, {"grpc-timeout": "soon"}, framed(message()), 3, "bad_request"),
        (INFER, {}, framed(message("../x")), 5, "not_found"),
        (INFER, {}, b"", 3, "bad_request"),
        (INFER, {}, framed(message())[:-1], 3, "bad_request"),
        (INFER, {}, b"\x80" + framed(message())[1:], 3, "bad_request"),
        (INFER, {}, framed(message(), message()), 3, "bad_request"),
        (INFER, {}, framed(message(size=1_000_001)), 8, "too_large"),
        (INFER, {"content-type": TEXT}, b"====", 3, "bad_request"),
        (INFER, {"content-type": TEXT}, framed(message(), kind=TEXT)[:-1], 3, "bad_request"),
        (SERVICE + "ModelStreamInfer", {}, framed(message(), message()), 3, "bad_request"),
        ("/its.Own/Method", {}, framed(message()), 12, "not_found"),
        (SERVICE + "RepositoryIndex", {}, framed(b""), 12, "method_not_allowed"),
    ],
)
async def test_a_refusal_is_a_head_with_the_same_status_as_over_grpc(
    http2: bool, path: str, more: dict[str, str], body: bytes, code: int, reason: str
) -> None:
    backend = Backend()
    async with web(backend, http2, extra=CORS) as (client, core):
        if more.get("authorization") == "":
            del client.headers["authorization"]
            more = {}
        answer = await client.post(path, headers={"content-type": BINARY, "origin": PAGE, **more}, content=body)
        assert answer.status_code == 200 and not answer.content
        assert answer.headers["content-type"].startswith("application/grpc-web")
        assert (answer.headers["grpc-status"], answer.headers["x-oriel-reason"]) == (str(code), reason)
        assert answer.headers["grpc-message"] and answer.headers["x-request-id"]
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert not backend.seen and idle(core) and not core.pools["p"].held_bytes


@VERSIONS
async def test_limits_hold_and_say_when_to_come_back(http2: bool) -> None:
    async with web(Backend(), http2) as (client, _):
        headers = {"authorization": f"Bearer {LIMITED}", "content-type": BINARY}
        answers = [await client.post(INFER, headers=headers, content=framed(message())) for _ in range(3)]
        assert [read(answer)[1]["grpc-status"] for answer in answers] == ["0", "0", "8"]
        assert answers[2].headers["retry-after"] == "2" and "ratelimit" in read(answers[0])[1]


@VERSIONS
@FORMS
async def test_a_stream_of_one_message_gets_many(http2: bool, kind: str) -> None:
    backend = Many()
    async with web(backend, http2) as (client, _):
        for _ in range(2):
            body = framed(message(), kind=kind)
            answer = await client.post(SERVICE + "ModelStreamInfer", headers={"content-type": kind}, content=body)
            messages, trailers = read(answer)
            ids = [service_pb2.ModelStreamInferResponse.FromString(each).infer_response.id for each in messages]
            assert ids == ["0", "1", "2"] and trailers["grpc-status"] == "0"
            await asyncio.wait_for(backend.ended.wait(), 30)
            backend.ended.clear()


@VERSIONS
async def test_a_page_that_does_not_read_pauses_the_upstream(http2: bool) -> None:
    backend = Many(count=400, size=64 * 1024)
    async with web(backend, http2) as (client, core):
        headers = {"content-type": BINARY}
        async with client.stream(
            "POST", SERVICE + "ModelStreamInfer", headers=headers, content=framed(message())
        ) as answer:
            pieces = answer.aiter_raw()
            body = [await anext(pieces)]
            await until(lambda: core.unread.bytes > 0)
            assert backend.sent < 400
            body += [piece async for piece in pieces]
        messages, trailers = read(answer, b"".join(body))
        assert len(messages) == 400 and trailers["grpc-status"] == "0"


@pytest.mark.parametrize("kind", ["application/grpc", BINARY])
async def test_an_answer_that_ends_before_it_is_read_is_not_counted_for_ever(kind: str) -> None:
    """Such an answer leaves the budget of unread answers once the client has read it."""
    async with stack(Many(count=3, size=100_000)) as (address, core):
        path, body = SERVICE + "ModelStreamInfer", framed(message())
        answer = await asyncio.wait_for(raw_call(address, path, KEY, body, kind=kind), 30)
        assert len(answer.data) > 300_000
        await until(lambda: not core.unread.bytes, timeout_s=30.0)


@VERSIONS
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
async def test_a_page_that_leaves_frees_its_place(http2: bool, method: str) -> None:
    backend = Many(count=1_000_000)
    backend.hold = asyncio.Event()
    async with web(backend, http2) as (client, core):
        body = framed(message())
        asking = client.build_request("POST", SERVICE + method, headers={"content-type": BINARY}, content=body)
        task = asyncio.create_task(client.send(asking, stream=True))
        await until(lambda: bool(backend.seen or backend.sent))
        task.cancel()
        if http2 or method == "ModelStreamInfer":  # httpx does not reset a request that it cancels
            await client.aclose()
        await until(lambda: idle(core))


@VERSIONS
@FORMS
async def test_the_deadline_is_that_of_grpc(http2: bool, kind: str) -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with web(backend, http2) as (client, _):
        headers = {"content-type": kind, "grpc-timeout": "100m"}
        answer = await client.post(INFER, headers=headers, content=framed(message(), kind=kind))
        assert (answer.headers["grpc-status"], answer.headers["x-oriel-reason"]) == ("4", "deadline_exceeded")


async def test_the_deadline_bounds_a_body_that_does_not_come() -> None:
    async with stack(Backend()) as (address, core):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-type: {BINARY}\r\nauthorization: Bearer {GOLD}\r\n"
        writer.write(f"{head}grpc-timeout: 50m\r\ncontent-length: 100\r\n\r\n".encode() + b"\0\0")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert b"grpc-status: 4" in answer and b"x-oriel-reason: deadline_exceeded" in answer and idle(core)


@VERSIONS
@FORMS
async def test_a_large_message_comes_in_pieces_and_is_on_the_byte_budget(http2: bool, kind: str) -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with web(backend, http2) as (client, core):
        whole = framed(message(size=900_000), kind=kind)
        go = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(whole), 50_001):
                yield whole[at : at + 50_001]
                if at > len(whole) // 2:
                    await go.wait()

        asking = asyncio.create_task(client.post(INFER, headers={"content-type": kind}, content=pieces()))
        await until(lambda: core.pools["p"].held_bytes > 900_000)
        go.set()
        await until(lambda: bool(backend.seen))
        backend.hold.set()
        assert read(await asking)[1]["grpc-status"] == "0"
        assert backend.seen[0][1].raw_input_contents == [bytes(900_000)]


async def test_a_byte_behind_the_message_is_refused_before_the_body_ends() -> None:
    """The bytes behind the message are not collected until the time for a body has passed."""
    async with stack(Backend()) as (address, core):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = framed(message()) + b"\0"
        head = f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-type: {BINARY}\r\nauthorization: Bearer {GOLD}\r\n"
        writer.write(f"{head}content-length: {len(body) + 1}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert b"grpc-status: 3" in answer and b"connection: close" in answer and idle(core)


@VERSIONS
async def test_an_upstreams_error_keeps_its_status_and_text(http2: bool) -> None:
    async with web(Backend(), http2) as (client, _):
        answer = await client.post(INFER, headers={"content-type": BINARY}, content=framed(message("broken")))
        assert (answer.headers["grpc-status"], answer.headers["grpc-message"]) == ("3", "unexpected shape")


@VERSIONS
async def test_a_stream_that_fails_ends_with_its_status(http2: bool) -> None:
    class Failing(Many):
        async def stream(self, messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for part in super().stream(messages, context):
                yield part
            await context.abort(grpc.StatusCode.DATA_LOSS, "lost")

    async with web(Failing(), http2) as (client, _):
        headers = {"content-type": BINARY}
        answer = await client.post(SERVICE + "ModelStreamInfer", headers=headers, content=framed(message()))
        messages, trailers = read(answer)
        assert len(messages) == 3 and trailers["grpc-status"] == "15" and trailers["grpc-message"] == "lost"


@VERSIONS
async def test_an_answer_that_ends_within_a_message_is_cut_off(http2: bool) -> None:
    """Trailers in the body would be read as more of the message."""

    class Large(Backend):
        async def unary(self, method: str, received: bytes, context: Any) -> bytes:
            return bytes(1 << 25)

    async with web(Large(), http2) as (client, core):
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", INFER, headers={"content-type": BINARY}, content=framed(message())) as got:
                pieces = got.aiter_raw()
                await anext(pieces)
                (call,) = core.clock
                assert isinstance(call, GatewayCall)
                call.refuse(Refused(Outcome.UPSTREAM_BROKEN, "the upstream is gone"))
                async for _ in pieces:
                    pass


@VERSIONS
async def test_health_needs_no_key(http2: bool) -> None:
    async with web(Backend(), http2) as (client, _):
        del client.headers["authorization"]
        answer = await client.post(SERVICE + "ServerLive", headers={"content-type": BINARY}, content=framed(b""))
        (alive,), trailers = read(answer)
        assert alive == b"\x08\x01" and trailers["grpc-status"] == "0"


@VERSIONS
async def test_a_page_may_ask_and_read_what_it_needs(http2: bool) -> None:
    async with web(Backend(), http2, extra=CORS) as (client, _):
        asked = "authorization,content-type,grpc-timeout,x-grpc-web,x-user-agent"
        headers = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": asked}
        preflight = await client.options(INFER, headers=headers)
        assert preflight.status_code == 204
        assert set(asked.split(",")) <= set(preflight.headers["access-control-allow-headers"].split(", "))
        answer = await client.post(INFER, headers={"content-type": BINARY, "origin": PAGE}, content=framed(message()))
        exposed = set(answer.headers["access-control-expose-headers"].split(", "))
        assert {"grpc-status", "grpc-message", "x-oriel-reason", "x-request-id", "retry-after"} <= exposed
        assert answer.headers["access-control-allow-origin"] == PAGE and answer.headers["vary"] == "origin"
        other = await client.post(INFER, headers={"content-type": BINARY, "origin": "x"}, content=framed(message()))
        assert "access-control-allow-origin" not in other.headers and other.headers["vary"] == "origin"


@FORMS
async def test_the_model_is_named_in_the_first_64_kib(kind: str) -> None:
    async with stack(Backend()) as (address, core):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = framed(service_pb2.ModelInferRequest(raw_input_contents=[bytes(900_000)]).SerializeToString(), kind=kind)
        head = f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-type: {kind}\r\nauthorization: Bearer {GOLD}\r\n"
        # the rest of the body is not waited for
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:100_000])
        answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
        assert b"grpc-status: 3" in answer and b"connection: close" in answer and not core.pools["p"].held_bytes
        writer.close()


async def test_a_few_unknown_keys_in_a_row_end_the_connection() -> None:
    async with stack(Backend()) as (address, _):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = framed(message())
        head = f"POST {INFER} HTTP/1.1\r\nhost: a\r\ncontent-type: {BINARY}\r\nx-api-key: wrong\r\n"
        for number in range(8):
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            assert b"grpc-status: 16" in answer and (b"connection: close" in answer) == (number == 7)
        assert await asyncio.wait_for(reader.read(), 30) == b""
        writer.close()


async def test_an_http_1_0_client_reads_to_the_end_of_its_connection() -> None:
    async with stack(Backend()) as (address, _):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = framed(message())
        head = f"POST {INFER} HTTP/1.0\r\ncontent-type: {BINARY}\r\nauthorization: Bearer {GOLD}\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        start, _, rest = answer.partition(b"\r\n\r\n")
        assert b"connection: close" in start and b"transfer-encoding" not in start
        assert read(httpx.Response(200, headers={"content-type": BINARY}), rest)[1]["grpc-status"] == "0"


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
async def test_the_documented_example_works() -> None:
    found = re.search(r"^```js\n(.*?)^```$", DOCUMENTED.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    script = f"{found[1]}ready(...process.argv.slice(1)).then((it) => console.log(JSON.stringify(it)), console.log);"
    async with stack(Backend()) as (address, _):

        async def printed(key: str) -> str:
            words = ("node", "-e", script, f"http://{address}", key, "digits")
            node = await asyncio.create_subprocess_exec(*words, stdout=asyncio.subprocess.PIPE)
            return (await node.communicate())[0].decode()

        answer = json.loads(await printed(GOLD))
        assert answer["ready"] is True and answer["trailers"].startswith("grpc-status: 0\r\nx-request-id: ")
        assert "Error: unauthenticated: " in await printed("wrong")
