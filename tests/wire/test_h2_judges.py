"""HTTP/2 and gRPC with peers that were not written here: Node's http2, grpc-js, grpcio, nghttp.

Programs that are not installed are skipped; grpc-js comes from the npm registry by a committed lock.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from npm_packages import installed

from oriel_wire.engine.grpc_client import GrpcClient
from oriel_wire.engine.listener import HttpServer
from oriel_wire.errors import UpstreamUnreachable, UpstreamUnread

from ..waiting import until
from .h2.recorders import TRAILERS
from .h2_peers import App, Borrower, connections_of, endpoint_of, serve
from .judges import needed, run

NODE = Path(__file__).parent / "node"
LARGE = bytes(range(256)) * 4096  # 1 MiB
RIGHT = "every answer was right\n"


@pytest.fixture
async def ours() -> AsyncIterator[tuple[HttpServer, App]]:
    server, app = await serve()
    yield server, app
    await server.drain(0.0)


# Node ----------------------------------------------------------------------------------------------------------------


async def test_nodes_client_finds_every_answer(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    assert await run("node", str(NODE / "client.mjs"), f"http://127.0.0.1:{server.port}") == RIGHT
    assert app[b"/hold"].reset is not None and len(app.connections) == 1


async def test_our_client_gets_every_answer_of_nodes_server_and_leaves_when_it_does() -> None:
    process = await asyncio.create_subprocess_exec(
        needed("node"), str(NODE / "server.mjs"), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None and process.stdout is not None
    endpoint = endpoint_of(int(await process.stdout.readline()), max_connections=3)
    bodies = [b"body %d" % number for number in range(60)] + [LARGE]
    borrowers = [Borrower(endpoint, body=body) for body in bodies]
    assert [await each.answer() for each in borrowers] == bodies
    assert borrowers[-1].trailers == TRAILERS
    assert {each.peer_max_streams for each in connections_of(endpoint)} == {7} and len(connections_of(endpoint)) == 3
    process.stdin.write(b"leave")
    await until(lambda: not connections_of(endpoint))
    with pytest.raises(UpstreamUnreachable):
        await Borrower(endpoint).answer()
    process.stdin.close()
    await process.wait()
    await endpoint.close()


async def test_grpc_js_finds_every_answer(ours: tuple[HttpServer, App]) -> None:
    packages = await asyncio.to_thread(installed, NODE / "grpc-js" / "package-lock.json")
    server, app = ours
    command = ("node", str(NODE / "grpc.cjs"), f"127.0.0.1:{server.port}")
    assert await run(*command, NODE_PATH=str(packages)) == RIGHT
    await until(lambda: app[b"/hold"].reset is not None)


# grpcio --------------------------------------------------------------------------------------------------------------


async def test_grpcio_finds_every_answer(ours: tuple[HttpServer, App]) -> None:
    server, app = ours
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        echo: Any = channel.unary_unary("/echo")
        bodies = [b"message %d" % number for number in range(200)] + [LARGE]
        assert await asyncio.gather(*[echo(body) for body in bodies]) == bodies
        chat: Any = channel.stream_stream("/chat")()
        for number in range(10):
            await chat.write(b"%d" % number)
            assert await chat.read() == b"%d" % number
        await chat.done_writing()
        assert await chat.read() == grpc.aio.EOF and await chat.code() == grpc.StatusCode.OK
        held = asyncio.ensure_future(channel.unary_unary("/hold")(b""))
        await until(lambda: any(call.path == b"/hold" for call in app.calls))
        held.cancel()
        await until(lambda: app[b"/hold"].reset is not None)
        assert await echo(b"after") == b"after"


class Handlers(grpc.GenericRpcHandler):
    """/a.B/Echo answers with its message, /a.B/Repeat with it a hundred times, /a.B/Refuse with a status."""

    def service(self, handler_call_details: Any) -> Any:
        return {
            "/a.B/Echo": grpc.unary_unary_rpc_method_handler(self._echo),
            "/a.B/Repeat": grpc.unary_stream_rpc_method_handler(self._repeat),
            "/a.B/Refuse": grpc.unary_unary_rpc_method_handler(self._refuse),
        }.get(handler_call_details.method)

    async def _echo(self, message: bytes, context: Any) -> bytes:
        return message

    async def _repeat(self, message: bytes, context: Any) -> AsyncIterator[bytes]:
        for _ in range(100):
            yield message

    async def _refuse(self, message: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "nö: 5 %")
        raise AssertionError("abort raises")


async def test_our_client_gets_every_answer_of_grpcios_server() -> None:
    server = grpc.aio.server(handlers=(Handlers(),), options=[("grpc.max_concurrent_streams", 5)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = GrpcClient(host="127.0.0.1", port=port, max_message_bytes=2 * len(LARGE))

    async def messages(path: bytes, body: bytes) -> tuple[list[bytes], int, str]:
        call = client.call(path, (), [body], 240.0)
        got = []
        try:
            while (message := await call.read()) is not None:
                got.append(bytes(message))
        except UpstreamUnread:  # the server counts a stream for a moment longer than it lasts, and refuses the next one
            return await messages(path, body)
        return got, call.code, call.text

    bodies = [b"message %d" % number for number in range(60)] + [LARGE]
    answers = await asyncio.gather(*[messages(b"/a.B/Echo", body) for body in bodies])
    assert answers == [([body], 0, "") for body in bodies]
    assert await messages(b"/a.B/Repeat", bytes(5000)) == ([bytes(5000)] * 100, 0, "")
    assert await messages(b"/a.B/Refuse", b"") == ([], grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "nö: 5 %")
    assert (await messages(b"/a.B/Other", b""))[1] == grpc.StatusCode.UNIMPLEMENTED.value[0]
    await client.close()
    await server.stop(None)


# nghttp2 -------------------------------------------------------------------------------------------------------------


async def test_nghttp_reports_no_error(ours: tuple[HttpServer, App], tmp_path: Path) -> None:
    """With its priorities, padding, a header table of its own and trailers."""
    server, app = ours
    sent = tmp_path / "sent"
    sent.write_bytes(b"x" * 100_000)
    url = f"http://127.0.0.1:{server.port}/echo"
    options = ("--padding=200", "--header-table-size=65536", "--trailer=x-end: 1", "--multiply=20", "--verbose")
    out = await run("nghttp", "--no-push", "--null-out", *options, f"--data={sent}", url)
    assert out.count(":status: 200") == 20 and out.count("grpc-status: 0") == 20
    assert [
        line for line in out.splitlines() if "INVALID" in line or "error_code=" in line and "NO_ERROR" not in line
    ] == []
    assert [len(call.body) for call in app.calls] == [100_000] * 20
