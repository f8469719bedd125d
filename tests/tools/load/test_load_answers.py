"""Answers that count as failures of a load although their status is good, judged one by one and in a whole load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.gateway.stack import GOLD, documents, gateway, grpc_server

from oriel_tools.load.answers import MAX_JUDGED_BYTES, Events, body_of, stream_fault
from oriel_tools.load.command import offer
from oriel_tools.load.report import as_document
from oriel_tools.load.scenario import Phase, Scenario, Stream
from oriel_wire.h1.chunked import LAST_CHUNK, chunk
from oriel_wire.h1.response import ResponseMemo, parse_response_head
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.proto import v2_pb2

ENDED = b'data: {"error": "too late", "reason": "deadline_exceeded", "request_id": "x"}\n\n'
CLOSE = "connection: close"  # of a server that does: the next request could be sent on the same connection meanwhile
EVENTS = "content-type: text/event-stream; charset=utf-8"
JSON = "content-type: application/json"


def fault(head: str, *pieces: bytes) -> str:
    body = body_of(parse_response_head(f"HTTP/1.1 200 OK\r\n{head}".encode(), ResponseMemo()))
    if body is None:
        return ""
    for piece in pieces:
        body.feed(piece)
    return body.fault()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", ""),
        (b"data: 1\n\ndata: [DONE]\n\n", ""),
        (b"data: 1\n\n: still here", ""),
        (b"data: 1\n\n" + ENDED, "deadline_exceeded"),
        (b"data: 1\r\n\r\n" + ENDED.replace(b"\n", b"\r\n"), "deadline_exceeded"),
        (b"data: 1\r\r" + ENDED.replace(b"\n", b"\r"), "deadline_exceeded"),
        (ENDED[:-1], "deadline_exceeded"),
        (b'data: {"error": {"message": "m", "reason": "upstream_broken"}}\n\n', "upstream_broken"),
        (b'data: {"error":\ndata: "two lines"}\n\n', "two lines"),
        (b'data: {"error": {"code": 5}}\n\n', "error"),
        (b"event: error\ndata: it broke\n\n", "it broke"),
        (b'event: error\ndata: {"error": "text", "reason": "why"}\n\n', "why"),
        (b"event: error\n\n", "error"),
        (b'data: {"model_name": "m", "error": "an output"}\n\n', ""),
        (b'data: {"error": null}\n\ndata: {"error": ""}\n\ndata: {"error": {}}\n\n', ""),
        (b'data: "error"\n\ndata: error\n\ndata: [{"error": "x"}]\n\n', ""),
        (b"data: 1\n\ndata: 2", "cut"),
        (b"data: " + b"x" * 2 * MAX_JUDGED_BYTES, "cut"),
        (b"data: " + b"x" * 2 * MAX_JUDGED_BYTES + b"\n\n", ""),
        (b"data: " + b"x" * 2 * MAX_JUDGED_BYTES + b"\n\n" + ENDED, "deadline_exceeded"),
    ],
)
def test_a_stream_of_events_says_that_it_failed(text: bytes, said: str) -> None:
    size = max(1, len(text) // 40)
    assert fault(EVENTS, text) == fault(EVENTS, *(text[at : at + size] for at in range(0, len(text), size))) == said


@given(st.lists(st.sampled_from([b"data: 1", b'data: {"error": "x"}', b"event: error", b": error", b""])), st.data())
@example([b'data: {"error": "x"}', b""], None)
def test_how_events_are_cut_into_pieces_and_lines_end_changes_nothing(lines: list[bytes], data: Any) -> None:
    whole = Events()
    whole.feed(b"".join(line + b"\n" for line in lines))
    for end in (b"\n", b"\r", b"\r\n"):
        text = b"".join(line + end for line in lines)
        places = [] if data is None else sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
        pieces = Events()
        for start, stop in zip([0, *places], [*places, len(text)], strict=True):
            pieces.feed(text[start:stop])
        assert pieces.fault() == whole.fault()


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_no_bytes_from_outside_break_it(pieces: list[bytes]) -> None:
    for head in (EVENTS, JSON):
        assert isinstance(fault(head, *pieces), str)
    assert isinstance(stream_fault(b"".join(pieces)), str)


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        (JSON, b'{"error": "no", "reason": "upstream_broken"}', "upstream_broken"),
        ("content-type: application/problem+json", b'{"error": "no\\nroom"}', "noroom"),
        (JSON, b'{"outputs": [], "error": null}', ""),
        (JSON, b'{"model_name": "m", "error": "an output"}', ""),
        (JSON, b'{"error": "cut', ""),
        (JSON, b'{"error": "' + b"x" * MAX_JUDGED_BYTES + b'"}', ""),
        (f"{JSON}\r\ncontent-encoding: gzip", b'{"error": "no"}', ""),
        ("content-type: application/octet-stream", b'{"error": "no"}', ""),
        ("x-none: of it", b'{"error": "no"}', ""),
    ],
)
def test_a_whole_answer_that_is_an_error(head: str, body: bytes, said: str) -> None:
    assert fault(head, body) == fault(head, body[:5], body[5:]) == said


async def counts(url: str, **stream: Any) -> dict[str, Any]:
    """Return the tier's figures for ten requests."""
    asked = Scenario(
        stream=[Stream(url=url, tier="gold", **stream)],
        phase=[Phase(name="only", rate=100, seconds=0.11, arrivals="uniform")],
        max_lag_ms=60_000,
    )
    found: dict[str, Any] = as_document(asked, await offer(asked), version="0")["phases"][0]["tiers"]["gold"]
    assert found["scheduled"] == 10
    return found


