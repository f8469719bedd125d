"""Token limits on the whole path: calls of the OpenAI API reserve tokens when they come, and settle at their end."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome
from oriel_gateway.observe.spending import MAX_SHOWN
from oriel_gateway.observe.usage import TOKEN_SERIES
from oriel_policies.bounds.tokens import prompt_tokens
from oriel_policies.documents import compile_documents

from ..waiting import until
from .limit_desk import INFER, on, tenant_t
from .openai_answers import CHAT, JSON, USAGE, chat, streamed, whole
from .stack import Client, Reply, Seen, Upstream, gateway, upstream

LIMIT = "limit = { tokens_per_minute = 60, tokens_burst = 1000 }"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        it.answer = whole
        yield it


async def ask(client: Client, body: bytes, path: str = CHAT) -> Reply:
    return await client.ask(path, body, key="key-t", headers=JSON)


async def left(client: Client) -> int:
    """Return the tokens that the tenant sees as left."""
    reply = await client.ask("/v1/limits", method="GET", key="key-t")
    (tokens,) = [each for each in json.loads(reply.body)["limits"] if each["unit"] == "tokens"]
    assert (tokens["name"], tokens["kind"], tokens["limit"], tokens["per"]) == ("tokens", "rate", 1000, "minute")
    assert tokens["per_minute"] == 60
    return int(tokens["left"])


async def test_a_call_is_charged_what_its_answer_used_and_told_what_is_left(up: Upstream) -> None:
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        reply = await ask(client, chat(most=100))
        assert reply.status == 200 and reply.headers["x-ratelimit-limit-tokens"] == "1000"
        # while the answer is written, what the call has reserved is not free; a small part of a second may have passed
        assert 850 <= int(reply.headers["x-ratelimit-remaining-tokens"]) <= 971
        assert reply.headers["x-ratelimit-reset-tokens"].endswith("s")
        assert '"tokens";q=1000;qu="tokens";w=1000' in reply.headers["ratelimit-policy"]
        assert 970 <= await left(client) <= 971, "30 of them were used, and about none have come back"
        used = json.loads((await client.ask("/v1/usage", method="GET", key="key-t")).body)
        assert (used["day"]["tokens_in"], used["day"]["tokens_out"]) == (10, 20)


async def test_what_a_call_may_use_at_most_is_not_free_while_it_runs(up: Upstream) -> None:
    go_on = asyncio.Event()

    async def slowly(seen: Seen) -> bytes:
        if len(up.seen) == 1:
            await go_on.wait()
        return await whole(seen)

    up.answer = slowly
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, core), Client(port) as one, Client(port) as two:
        one.send(CHAT, chat(most=900), key="key-t", headers=JSON)
        await until(lambda: up.seen)
        refused = await ask(two, chat(most=500))
        error = json.loads(refused.body)["error"]
        assert refused.status == 429 and error["reason"] == "tokens_limited"
        assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
        # 900 and the prompt are reserved, one token comes back per second, and 500 and the prompt are wanted
        assert 400 <= int(refused.headers["retry-after"]) <= 480
        assert refused.headers["x-ratelimit-limit-tokens"] == "1000"
        assert 50 <= int(refused.headers["x-ratelimit-remaining-tokens"]) <= 100
        assert (await two.ask(INFER, b"x", key="key-t")).status == 200, "calls of models take no tokens"
        go_on.set()
        assert (await one.reply()).status == 200
        assert (await ask(two, chat(most=500))).status == 200, "what was reserved and not used is free again"
        assert len(up.seen) == 3 and core.records.stats.refusals.get(Outcome.RATE_LIMITED) is None


async def test_a_stream_is_charged_by_its_usage_or_else_by_its_events(up: Upstream) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": "a"}}]})

    async def telling(_: Seen) -> bytes:
        return streamed([chunk] * 7 + [json.dumps({"choices": [], "usage": USAGE}), "[DONE]"])

    async def silent(_: Seen) -> bytes:
        return streamed([chunk] * 7 + ["[DONE]"])

    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        up.answer = telling
        assert (await ask(client, chat(stream=True))).status == 200
        assert 970 <= await left(client) <= 971
        up.answer = silent
        body = chat(stream=True, text="x" * 400)
        before = await left(client)
        assert (await ask(client, body)).status == 200
        spent = before - await left(client)
        assert len(body) // 4 + 6 <= spent <= len(body) // 4 + 9, "an event is taken for a token, four bytes for one"


async def test_tokens_of_a_tenant_without_limits_are_counted_too(up: Upstream) -> None:
    """`/v1/usage` showed none for servers that report no cost: neither for streams nor for whole answers."""
    go_on = asyncio.Event()
    chunk = json.dumps({"choices": [{"delta": {"content": "a"}}]})

    async def cut(_: Seen) -> bytes:
        await go_on.wait()
        return streamed([chunk] * 5).removesuffix(b"0\r\n\r\n")

    async with gateway(on(up.port, tenant_t(""))) as (port, core), Client(port) as client:

        async def used() -> tuple[int, int, str]:
            found = json.loads((await client.ask("/v1/usage", method="GET", key="key-t")).body)["day"]
            return found["tokens_in"], found["tokens_out"], found["targets"][0]["tier"]

        gzipped = f"{JSON}content-encoding: gzip\r\naccept-encoding: gzip\r\n"
        assert (await client.ask(CHAT, b"\x1f\x8b", key="key-t", headers=gzipped)).status == 200
        assert up.seen[-1].get("accept-encoding") is None, "an answer has to be readable for its usage"
        assert await used() == (10, 20, "gold")
        up.answer = cut
        body = chat(stream=True)
        async with Client(port) as leaving:
            leaving.send(CHAT, body, key="key-t", headers=JSON)
            await until(lambda: len(up.seen) == 2)
            go_on.set()
            for _ in range(5):
                await leaving.reader.readuntil(b"data: ")
        await until(lambda: Outcome.CALLER_LEFT in {each.outcome for each in core.records.decisions.where(limit=3)})
        assert await used() == (10 + prompt_tokens(len(body)), 24, "gold"), "what was made of a cut stream"
        assert {each[0]["tier"] for each in scraped(core)[TOKENS]} == {"gold"}


async def test_a_failed_answer_costs_nothing_and_a_client_that_leaves_pays_for_its_prompt(up: Upstream) -> None:
    async def broken(_: Seen) -> bytes:
        return b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno"

    up.answer = broken
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        assert (await ask(client, chat(most=900))).status == 400
        assert await left(client) == 1000
        never = asyncio.Event()

        async def silent(_: Seen) -> bytes:
            await never.wait()
            return b""

        up.answer = silent
        body = chat(most=500, text="x" * 1600)
        async with Client(port) as leaving:
            leaving.send(CHAT, body, key="key-t", headers=JSON)
            await until(lambda: len(up.seen) == 2)
            assert await left(client) < 100

        async def settled() -> bool:
            return await left(client) >= 1000 - len(body) // 4 - 1

        await until(settled)
        assert await left(client) < 700


async def test_the_openai_client_waits_as_it_is_told_and_raises_what_it_knows(up: Upstream) -> None:
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _):
        async with openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="key-t", max_retries=0, timeout=60
        ) as client:
            asked: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            raw = await client.chat.completions.with_raw_response.create(**asked, max_tokens=900)
            assert raw.headers["x-ratelimit-limit-tokens"] == "1000"
            spent = await client.chat.completions.create(**asked, max_tokens=10)
            assert spent.usage is not None and spent.usage.total_tokens == 30
            with pytest.raises(openai.RateLimitError) as caught:
                await client.chat.completions.create(**asked, max_tokens=990)
            assert (caught.value.type, caught.value.code) == ("tokens", "rate_limit_exceeded")
            assert int(caught.value.response.headers["retry-after"]) >= 1


async def test_prompt_and_answer_of_a_body_in_chunks_are_counted_too(up: Upstream) -> None:
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        body = chat(most=100)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nx-api-key: key-t\r\n{JSON}transfer-encoding: chunked\r\n\r\n"
        client.writer.write(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert (await client.reply()).status == 200
        assert 970 <= await left(client) <= 971


async def test_an_equal_call_that_is_answered_from_the_cache_takes_no_tokens(up: Upstream) -> None:
    files = on(up.port, tenant_t(LIMIT))
    files["all.toml"] = files["all.toml"].replace(
        b'service = "*"\npool = "p"', b'service = "*"\npool = "p"\ndeterministic = true\ncache_s = 60'
    )
    async with gateway(files) as (port, _), Client(port) as client:
        assert (await ask(client, chat(most=100))).headers["x-oriel-cache"] == "miss"
        before = await left(client)
        assert before <= 971
        reply = await ask(client, chat(most=100))
        assert reply.headers["x-oriel-cache"] == "hit" and await left(client) >= before


async def test_an_answer_whose_tokens_count_is_not_compressed(up: Upstream) -> None:
    """A server that compresses would hide them: the answer would cost its prompt and nothing else."""
    wishes = (JSON + "accept-encoding: gzip\r\n", JSON + "accept-encoding: br\r\n")
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        for number in range(4):  # by a head that was seen before, and by one that differs
            assert (await client.ask(CHAT, chat(), key="key-t", headers=wishes[number % 2])).status == 200
        assert (await client.ask(INFER, b"x", key="key-t", headers=wishes[0])).status == 200
    found = ["accept-encoding" in seen.head.lower() for seen in up.seen]
    assert found == [False] * 4 + [True]


async def test_a_compressed_body_is_refused_where_its_tokens_count(up: Upstream) -> None:
    headers = JSON + "content-encoding: gzip\r\n"
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, _), Client(port) as client:
        before = await left(client)
        reply = await client.ask(CHAT, b"\x1f\x8b" * 9, key="key-t", headers=headers)
        assert reply.status == 415 and json.loads(reply.body)["error"]["reason"] == "encoding_unsupported"
        assert await left(client) >= before and not up.seen


async def test_tokens_and_what_is_left_of_a_limit_are_metrics(up: Upstream) -> None:
    async with gateway(on(up.port, tenant_t(LIMIT))) as (port, core), Client(port) as client:
        for _ in range(2):
            assert (await ask(client, chat(most=100))).status == 200
            assert (await client.ask(INFER, b"x", key="key-t")).status == 200
            found = scraped(core)
        route = core.snapshot.routes[-1].name
        assert {(labels["tenant"], labels["type"]): value for labels, value in found[TOKENS]} == {
            ("t", "input"): 20,
            ("t", "output"): 40,
        }
        assert {labels["route"] for labels, _ in found[TOKENS]} == {route}
        ((labels, ratio),) = found[LEFT]
        assert labels == {"tenant": "t", "limit": "tokens"} and 0.94 <= ratio <= 0.945
        core.adopt(compile_documents(on(up.port, tenant_t(""))))
        assert scraped(core)[LEFT] == [], "there is no limit any more"


async def test_only_so_many_pairs_and_limits_have_series(up: Upstream) -> None:
    names = [f"n{number}" for number in range(TOKEN_SERIES + 5)]
    extra = "".join(f'\n[tenants.{name}]\ntier = "gold"\n{LIMIT}' for name in names).encode()
    files = on(up.port, tenant_t(LIMIT))
    files["all.toml"] += extra
    async with gateway(files) as (_, core):
        for number, name in enumerate(names):
            core.records.stats.usage.tokens.count((name, "r", "gold"), "input", number + 1)
            core.spending.used_tokens(core.snapshot.tenants[name])
        found = scraped(core)
        assert len(found[LEFT]) == MAX_SHOWN and len(found[TOKENS]) == TOKEN_SERIES + 1
        # The first five lost their names to those with more, and took their counters along.
        assert sum(value for _, value in found[TOKENS]) == 105 * 106 / 2 - 5 * 6 / 2


TOKENS, LEFT = "oriel_gateway_tokens", "oriel_gateway_token_limit_left_ratio"


def scraped(core: Gateway) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Return name -> (labels, value) of each sample."""
    return {
        family.name: [(sample.labels, sample.value) for sample in family.samples]
        for family in GatewayCollector(core).collect()
    }
