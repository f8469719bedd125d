"""Bodies of the OpenAI API that the gateway reads: they name nothing that is stored on a server which others use too,
and reading them takes no work beyond their bytes.
"""

import json
import tracemalloc
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from oriel_gateway.errors import Refused
from oriel_gateway.identity.named_models import JUDGED_BYTES, MAX_BRACKETS, STATE_BYTES, judge_body, without_state
from oriel_gateway.shared.special import service_tier

from .documents import changed
from .stack import GOLD, Client, Upstream, digest, documents, gateway, upstream

SMALL = '"model": "small-1b"'
ONE = f'''[tenants.one]
tier = "gold"
models = ["small-*"]
services = ["*"]
keys = [{{ sha256 = "{digest("one")}" }}]
'''
HEADERS = "content-type: application/json\r\n"


@pytest.fixture
async def up() -> AsyncIterator[Upstream]:
    async with upstream() as it:
        yield it


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ('"previous_response_id": "resp_1"', "previous_response_id"),
        ('"Previous_Re\\u0073ponse_ID": "resp_1"', "Previous_Response_ID"),
        ('"conversation": {"id": "conv_1"}', "conversation"),
        ('"prompt": {"id": "pmpt_1"}', "prompt"),
        ('"input": [{"type": "item_reference", "id": "msg_1"}]', "input"),
        ('"input":  [{"type": "item\\u005freference", "id": "msg_1"}]', "input"),
        ('"input": [{"type": "Item_Reference", "id": "msg_1", "content": "a"}]', "input"),
        ('"input": [{"id": "msg_1"}]', "input"),
        ('"input": [{"id": "msg_1", "type": null}]', "input"),
        ('"input": [{"id": "msg_1", "type": 1, "x": 1}]', "input"),
        ('"input": [{"Id": "msg_1", "Type": "Item_reference"}]', "input"),
        (
            '"input": [{"ID": "msg_1", "type": "message", "role": "user", "content": [ ], "status": "completed"}]',
            "input",
        ),
        ('"input": [{"type": "image_generation_call", "id": "ig_1", "result": null}]', "input"),
        ('"Input": [{"type": "item_reference", "id": "msg_1"}]', "Input"),
        ('"input": [{"type": "message", "type": "item_reference", "id": "msg_1"}]', "input"),
        ('"previous_response_id": "resp_1", "previous_response_id": null', None),
        ('"input": [{"type": "item_reference", "id": "msg_1"}], "input": "a"', None),
        ('"input": [{"type": "item_reference", "type": "message", "id": "msg_1", "content": "a"}]', None),
        ('"previous_response_id": null, "input": "about previous_response_id and item_reference"', None),
        ('"input": [{"role": "user", "content": "item_reference"}]', None),
        ('"input": [{"id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}]', None),
        ('"input": [{"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "a"}]', None),
        ('"input": [{"id": "fc_1", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]', None),
    ],
)
@pytest.mark.parametrize("key", ["one", GOLD])
async def test_what_is_stored_on_a_shared_server_cannot_be_named(
    up: Upstream, key: str, more: str, param: str | None
) -> None:
    body = f"{{{SMALL}, {more}}}".encode()
    async with gateway(documents([up.port], extra=ONE)) as (port, _), Client(port) as client:
        reply = await client.ask("/v1/responses", body, key=key, headers=HEADERS)
        if param is None:
            assert reply.status == 200
            assert b'previous_response_id":' not in (sent := up.seen[0].body), (
                "readers differ in which of two they keep"
            )
            assert b'"item_reference",' not in sent and json.loads(sent).get("input") == json.loads(body).get("input")
        else:
            error = json.loads(reply.body)["error"]
            assert (reply.status, error["param"], error["code"], up.seen) == (400, param, "stored_state", [])
    allowed = changed(documents([up.port], extra=ONE), 'service = "*"', 'service = "*"\nstored_state = true')
    async with gateway(allowed) as (port, _), Client(port) as client:
        up.seen.clear()
        assert (await client.ask("/v1/responses", body, key=GOLD, headers=HEADERS)).status == 200
        assert up.seen[0].body == body, "the operator says that the server may be asked for it"


@pytest.mark.parametrize(
    "more", ['"input": "a", "Input": "b"', '"input": [{"Type": "item_reference", "type": "message", "id": "a"}]']
)
async def test_members_that_some_readers_take_for_one_are_refused(up: Upstream, more: str) -> None:
    async with gateway(documents([up.port])) as (port, _), Client(port) as client:
        reply = await client.ask("/v1/responses", f"{{{SMALL}, {more}}}".encode(), headers=HEADERS)
        assert reply.status == 400 and b"letters" in reply.body and not up.seen


async def test_a_body_of_responses_is_judged_within_bounds(up: Upstream) -> None:
    files = changed(documents([up.port]), "max_body_bytes = 1000000", "max_body_bytes = 20000000")
    async with gateway(files) as (port, _), Client(port) as client:
        for body, status in (
            (b'{"input": "' + b"a" * STATE_BYTES + b'"}', 413),
            (b"", 400),
            (b'{"input": ' + b"[" * (MAX_BRACKETS - 1), 400),
            (b'{"input": ' + b"[" * MAX_BRACKETS, 413),
            (b'{"input": [' + b"{}," * (MAX_BRACKETS - 3) + b"{}]}", 200),
            (b'{"input": [[], 1]}', 400),
            (b'{"input": "' + b'\\"' * (JUDGED_BYTES // 2 - 8) + b'"}', 200),
            (b'{"input": "' + b'\\"' * (JUDGED_BYTES // 2) + b'"}', 413),
        ):
            assert (await client.ask("/v1/responses", body)).status == status


def repeated(start: bytes, each: bytes, stop: bytes, *, size: int) -> bytes:
    return start + b",".join([each] * ((size - len(start) - len(stop)) // (len(each) + 1))) + stop


def judged(body: bytes) -> object:
    return judge_body(cast(Any, None), "json", body, cast(Any, SimpleNamespace(may_use_model=lambda name: True)))


@pytest.mark.parametrize(
    "each", [b"1", b"[]", b"{}", b'""', b'"a":1', b'{"id":1}', b'["\\u0031"]'], ids=lambda each: each.decode()
)
@pytest.mark.parametrize(
    ("read", "start", "stop", "size"),
    [
        (lambda body: without_state(body, judged=False), b'{"input":[', b"]}", STATE_BYTES),
        (lambda body: without_state(body, judged=False), b"{", b"}", STATE_BYTES),
        (judged, b'{"model":"m","tools":[', b"]}", JUDGED_BYTES),
        (judged, b'{"tools":[],"model":[', b"]}", JUDGED_BYTES),
        (
            lambda body: service_tier(cast(Any, SimpleNamespace(bytes_in=len(body), body=lambda: body))),
            b'{"service_tier":[',
            b"]}",
            JUDGED_BYTES,
        ),
    ],
    ids=["input", "members", "tools", "model", "tier"],
)
def test_no_body_becomes_millions_of_objects(
    read: Callable[[bytes], object], start: bytes, stop: bytes, size: int, each: bytes
) -> None:
    """A body of 8 MiB became four million objects, for which the loop stood still for nine seconds."""
    body = repeated(start, each, stop, size=size)
    tracemalloc.start()
    try:
        read(body)
    except Refused:
        pass
    finally:
        (_, peak) = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 3 * size