@asynccontextmanager
async def saying(*, rest: bytes) -> AsyncIterator[int]:
    """Yield the port of a server that answers with one event and `rest`, and then closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{EVENTS}\r\n{CLOSE}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        writer.write(chunk(b"data: 1\n\n") + rest)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_a_stream_that_the_gateway_ends_has_failed_with_its_reason() -> None:
    """A regression: such streams were counted as good answers, because their status is 200 and their chunks end
    properly.
    """
    async with saying(rest=b"") as up, gateway(documents([up])) as (port, _):
        url = f"http://127.0.0.1:{port}/v2/models/digits/generate_stream"
        # The gateway closes the connection after such a stream, and announces that only to clients that ask for it.
        found = await counts(url, key=GOLD, headers={"connection": "close"})
    assert (found["good"], found["failed"], found["refused"]) == (0, {"200 upstream_broken": 10}, {})


@pytest.mark.parametrize(
    ("rest", "failed"),
    [
        (b"", {"broken": 10}),
        (chunk(b"data: 2\n"), {"broken": 10}),
        (chunk(b"data: 2\n") + LAST_CHUNK, {"200 cut": 10}),
        (chunk(ENDED) + LAST_CHUNK, {"200 deadline_exceeded": 10}),
        (LAST_CHUNK, {}),
    ],
    ids=["no end", "no end within an event", "an end within an event", "an error", "whole"],
)
async def test_only_a_whole_stream_is_good(rest: bytes, failed: dict[str, int]) -> None:
    async with saying(rest=rest) as port:
        found = await counts(f"http://127.0.0.1:{port}/x")
    assert (found["failed"], found["good"]) == (failed, 0 if failed else 10)


class _Streaming(grpc.GenericRpcHandler):
    """Streams these messages ("" stands for an answer of the model, any other text for an error), and ends with this
    code.
    """

    def __init__(self, *messages: str, code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self._messages = messages
        self._code = code

    def service(self, details: Any) -> Any:
        async def answer(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
            (name,) = [v2_pb2.ModelInferRequest.FromString(each).model_name async for each in requests]
            for words in self._messages:
                response = v2_pb2.ModelStreamInferResponse(error_message=words)
                response.infer_response.model_name = name
                yield response.SerializeToString()
            if self._code is not grpc.StatusCode.OK:
                await context.abort(self._code, "no", (("x-oriel-reason", "upstream_broken"),))

        return grpc.stream_stream_rpc_method_handler(answer)


@pytest.mark.parametrize(
    ("handler", "good", "failed", "refused"),
    [
        (_Streaming("", "", ""), 10, {}, {}),
        (_Streaming(), 10, {}, {}),
        (_Streaming("", "no such model", ""), 0, {"OK no such model": 10}, {}),
        (_Streaming("", code=grpc.StatusCode.UNAVAILABLE), 0, {"UNAVAILABLE upstream_broken": 10}, {}),
        (_Streaming(code=grpc.StatusCode.UNAVAILABLE), 0, {}, {"UNAVAILABLE upstream_broken": 10}),
    ],
    ids=["whole", "no answers", "an error among them", "cut", "refused"],
)
async def test_a_grpc_stream_with_an_error_in_it_has_failed(
    tmp_path: Path, handler: _Streaming, good: int, failed: dict[str, int], refused: dict[str, int]
) -> None:
    body = tmp_path / "request.bin"
    body.write_bytes(v2_pb2.ModelInferRequest(model_name="m").SerializeToString())
    async with grpc_server(handler) as port:
        found = await counts(f"grpc://127.0.0.1:{port}/{SERVICE}/ModelStreamInfer", body=str(body))
    assert (found["good"], found["failed"], found["refused"]) == (good, failed, refused)
