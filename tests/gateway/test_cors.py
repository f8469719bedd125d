"""Browsers: preflight requests without a key, and what pages may read. All of it is off unless documents allow it."""

from collections.abc import AsyncIterator

import pytest

from .gate import INFER
from .stack import GOLD, Client, Reply, Seen, Upstream, documents, gateway, upstream

APP = "https://app.example"
ASKED = f"origin: {APP}\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization\r\n"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def allowing(port: int, *origins: str) -> dict[str, bytes]:
    listed = ", ".join(f'"{origin}"' for origin in origins)
    extra = f'[http]\ncors_origins = [{listed}]\n[[routes]]\nmodel = "b-*"\npool = "p"\nheaders = {{ x-lane = "1" }}\n'
    return documents([port], extra=extra)


def said(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers.items() if name.startswith("access-control-")}


async def test_a_page_of_a_named_origin_may_ask_and_read(up: Upstream) -> None:
    async def answer(seen: Seen) -> bytes:
        return (
            b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\n"
            b"vary: accept\r\ncontent-length: 2\r\n\r\nok"
        )

    up.answer = answer
    async with gateway(allowing(up.port, APP, "http://localhost:3000")) as (port, _), Client(port) as client:
        preflight = await client.ask(INFER, key=None, method="OPTIONS", headers=ASKED)
        assert preflight.status == 204 and "content-length" not in preflight.headers
        assert preflight.headers["access-control-allow-origin"] == APP and preflight.headers["vary"] == "origin"
        assert preflight.headers["access-control-allow-methods"] == "GET, HEAD, POST"
        allowed = preflight.headers["access-control-allow-headers"].split(", ")
        assert {"authorization", "x-api-key", "content-type", "x-request-timeout-ms", "x-lane"} <= set(allowed)
        assert {"x-request-id", "server-timing"} <= set(preflight.headers) and not up.seen
        reply = await client.ask(INFER, headers=f"origin: {APP}\r\n")
        assert set(said(reply)) == {"access-control-allow-origin", "access-control-expose-headers"}
        assert reply.headers["access-control-allow-origin"] == APP
        exposed = reply.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "server-timing", "retry-after", "ratelimit"} <= set(exposed)
        for more in ({"key": "wrong"}, {"target": "/nothing"}):
            refused = await client.ask(**{"target": INFER, "headers": f"origin: {APP}\r\n", **more})  # type: ignore[arg-type]
            assert refused.status in (401, 404) and refused.headers["access-control-allow-origin"] == APP
        health = await client.ask("/v2/health/live", key=None, method="GET", headers=f"origin: {APP}\r\n")
        assert health.headers["access-control-allow-origin"] == APP


async def test_other_pages_may_not_and_caches_know(up: Upstream) -> None:
    async with gateway(allowing(up.port, APP)) as (port, _), Client(port) as client:
        for origin in ("https://app.example.evil", "https://APP.example", "null", "http://app.example"):
            asked = ASKED.replace(APP, origin)
            preflight = await client.ask(INFER, key=None, method="OPTIONS", headers=asked)
            assert preflight.status == 204 and not said(preflight) and preflight.headers["vary"] == "origin"
            reply = await client.ask(INFER, headers=f"origin: {origin}\r\n")
            assert reply.status == 200 and not said(reply) and reply.headers["vary"] == "origin"
        assert (await client.ask(INFER)).headers["vary"] == "origin"
        # A preflight request lacks one of its three parts: the answer says which.
        for headers in ("", f"origin: {APP}\r\n", "access-control-request-method: POST\r\n"):
            reply = await client.ask(INFER, key=None, method="OPTIONS", headers=headers)
            assert reply.status == 405 and b"send Origin and Access-Control-Request-Method" in reply.body


async def test_a_page_may_send_every_header_that_it_asks_for(up: Upstream) -> None:
    names = "baggage, idempotency-key, x-stainless-os, X-Stainless-Retry-Count"
    async with gateway(allowing(up.port, APP)) as (port, _), Client(port) as client:
        for asked, allowed in ((names, True), ("x" * 1025, False), ("x(y)", False), ("a:b", False)):
            headers = f"{ASKED.rpartition('access-control')[0]}access-control-request-headers: {asked}\r\n"
            preflight = await client.ask(INFER, key=None, method="OPTIONS", headers=headers)
            assert preflight.status == 204 and "access-control-allow-credentials" not in preflight.headers
            assert preflight.headers["access-control-allow-headers"].endswith(f", {asked}") is allowed


async def test_everybody_may_where_a_star_says_so(up: Upstream) -> None:
    async with gateway(allowing(up.port, "*")) as (port, _), Client(port) as client:
        reply = await client.ask(INFER, headers="origin: https://any.example\r\n")
        assert reply.headers["access-control-allow-origin"] == "*" and "vary" not in reply.headers


async def test_without_origins_nothing_is_said_and_nothing_is_touched(up: Upstream) -> None:
    async def answer(seen: Seen) -> bytes:
        return b"HTTP/1.1 200 OK\r\naccess-control-allow-origin: https://its.own\r\ncontent-length: 0\r\n\r\n"

    up.answer = answer
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for key, headers in ((None, ASKED), (GOLD, ASKED), (None, "")):
            refused = await client.ask(INFER, key=key, method="OPTIONS", headers=headers)
            assert refused.status == 405 and b"CORS is off" in refused.body and not said(refused)
        assert (await client.ask(INFER, headers=f"origin: {APP}\r\n")).headers[
            "access-control-allow-origin"
        ] == "https://its.own"
        assert up.seen[0].get("origin") == APP
