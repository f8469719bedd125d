"""Engines of others behind the gateway: the stand-ins of `stand_in` behave as the engines document it."""

import json
from typing import Any

import pytest

from ..waiting import until
from .openai_answers import CHAT, chat
from .stack import BRONZE, GOLD, Client, digest, documents, gateway, upstream
from .stand_in import engine

LOW = "key-low"
TENANT = f"""
[tenants.low]
tier = "bronze"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest(LOW)}" }}]
"""


def pool(kind: str, more: str = "") -> str:
    return f'engine = "{kind}"\nprobe = ""\n{more}'


async def numbers(kind: str, *bodies: bytes, key: str = GOLD) -> list[Any]:
    """Return the priorities that the engine gets for these bodies with this key."""
    async with (
        engine(kind) as stand_in,
        gateway(documents([stand_in.port], pool=pool(kind), extra=TENANT)) as (port, _),
    ):
        got = []
        for body in bodies:
            async with Client(port) as client:
                client.send(CHAT, body, key=key)
                await until(lambda: stand_in.waiting)
                got.append(stand_in.seen[-1].body.get("priority"))
                assert json.loads(stand_in.seen[-1].raw)
            await until(lambda: not stand_in.waiting)
        return got


async def test_body_has_the_number_of_tier_and_deadline_in_place_of_the_clients() -> None:
    disguised = [
        b'{"messages":[],"priority":-5}',
        b'{"priority":-5,"messages":[],"priority":-6}',
        b'{"messages":[],"\\u0070riority":-5} \r\n',
        b'{"messages":[],"tools":[{"priority":1}],"temperature":NaN,"priority":-5}',
        chat(text='"priority": 1'),
    ]
    got = await numbers("vllm", chat(), *disguised)
    assert all(number is not None and number > 0 for number in got)
    assert got == sorted(got)  # all of one tier: by their deadlines
    low = await numbers("vllm", chat(), key=LOW)
    assert low[0] > max(got) + (1 << 44)


@pytest.mark.parametrize(("kind", "least", "most"), [("sglang", 8160, 8169), ("trtllm", 0.99, 1.0)])
async def test_sglang_and_tensorrt_llm_get_larger_numbers_for_urgent_tiers(
    kind: str, least: float, most: float
) -> None:
    (gold,) = await numbers(kind, chat(priority=0))
    (bronze,) = await numbers(kind, chat(), key=LOW)
    assert least <= gold <= most
    assert bronze < gold


async def test_text_that_is_no_object_reaches_no_engine_as_one_of_its_own_priority() -> None:
    async with upstream() as up, gateway(documents([up.port], pool=pool("vllm"))) as (port, _), Client(port) as client:
        for body in ('{"priority":-5}'.encode("utf-16-le"), b"\xef\xbb\xbf[]", b"{"):
            await client.ask(CHAT, body)
            with pytest.raises(ValueError):
                json.loads(up.seen[-1].body)


async def test_other_bodies_and_other_pools_stay_as_they_are() -> None:
    for kind, path in (("openai", CHAT), ("trtllm", "/v1/responses"), ("v2", CHAT), ("vllm", "/v1/audio/speech")):
        async with upstream() as up, gateway(documents([up.port], pool=pool(kind))) as (port, _):
            async with Client(port) as client:
                await client.ask(path, b'{"input":"x","priority":3}')
            assert json.loads(up.seen[-1].body) == {"input": "x", "priority": 3}


async def test_triton_over_http_gets_priority_and_timeout_as_parameters() -> None:
    plain = b'{"inputs":[],"parameters":{"sequence_id":7,"priority":1,"timeout":1}}'
    tensor = b'{"inputs":[{"parameters":{"binary_data_size":3}}]}'
    async with (
        upstream() as up,
        gateway(documents([up.port], pool=pool("triton"))) as (port, _),
        Client(port) as client,
    ):
        await client.ask("/v2/models/digits/infer", plain)
        parameters = json.loads(up.seen[-1].body)["parameters"]
        assert parameters.pop("timeout") > 1_000_000
        assert parameters == {"priority": 1, "sequence_id": 7}
        head = f"inference-header-content-length: {len(tensor)}\r\n"
        await client.ask("/v2/models/digits/infer", tensor + b"\0\1\2", headers=head, key=BRONZE)
        seen = up.seen[-1]
        size = int(seen.get("inference-header-content-length") or 0)
        assert seen.head.lower().count("inference-header-content-length") == 1
        assert seen.body[size:] == b"\0\1\2"
        assert json.loads(seen.body[:size])["parameters"]["priority"] == 3
        await client.ask("/v2/models/digits/generate", b'{"text_input":"x"}')
        assert up.seen[-1].body == b'{"text_input":"x"}'
