"""The header fields that the gateway adds to answers: bounded, and what proxies and official clients go by."""

import json
from collections.abc import AsyncIterator

import pytest

from oriel_gateway.errors import Outcome
from oriel_gateway.http_status import FINAL, STATUS
from oriel_wire.observe.server_timing import read_server_timing

from .stack import GOLD, LIMITED, Client, Reply, Seen, Upstream, digest, documents, gateway, upstream

CHAT = "/v1/chat/completions"
INFER = "/v2/models/digits/infer"
OURS = (
    "server-timing",
    "traceresponse",
    "x-request-id",
    "ratelimit",
    "x-oriel",
    "x-ratelimit",
    "retry-after",
    "x-should",
)


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


def answers(up: Upstream, head: str, body: bytes = b"ok", *, status: str = "200 OK") -> None:
    async def answer(seen: Seen) -> bytes:
        return f"HTTP/1.1 {status}\r\n{head}content-length: {len(body)}\r\n\r\n".encode() + body

    up.answer = answer


def size_of_ours(reply: Reply) -> int:
    return sum(len(f"{name}: {value}\r\n") for name, value in reply.headers.items() if name.startswith(OURS))


async def test_the_times_of_very_many_model_calls_come_as_one_sum_per_stage(up: Upstream) -> None:
    calls = ", ".join(["queue;dur=0.100, compute;dur=0.250"] * 200)
    answers(up, f"server-timing: logic;dur=1\r\nserver-timing: {calls}\r\nserver-timing: {calls}\r\n")
    async with gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER)
        timing = reply.headers["server-timing"]
        times = {name: round(seconds * 1e3, 3) for name, seconds in read_server_timing(timing).items()}
        assert (times["logic"], times["queue"], times["compute"]) == (1.0, 40.0, 100.0)
        assert list(times)[:2] == ["gateway-queue", "gateway-upstream"]
        (decided,) = core.records.decisions.where()
        assert read_server_timing(decided.timing)["queue"] == pytest.approx(0.04), "the reports read the same sums"


async def test_all_that_the_gateway_adds_is_less_than_4_kib(up: Upstream) -> None:
    stages = ", ".join(f"a-stage-with-a-long-name-{n};dur={n}.125" for n in range(150))
    answers(up, f"server-timing: {stages}\r\nx-request-id: {'u' * 3000}\r\ntraceresponse: {'t' * 3000}\r\n")
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        reply = await client.ask(INFER, key=LIMITED, headers=f"x-request-id: {'r' * 128}\r\n")
        timing = reply.headers["server-timing"]
        assert reply.status == 200 and len(timing) <= 2048 and size_of_ours(reply) <= 4096
        times = read_server_timing(timing)
        assert times["other"] > 0.0 and "a-stage-with-a-long-name-0" in times


EVENTS = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("head", "cache", "buffering"),
    [
        (f"content-type: {EVENTS}\r\n", "no-cache", "no"),
        ("Content-Type: Text/Event-Stream\r\n", "no-cache", "no"),
        (f"content-type: {EVENTS}\r\ncache-control: no-store\r\nx-accel-buffering: yes\r\n", "no-store", "yes"),
        ("content-type: text/event-streams\r\n", None, None),
        ("content-type: application/json\r\n", None, None),
    ],
)
async def test_a_stream_of_events_says_that_no_proxy_may_collect_it(
    up: Upstream, head: str, cache: str | None, buffering: str | None
) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        for whole in (True, False):
            if whole:
                answers(up, head, b"data: 1\n\n")
            else:

                async def answer(seen: Seen) -> bytes:
                    return (
                        f"HTTP/1.1 200 OK\r\n{head}transfer-encoding: chunked\r\n\r\n3\r\n: \n\r\n".encode()
                        + b"0\r\n\r\n"
                    )

                up.answer = answer
            for _ in range(2):  # the second time the head is a known one
                reply = await client.ask(CHAT)
                assert (reply.headers.get("cache-control"), reply.headers.get("x-accel-buffering")) == (
                    cache,
                    buffering,
                )


async def test_a_spent_quota_and_a_late_call_are_not_to_be_repeated(up: Upstream) -> None:
    day = f'[tenants.day]\ntier = "gold"\nmodels = ["*"]\nservices = ["*"]\nkeys = [{{ sha256 = "{digest("day")}" }}]\n'
    files = documents([up.port], extra=day + "limit = { requests_per_day = 1 }\n")
    async with gateway(files) as (port, _), Client(port) as client:
        assert (await client.ask(CHAT, key="day")).status == 200
        spent = await client.ask(CHAT, key="day")
        assert (spent.status, spent.headers["x-should-retry"]) == (429, "false")
        answers(up, "x-should-retry: true\r\n", status="504 Late")
        late = await client.ask(CHAT)
        assert (late.status, late.headers["x-should-retry"]) == (504, "false") and "retry-after" not in late.headers
        answers(up, "retry-after: 1\r\n", status="503 Full")
        assert "x-should-retry" not in (await client.ask(CHAT)).headers, "this one is worth a second try"
    assert {each for each in Outcome if STATUS.get(each) == 504} | {
        Outcome.QUOTA_EXCEEDED,
        Outcome.BUDGET_SPENT,
    } == FINAL


@pytest.mark.parametrize(
    ("path", "key", "status", "kind", "code", "hint"),
    [
        (CHAT, "wrong", 401, "invalid_request_error", "invalid_api_key", ""),
        ("/v1/v1/chat/completions", GOLD, 404, "invalid_request_error", "not_found", f"{CHAT} is one"),
        ("/chat/completions", GOLD, 404, "invalid_request_error", "not_found", f"{CHAT} is one"),
        ("/v1//chat/completions/", GOLD, 404, "invalid_request_error", "not_found", f"{CHAT} is one"),
        ("/v1/services/digits/", GOLD, 404, "invalid_request_error", "not_found", "no slash at its end"),
        ("/v1/nothing/", GOLD, 404, "invalid_request_error", "not_found", "served at this path"),
        ("/v1/models", "day", 200, "", "", ""),
        ("/v1/models", "day", 429, "insufficient_quota", "insufficient_quota", "this tenant may"),
    ],
)
async def test_errors_have_the_members_that_clients_of_the_openai_api_read(
    up: Upstream, path: str, key: str, status: int, kind: str, code: str, hint: str
) -> None:
    day = f'[tenants.day]\ntier = "gold"\nmodels = ["*"]\nservices = ["*"]\nkeys = [{{ sha256 = "{digest("day")}" }}]\n'
    files = documents([up.port], extra=day + "limit = { requests_per_day = 1 }\n")
    async with gateway(files) as (port, _), Client(port) as client:
        if status == 429:
            await client.ask(CHAT, key=key)
        reply = await client.ask(path, key=key, method="GET" if path.endswith("models") else "POST")
        assert reply.status == status
        if status >= 400:
            error = json.loads(reply.body)["error"]
            assert (error["type"], error["param"], error["code"]) == (kind, None, code)
            assert hint in error["message"] and error["reason"] and error["request_id"]
