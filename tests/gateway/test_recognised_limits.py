"""Limits of a tenant whose heads are recognised: counted exactly, and refused with the same error text as others."""

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from itertools import count
from math import inf

import pytest
from memory_ledger import MemoryLedger

from oriel_gateway.call import call
from oriel_gateway.identity.callers import Callers
from oriel_gateway.ingress import http as ingress_http
from oriel_gateway.limits import EmbeddedLimiter, SharedLimiter
from oriel_policies.documents import ApiKey
from oriel_wire.engine import listener, server
from oriel_wire.h1.request import Field, LineMemo

from ..waiting import until
from .limit_desk import INFER, on, tenant_t
from .stack import Client, Upstream, gateway, upstream

HEAD = f"POST {INFER} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\n"
KINDS = {
    "rate": ("limit = { requests_per_s = 0.01, burst = 4 }", 4),
    "quota": ("limit = { requests_per_day = 4 }", 4),
    "bytes": ("limit = { bytes_per_s = 1, bytes_burst = 24 }", 4),  # a call counts 4 bytes to the server and 2 back
    "both": ("limit = { requests_per_s = 0.01, burst = 4, concurrency = 3 }", 4),
    "scoped": (
        'limit = { requests_per_s = 9, burst = 9 }\nlimits = [{ model = "digits", requests_per_s = 0.01, burst = 4 }]',
        4,
    ),
}


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


class Still:
    """The pulse of a loop whose clock stands still."""

    fresh_until = inf

    def __init__(self, _: asyncio.AbstractEventLoop) -> None:
        pass

    def close(self) -> None:
        pass


def looking() -> tuple[type[Callers], list[int]]:
    """Return a class that finds senders, and a list that grows whenever it looks for the sender of a head."""
    seen: list[int] = []
    numbers = count()

    class Looking(Callers):
        def identify(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
            seen.append(next(numbers))
            return super().identify(fields, memo)

    return Looking, seen


async def raw(client: Client, head: str, body: bytes) -> bytes:
    """Return the whole answer without the parts that differ between requests."""
    client.writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    answer = await client.reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", answer)
    assert length is not None
    answer += await client.reader.readexactly(int(length[1]))
    answer = re.sub(rb"date: [^\r]+", b"date: ", answer)
    answer = re.sub(rb"traceresponse: 00-[0-9a-f]{32}-[0-9a-f]{16}-", b"traceresponse: ", answer)
    return re.sub(rb"(dur=)[0-9.]+|[0-9a-f]{16}", rb"\1", answer)


@pytest.mark.parametrize("ids", ["", "x-request-id: mine\r\n"])
@pytest.mark.parametrize("kind", KINDS)
async def test_answers_are_those_of_heads_that_are_looked_at(
    up: Upstream, monkeypatch: pytest.MonkeyPatch, kind: str, ids: str
) -> None:
    """The answers are equal byte by byte, on a clock that stands still.

    One run repeats requests on one connection; the other one opens a connection per request, at a gateway that has
    forgotten the heads it knew.
    """
    limits, allowed = KINDS[kind]
    for module in (ingress_http, call, server):
        monkeypatch.setattr(module, "monotonic", lambda: 1e6)
    monkeypatch.setattr(listener, "Pulse", Still)
    both = []
    for again in (True, False):
        callers, seen = looking()
        limiter = EmbeddedLimiter(wall=lambda: 1e9)
        async with gateway(on(up.port, tenant_t(limits)), callers=callers, limiter=limiter) as (port, core):
            answers = []
            async with Client(port) as first:
                for _ in range(allowed + 3):
                    if again:
                        answers.append(await raw(first, HEAD + ids, b"body"))
                    else:
                        core.forget_credentials()
                        async with Client(port) as client:
                            answers.append(await raw(client, HEAD + ids, b"body"))
            assert len(seen) == (2 if again else allowed + 3)
            assert core.records.decisions.where(reason="answered", limit=100)[allowed - 1 :][0].status == 200
            both.append(answers)
    assert both[0] == both[1]
    statuses = [answer.split()[1] for answer in both[0]]
    assert statuses == [b"200"] * allowed + [b"429"] * 3
    for answer in both[0]:
        assert b"ratelimit:" in answer and b"ratelimit-policy:" in answer and b"x-request-id: " in answer
        assert b"server-timing: gateway-queue;dur=" in answer
        assert (b'"reason":"' in answer and b"retry-after: " in answer) is (b" 429 " in answer)


async def test_a_rate_counts_each_request_once_whatever_its_body_comes_with(up: Upstream) -> None:
    """Bodies come whole, in two pieces, with other lengths, or not at all."""
    callers, seen = looking()
    files = on(up.port, tenant_t("limit = { requests_per_s = 0.01, burst = 40 }"))
    async with gateway(files, callers=callers) as (port, core):
        statuses = []
        async with Client(port) as client:
            for number in range(60):
                size = (4, 900, 0)[number % 3]
                head = HEAD.encode() + b"content-length: %d\r\n\r\n" % size
                if number % 2 and number < 40:  # a refused request whose body has not arrived ends its connection
                    client.writer.write(head)
                    await until(lambda size=size: core.pools["p"].calls >= (size > 0))  # type: ignore[misc]
                    head = b""
                client.writer.write(head + b"b" * size)
                statuses.append((await client.reply()).status)
        assert statuses == [200] * 40 + [429] * 20 and len(up.seen) == 40
        assert len(seen) < 6, "it was parsed again"
        assert core.pools["p"].calls == 0 and core.records.stats.refusals["rate_limited"] == 20


async def test_a_ledger_that_others_share_is_asked_for_recognised_heads_as_well(up: Upstream) -> None:
    limiter = SharedLimiter(MemoryLedger(lambda: 0.0).seat("one"), budget_s=30.0)
    files = on(up.port, tenant_t("limit = { requests_per_s = 0.001, burst = 6 }"))
    callers, seen = looking()
    async with gateway(files, limiter=limiter, callers=callers) as (port, core), Client(port) as client:
        statuses = [(await client.ask(INFER, b"x", key="key-t")).status for _ in range(9)]
        assert statuses == [200] * 6 + [429] * 3 and len(seen) == 2
