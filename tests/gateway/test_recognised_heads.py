"""The common part of the heads of one connection is parsed and judged once; the rest is judged for each request."""

from .stack import BRONZE, GOLD, Client, Upstream, documents, gateway, upstream

INFER = "/v2/models/digits/infer"


def trace(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


async def asked(client: Client, up: Upstream, number: int, size: int, key: str = GOLD) -> tuple[int, str]:
    headers = f"x-request-id: r{number}\r\ntraceparent: {trace(number)}\r\n"
    reply = await client.ask(INFER, b"b" * size, key=key, headers=headers)
    if reply.status == 200:
        seen = up.seen[-1]
        assert reply.headers["x-request-id"] == seen.get("x-request-id") == f"r{number}"
        assert (seen.get("traceparent") or "")[:36] == reply.headers["traceresponse"][:36] == trace(number)[:36]
        assert seen.body == b"b" * size and seen.get("content-length") == str(size)
        assert seen.head.lower().count("content-length") == seen.head.lower().count("x-request-id") == 1
    return reply.status, up.seen[-1].get("x-oriel-tenant") or ""


async def test_ids_and_sizes_of_their_own() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        for number, size in enumerate((5, 5, 7, 1, 900, 200_000, 3, 0, 2), 1):
            assert await asked(client, up, number, size) == (200, "g")
        ended = core.records.decisions.of("r5")
        assert len(ended) == 1 and ended[0].mark.trace == f"{5:032x}" and ended[0].bytes_in == 900


async def test_another_key_is_another_sender() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        for number in range(1, 5):
            assert await asked(client, up, number, 5) == (200, "g")
        assert (await asked(client, up, 5, 5, "key-nobody"))[0] == 401
        for number in range(6, 10):
            assert await asked(client, up, number, 5, BRONZE) == (200, "b")
        assert await asked(client, up, 10, 5) == (200, "g")


async def test_a_length_beyond_the_bound_is_refused_also_of_a_head_that_is_known() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        for number in range(1, 5):
            assert await asked(client, up, number, 5) == (200, "g")
        assert (await asked(client, up, 5, 1_000_001))[0] == 413


async def test_clients_mixed_on_one_connection_stay_apart() -> None:
    """As behind a load balancer: each has its own key and lines, and some lines differ in each of its requests."""
    keys = {GOLD: "g", BRONZE: "b"}
    async with upstream() as up, gateway(documents([up.port])) as (port, _):
        for _ in range(2):  # what one connection has taught holds for the next
            async with Client(port) as client:
                for number in range(24):
                    key = GOLD if number % 3 else BRONZE
                    headers = f"user-agent: {keys[key]}\r\nx-note: {number}\r\nx-oriel-tenant: mallory\r\n"
                    if number % 5 == 0:
                        headers += "x-more: yes\r\n"
                    reply = await client.ask(INFER, b"b" * number, key=key, headers=headers)
                    seen = up.seen[-1]
                    assert reply.status == 200 and seen.body == b"b" * number
                    assert [seen.get(name) for name in ("x-oriel-tenant", "user-agent")] == [keys[key]] * 2
                    assert (seen.get("x-note"), seen.get("x-more")) == (str(number), None if number % 5 else "yes")
                    names = [line.partition(":")[0].lower() for line in seen.head.splitlines()[1:]]
                    assert len(names) == len(set(names)) and "authorization" not in names
                assert (await client.ask(INFER, b"", key="key-nobody", headers="user-agent: g\r\n")).status == 401
