"""Requests that become no calls: counted in a bucket of their own, and pages for strangers on each connection."""

import pytest

from oriel_gateway.identity.tenant_buckets import TenantBuckets

from .gate import INFER
from .stack import BRONZE, GOLD, Client, documents, gateway, upstream


@pytest.mark.parametrize(
    "path", ["/v1/usage", "/v1/limits", "/nothing/here", "/v2/models/absent/infer", "/v1/services/"]
)
async def test_a_tenants_requests_that_become_no_calls_are_bounded_apart_from_its_calls(path: str) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        core.others._buckets = TenantBuckets(1e-3, 3.0)
        found = [await client.ask(path, key=BRONZE, method="GET") for _ in range(5)]
        statuses = [each.status for each in found]
        assert 429 not in statuses[:3] and statuses[3:] == [429, 429], statuses
        assert b"rate_limited" in found[-1].body
        assert found[-1].headers["retry-after"] == "1"
        assert (await client.ask(INFER, b"x", key=BRONZE)).status == 200, "its calls go on"
        assert (await client.ask("/v1/limits", key=GOLD, method="GET")).status == 200, "and so do other tenants"


async def test_pages_for_strangers_are_bounded_on_each_connection() -> None:
    async with gateway(documents([1])) as (port, _), Client(port) as client:
        sent = 0
        while True:
            reply = await client.ask("/docs", key=None, method="GET")
            assert reply.status == 200
            sent += len(reply.body)
            if reply.headers.get("connection") == "close":
                break
        assert 256 * 1024 <= sent + 4096 and sent < 512 * 1024
