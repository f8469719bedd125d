"""Bodies on their way through a unit: streamed answers, bodies that are read while they come, and their bounds."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from oriel_logic.errors import Outcome, Refused
from oriel_logic.server.inbound import AHEAD_BYTES
from oriel_logic.server.replies import Reply

from ..waiting import until
from .callers import Connection, counted

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "services"


async def test_a_body_without_a_length_is_bounded_too(stack: Any) -> None:
    logic = await stack(EXAMPLES, max_body_bytes=100)

    async def chunks(count: int, size: int) -> Any:
        for _ in range(count):
            yield b"x" * size

    answer = await logic.client.post("/v1/services/digits", content=chunks(3, 50))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    answer = await logic.client.post("/v1/services/digits", content=chunks(30, 1 << 20))
    assert (answer.status_code, answer.headers["connection"]) == (413, "close")
    liar = await Connection.call(logic.port, "digits", b"", declared=999_999_999)
    assert await liar.status() == 413  # before it is read
    liar.leave()


async def test_an_answer_may_be_streamed_piece_by_piece(stack: Any, services: Any) -> None:
    logic = await stack(services())
    go, closed = asyncio.Event(), asyncio.Event()

    async def pieces() -> Any:
        try:
            yield b"one "
            await go.wait()
            yield b"two"
        finally:
            closed.set()

    async def serve(inbound: Any, visit: Any) -> Reply:
        return Reply(status=200, content_type="text/plain", pieces=pieces())

    logic.unit.dispatch.routes["GET", "/stream"] = serve
    async with logic.client.stream("GET", "/stream") as answer:
        coming = answer.aiter_raw()
        assert await anext(coming) == b"one " and answer.headers["transfer-encoding"] == "chunked"
        go.set()
        assert [piece async for piece in coming] == [b"two"]
    await closed.wait()
    go.clear()
    closed.clear()
    async with logic.client.stream("GET", "/stream") as answer:
        assert await anext(answer.aiter_raw()) == b"one "
    await closed.wait()
    await until(lambda: counted(logic, "", "client_left"))
    assert (counted(logic, "", "ok"), logic.unit.envelope.in_flight) == (1, 0)


@pytest.mark.parametrize("trusted", [True, False])
async def test_the_cost_of_a_stream_follows_its_last_piece_and_only_trusted_peers_see_it(
    stack: Any, services: Any, trusted: bool
) -> None:
    """A stream said nothing of its cost, so the gateway estimated what its servers had recorded already."""
    logic = await stack(services(), **({} if trusted else {"trusted_peers": ("10.0.0.0/8",)}))

    def serving(failing: bool) -> Any:
        async def serve(inbound: Any, visit: Any) -> Reply:
            async def pieces() -> Any:
                yield b"one"
                visit.ledger.reported(3, "dev=7;cpu=0;class=h100")
                visit.ledger.cpu_ns, visit.ledger.tokens_in, visit.ledger.tokens_out = 5, 2, 1
                if failing:
                    visit.outcome = Outcome.HANDLER_FAILED

            return Reply(status=200, content_type="text/plain", pieces=pieces())

        return serve

    async def raw(unbilled: str = "") -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", logic.port)
        more = f"x-oriel-unbilled: {unbilled}\r\n" if unbilled else ""
        writer.write(f"GET /stream HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{more}\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        assert "x-oriel-cost:" not in head and ("trailer: x-oriel-cost" in head) is trusted
        return body.partition("\r\n0\r\n")[2]

    logic.unit.dispatch.routes["GET", "/stream"] = serving(False)
    cost = "x-oriel-cost-us: 3\r\nx-oriel-cost: dev=7;cpu={};class=h100{}\r\n\r\n"
    assert await raw() == (cost.format(5, ";tin=2;tout=1") if trusted else "\r\n")
    assert await raw("shadow") == (cost.format(0, "") if trusted else "\r\n")
    logic.unit.dispatch.routes["GET", "/stream"] = serving(True)
    assert await raw() == (cost.format(0, "") if trusted else "\r\n")


async def test_a_stream_that_fails_has_a_status_before_its_first_piece_and_a_body_is_read_while_it_comes(
    stack: Any, services: Any, caplog: Any
) -> None:
    logic = await stack(services())

    async def pieces(count: int) -> Any:
        for _ in range(count):
            yield b"x"
        raise Refused("no")

    async def serve(inbound: Any, visit: Any) -> Reply:
        return Reply(status=200, pieces=pieces(int(inbound.query)))

    logic.unit.dispatch.routes["GET", "/stream"] = serve
    answer = await logic.client.get("/stream?0")
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "no")
    with pytest.raises(httpx.RemoteProtocolError):
        await logic.client.get("/stream?1")
    assert counted(logic, "", "input_refused") == 2 and logic.unit.envelope.in_flight == 0
    sizes: list[int] = []

    async def upload(inbound: Any, visit: Any) -> Reply:
        async for piece in inbound.pieces():
            if not sizes:  # slower than the client: what is read ahead is bounded
                await until(lambda: inbound.body._paused)
            sizes.append(len(piece))
            assert inbound.body.ahead_bytes < 2 * AHEAD_BYTES + 65536
        return Reply(status=200, body=b"%d" % sum(sizes))

    logic.unit.dispatch.routes["POST", "/upload"] = upload
    answer = await logic.client.post("/upload", content=b"x" * (8 << 20))
    assert answer.text == str(8 << 20) and len(sizes) > 3


async def test_a_service_has_a_limit_of_its_own_for_what_it_reads_and_for_files(stack: Any, services: Any) -> None:
    source = """
        from oriel_logic import Upload, service

        @service(max_body_bytes=3_000_000)
        async def keep(file: Upload):
            return sum([len(piece) async for piece in file])

        @service(max_body_bytes=10)
        def short(text: str):
            return len(text)
    """
    logic = await stack(services(keep=source), max_body_bytes=1_000_000)
    kind = "application/octet-stream"
    assert (await logic.post("keep", b"x" * 2_000_000, content_type=kind)).json() == 2_000_000
    answer = await logic.post("keep", b"x" * 3_000_001, content_type=kind)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "input_too_large")
    assert (await logic.post("short", b"x" * 11, content_type="text/plain")).status_code == 413
    assert (await logic.post("short", b"x" * 10, content_type="text/plain")).json() == 10
