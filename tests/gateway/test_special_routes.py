"""Routes by header, splits and stickiness, from raw clients to scripted servers."""

from .special_routes import (
    INFER,
    OPERATOR,
    ask,
    house,
    metric,
)
from .stack import Client


async def test_the_first_route_whose_headers_fit_decides() -> None:
    routes = """
[[routes]]
model = "*"
headers = { x-stage = "next", x-region = "eu" }
pool = "p1"
[[routes]]
model = "digits"
version = "7"
pool = "p1"
[[routes]]
model = "*"
pool = "p0"
"""
    async with house(routes) as it, Client(it.port) as client:
        for headers, target, pool in (
            ("", INFER, 0),
            ("x-stage: next\r\nX-Region: eu\r\n", INFER, 1),
            ("x-stage: next\r\n", INFER, 0),
            ("x-stage: Next\r\nx-region: eu\r\n", INFER, 0),
            ("", "/v2/models/digits/versions/7/infer", 1),
            ("", "/v2/models/digits/versions/8/infer", 0),
            ("", INFER, 0),
        ):
            before = len(it.ups[pool].seen)
            assert (await client.ask(target, b"x", headers=headers)).status == 200
            assert len(it.ups[pool].seen) == before + 1, (headers, target)
        plain = it.core.targets.of_line(next(iter(it.core.snapshot.tenants.values())), b"x", "POST", INFER, "")
        assert plain.choices is not None and it.idle()


async def test_a_call_that_fits_no_route_sees_what_it_sees_for_an_absent_model() -> None:
    async with house('[[routes]]\nmodel = "*"\nheaders = { x-in = "1" }\npool = "p0"\n') as it:
        refused = await ask(it.port)
        assert refused.status == 404 and b"there is no model 'digits' here" in refused.body
        assert (await ask(it.port, headers="x-in: 1\r\n")).status == 200


async def test_targets_that_depend_on_no_header_are_remembered_as_they_were() -> None:
    routes = """
[[routes]]
service = "*"
headers = { x-in = "1" }
pool = "p1"
[[routes]]
model = "*"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", weight = 1 }]
"""
    async with house(routes) as it:
        await ask(it.port)
        (target,) = it.core.targets._targets.values()
        assert target.choices is None and target.side in ("p0", "p1")


async def test_a_split_by_header_stays_and_a_version_side_rewrites_the_path() -> None:
    routes = """
[[routes]]
model = "*"
name = "canary"
split = [{ pool = "p0", weight = 70 }, { pool = "p1", version = "3", weight = 30 }]
split_by = "header:x-user"
"""
    async with house(routes) as it, Client(it.port) as client:
        for _ in range(2):
            for number in range(40):
                reply = await client.ask(INFER, b"x", key=OPERATOR, headers=f"x-user: u{number}\r\n")
                assert reply.status == 200 and reply.headers["x-oriel-route"].startswith("canary; side=p")
        first, second = it.ups
        assert 8 <= len(second.seen) <= 40 and len(first.seen) + len(second.seen) == 80
        users = [{seen.get("x-user") for seen in up.seen} for up in it.ups]
        assert not users[0] & users[1]
        assert all(seen.head.startswith("POST /v2/models/digits/versions/3/infer ") for seen in second.seen)
        assert all(seen.head.startswith(f"POST {INFER} ") for seen in first.seen)
        # A client that names a version gets that version, whichever side of the split it is on.
        await client.ask("/v2/models/digits/versions/9/infer", b"x", headers=f"x-user: {users[1].pop()}\r\n")
        assert second.seen[-1].head.startswith("POST /v2/models/digits/versions/9/infer ")
        assert "x-oriel-route" not in (await client.ask(INFER, b"x")).headers
        counted = metric(it.core, "oriel_gateway_split_calls_total")
        assert counted["canary", "p1@3"] == len(second.seen) and counted["canary", "p0"] == len(first.seen)


async def test_a_client_cannot_choose_its_side_by_an_id_that_it_sends() -> None:
    routes = """
[[routes]]
model = "*"
split = [{ pool = "p0", weight = 1 }, { pool = "p1", weight = 1 }]
split_by = "request"
"""
    async with house(routes) as it, Client(it.port) as client:
        for _ in range(40):
            await client.ask(INFER, b"x", headers="x-request-id: mine\r\n")
        assert all(up.seen for up in it.ups), "each call goes by itself"


async def test_equal_values_meet_the_same_endpoint_until_it_is_gone() -> None:
    routes = '[[routes]]\nmodel = "*"\npool = "p0"\nsticky = "header:x-session"\n'
    async with house(routes, pools=1, per_pool=3) as it, Client(it.port) as client:

        async def where(session: str) -> int:
            reply = await client.ask(INFER, b"x", headers=f"x-session: {session}\r\n")
            assert reply.status == 200
            (index,) = [n for n, up in enumerate(it.ups) if any(s.get("x-session") == session for s in up.seen)]
            return index

        places = {f"s{n}": await where(f"s{n}") for n in range(60)}
        assert set(places.values()) == {0, 1, 2}
        assert {name: await where(name) for name in places} == places
        gone = places["s0"]
        endpoint = next(e for e in it.core.pools["p0"].endpoints if e.port == it.ups[gone].port)
        assert await it.core.pools["p0"].endpoints[0].close() is None
        endpoint.port = 1  # from now on no server listens there
        for up in it.ups:
            up.seen.clear()
        for connection in list(endpoint.idle):
            connection.transport.abort()
        endpoint.idle.clear()
        after = {name: await where(name) for name in places}
        assert all(after[name] == place for name, place in places.items() if place != gone)
        assert gone not in after.values()
