"""Calls that a logic server makes for the tenant that it serves."""

import pytest

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import compile_documents
from oriel_policies.documents.promises import served_by

from .gate import INFER
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, digest, documents, gateway, upstream

LOGIC = f"""[tenants.logic]
tier = "bronze"
models = ["dig*"]
services = ["*"]
scopes = ["delegate"]
keys = [
  {{ sha256 = "{digest("key-logic")}" }},
  {{ sha256 = "{digest("key-left")}", expires = 2020-01-01T00:00:00Z }},
]
"""
FOR_LIMITED = "limited/bronze key-logic"


def files(port: int = 1) -> dict[str, bytes]:
    return documents([port], extra=LOGIC)


def behalf(rest: str, scheme: str = "Oriel-For") -> list[tuple[str, str]]:
    return [("authorization", f"{scheme} {rest}")]


async def test_a_call_for_a_tenant_has_its_name_and_weight_the_named_tier_and_the_callers_models() -> None:
    async with gateway(files()) as (_, core):
        tenant = core.identify(behalf(FOR_LIMITED)).tenant
        assert (tenant.name, tenant.tier.name, tenant.caller) == ("limited", "bronze", "logic")
        assert (tenant.models, tenant.services, tenant.scopes, tenant.allowances) == (("dig*",), (), set(), ())
        assert core.identify(behalf(FOR_LIMITED, "oriel-for")).tenant is tenant
        assert core.identify(behalf("key-logic", "Bearer")).tenant.caller == ""


async def test_no_call_of_the_tenant_itself_gets_what_a_call_for_it_may() -> None:
    async with gateway(files()) as (_, core):
        snapshot = core.snapshot
        delegated = core.identify(behalf(FOR_LIMITED)).tenant
        own = core.identify([("x-api-key", LIMITED)]).tenant
        bronze, gold = snapshot.tiers["bronze"], snapshot.tiers["gold"]
        lowered = served_by(own, bronze, snapshot.served)
        assert lowered is not delegated and lowered.allowances == own.allowances and lowered.caller == ""
        raised = served_by(delegated, gold, snapshot.served)
        assert raised is not own and raised.caller == "logic" and not raised.allowances
        assert raised is core.identify(behalf("limited/gold key-logic")).tenant


@pytest.mark.parametrize(
    ("rest", "words"),
    [
        (f"limited/gold {GOLD}", "needs? the scope 'delegate'"),
        (f"g/gold {BRONZE}", "needs? the scope 'delegate'"),
        ("limited/gold key-left", "not valid"),
        ("limited/gold unknown", "not valid"),
        ("limited/gold", "not valid"),
        (" key-logic", "no such tenant or tier"),
        ("limited key-logic", "no such tenant or tier"),
        ("nobody/gold key-logic", "no such tenant or tier"),
        ("limited/none key-logic", "no such tenant or tier"),
        ("limited/gold/x key-logic", "no such tenant or tier"),
    ],
)
async def test_what_is_no_call_for_a_tenant_is_401(rest: str, words: str) -> None:
    async with gateway(files()) as (_, core):
        with pytest.raises(Refused, match=words) as caught:
            core.identify(behalf(rest))
        assert caught.value.outcome is Outcome.UNAUTHENTICATED


async def test_it_is_not_counted_again_and_its_cost_is_told() -> None:
    """`limited` may send two requests at once. Only the service's own call counts, and it is charged for the model's
    cost.
    """

    async def answer(seen: Seen) -> bytes:
        costs = b"x-oriel-cost-us: 77\r\nx-oriel-cost: dev=9;cpu=0;class=cpu\r\n"
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + costs + b"\r\nok"

    async with upstream() as up, gateway(files(up.port)) as (port, core), Client(port) as client:
        up.answer = answer
        for _ in range(5):
            reply = await client.ask(INFER, b"x", key=None, headers=f"authorization: Oriel-For {FOR_LIMITED}\r\n")
            assert (reply.status, reply.headers["x-oriel-cost-us"]) == (200, "77")
            assert reply.headers["x-oriel-cost"] == "dev=9;cpu=0;class=cpu"
        assert [up.seen[-1].get(f"x-oriel-{name}") for name in ("tenant", "tier")] == ["limited", "bronze"]
        assert "key-logic" not in up.seen[-1].head
        for path in ("/v2/models/other/infer", "/v1/services/digits"):
            reply = await client.ask(path, b"x", key=None, headers=f"authorization: Oriel-For {FOR_LIMITED}\r\n")
            assert reply.status == 404
        reply = await client.ask(INFER, b"x", key=LIMITED)
        assert reply.status == 200 and "x-oriel-cost-us" not in reply.headers and "x-oriel-cost" not in reply.headers


async def test_a_recognised_call_ends_with_its_scope() -> None:
    async with upstream() as up, gateway(files(up.port)) as (port, core), Client(port) as client:
        headers = f"authorization: Oriel-For {FOR_LIMITED}\r\n"
        for _ in range(3):
            assert (await client.ask(INFER, b"x", key=None, headers=headers)).status == 200
        without = LOGIC.replace('scopes = ["delegate"]', "")
        core.adopt(compile_documents(documents([up.port], extra=without)))
        assert (await client.ask(INFER, b"x", key=None, headers=headers)).status == 401
