import asyncio

import pytest

from oriel_cli.demo.closed_loop import Figures, Shot, drive
from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.process.process import listen

SHOT = Shot(target="/x", headers=[("x-key", "k")], body=b"12345")


@pytest.mark.parametrize(("status", "good"), [(200, True), (503, False)])
async def test_a_load_counts_good_answers_and_names_the_others(status: int, good: bool) -> None:
    busiest = under_way = 0

    def handler(exchange: Exchange) -> None:
        nonlocal busiest, under_way
        assert exchange.body == b"12345" and exchange.head.get("x-key") == "k"
        under_way += 1
        busiest = max(busiest, under_way)
        asyncio.get_running_loop().call_later(0.005, finish, exchange)

    def finish(exchange: Exchange) -> None:
        nonlocal under_way
        under_way -= 1
        exchange.respond(status, [])

    server = await serve(handler, listen("127.0.0.1", 0, "x"), limits=HttpLimits())
    client = HttpClient(host="127.0.0.1", port=server.port, max_connections=4)
    try:
        figures = await drive(client, SHOT, callers=4, duration_s=0.1)
    finally:
        await client.close()
        await server.drain(1)
    assert busiest == 4, "each caller has one request under way"
    assert bool(figures.latencies_s) == good and (set(figures.others) == (set() if good else {"503"}))


async def test_a_server_that_is_gone_is_counted_not_raised() -> None:
    sock = listen("127.0.0.1", 0, "x")
    port = sock.getsockname()[1]
    sock.close()
    client = HttpClient(host="127.0.0.1", port=port)
    figures = await drive(client, SHOT, callers=2, duration_s=0.05)
    await client.close()
    assert set(figures.others) == {"UpstreamUnreachable"} and figures.per_second == 0


def test_figures_add_up() -> None:
    figures = Figures(elapsed_s=1.0, latencies_s=[0.004, 0.001], others={"503": 1})
    figures.add(Figures(elapsed_s=1.0, latencies_s=[0.002, 0.003], others={"503": 2, "429": 1}))
    assert figures.as_document() == {
        "requests_per_s": 2.0,
        "p50_ms": 3.0,
        "p99_ms": 4.0,
        "answers": 4,
        "others": {"503": 3, "429": 1},
    }
    assert Figures().as_document()["p99_ms"] == 0
