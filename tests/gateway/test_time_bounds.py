"""A call whose time ran out says who bounded it and which tier gives more; `/v1/limits` says so beforehand."""

import asyncio
import json
from collections.abc import AsyncIterator
from time import monotonic

import grpc
import pytest
from grpc import aio
from tritonclient.grpc import service_pb2

from oriel_gateway.call import call as http_call

from .documents import changed
from .grpc_stack import Backend, stack
from .stack import BRONZE, GOLD, Client, Seen, Upstream, documents, gateway, upstream

CHAT, INFER = "/v1/services/digits", "/v2/models/digits/infer"
GOLD_GIVES, BRONZE_GIVES = "tier 'gold' gives 8 s", "tier 'bronze' gives 0.05 s"


def quick(port: int) -> dict[str, bytes]:
    return changed(documents([port]), "band = 2\ntarget_ms = 2000", "band = 2\ntarget_ms = 50\ngive_up_ms = 50")


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


async def never(seen: Seen) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.mark.parametrize(
    ("key", "headers", "words"),
    [
        (BRONZE, "", f"waiting for the upstream: {BRONZE_GIVES}; {GOLD_GIVES}"),
        (
            BRONZE,
            "x-request-timeout-ms: 60000\r\n",
            f"{BRONZE_GIVES}, and the client's 60 s do not count; {GOLD_GIVES}",
        ),
        (GOLD, "x-request-timeout-ms: 60\r\n", f"its client asked for 0.06 s, {GOLD_GIVES}"),
    ],
)
@pytest.mark.parametrize("target", [CHAT, INFER])
async def test_a_late_call_says_who_bounded_its_time(
    up: Upstream, target: str, key: str, headers: str, words: str
) -> None:
    up.answer = never
    async with gateway(quick(up.port)) as (port, _), Client(port) as client:
        reply = await client.ask(target, key=key, headers=headers)
        error = json.loads(reply.body)["error"]
        assert reply.status == 504 and words in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error":{"message":"late","stage":"infer"}}', {"error": {"message": "late; @", "stage": "infer"}}),
        (b'{"error":"late","reason":"deadline_exceeded"}', {"error": "late; @", "reason": "deadline_exceeded"}),
        (b'{"error":{"code":7}}', {"error": {"code": 7}}),
        (b'["late"]', ["late"]),
    ],
)
async def test_so_does_the_answer_of_a_server_that_was_late(
    up: Upstream, body: bytes, said: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = b"HTTP/1.1 504 Late\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)

    async def answer(seen: Seen) -> bytes:
        monkeypatch.setattr(http_call, "monotonic", lambda: monotonic() + 9.0)  # the deadline has passed here as well
        return head + body

    up.answer = answer
    async with gateway(quick(up.port)) as (port, _), Client(port) as client:
        for _ in range(2):  # the second time its head is a known one
            reply = await client.ask(CHAT)
            monkeypatch.undo()
            found = json.loads(reply.body.replace(f"{GOLD_GIVES}; no tier gives more".encode(), b"@"))
            assert reply.status == 504 and found == said
        up.answer = up.ok
        assert (await client.ask(CHAT)).body == b"ok"


async def test_a_body_that_stops_half_way_is_told_of_no_other_tier(up: Upstream) -> None:
    async with gateway(quick(up.port)) as (port, _), Client(port) as client:
        client.writer.write(f"POST {INFER} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BRONZE}\r\n".encode())
        client.writer.write(b"content-length: 9\r\n\r\nhalf")
        assert f'while receiving the request: {BRONZE_GIVES}"' in (await client.reply()).body.decode()


async def test_over_grpc_the_status_says_it() -> None:
    backend = Backend()
    backend.hold = asyncio.Event()
    async with stack(backend) as (address, _), aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(
            service_pb2.ModelInferRequest(model_name="digits").SerializeToString(),
            metadata=(("authorization", f"Bearer {GOLD}"), ("x-request-timeout-ms", "50")),
        )
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "its client asked for 0.05 s" in (await call.details() or "")
        backend.hold.set()


async def test_the_limits_of_a_tenant_say_how_much_time_it_has(up: Upstream) -> None:
    async with gateway(quick(up.port)) as (port, _), Client(port) as client:
        page = json.loads((await client.ask("/v1/limits", key=BRONZE, method="GET")).body)
        assert page["deadline"] == {"most_ms": 50, "set_by": "tier bronze", "more_ms": {"gold": 8000}, "held_ms": 0}
        page = json.loads((await client.ask("/v1/limits", key=GOLD, method="GET")).body)
        assert page["deadline"] == {"most_ms": 8000, "set_by": "tier gold", "more_ms": {}, "held_ms": 0}
