"""Tickets: model calls that a logic server makes for the tenant of a request."""

import sys
from contextlib import AsyncExitStack
from math import ceil
from pathlib import Path
from time import time
from typing import Any

import pytest

from oriel_cli.up.units import free_ports
from oriel_gateway.identity.tickets import Tickets, ticket_keys
from oriel_policies.documents import Tier, compile_documents
from oriel_policies.documents.promises import Tenant
from oriel_policies.errors import BadDocument
from oriel_wire.errors import StartFailed

from .gate import INFER
from .process import gateway_process
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, LIMITED, Client, Seen, documents, gateway, internal, upstream

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
KEY, OTHER = b"k" * 32, b"o" * 32
SERVICE = "/v1/services/digits"
BRONZE_TIER = Tier(name="bronze", band=2, target_s=1.0, give_up_s=4.0, stream_max_s=100.0)


def ticket(name: str = "limited", *, key: bytes = KEY, left_s: float = 4.0, request_id: str = "r-1") -> str:
    """Return a ticket of a call of this tenant in the tier bronze, as another gateway makes it."""
    none: Any = {"weight": 1.0, "allowances": (), "scopes": frozenset(), "models": (), "services": ()}
    return Tickets([key]).line(Tenant(name=name, tier=BRONZE_TIER, **none), request_id, left_s).split()[1]


def by(text: str) -> dict[str, Any]:
    return {"key": None, "headers": f"authorization: Oriel-Ticket {text}\r\n"}


async def test_a_call_of_a_service_gets_a_ticket_that_names_it_and_its_end_and_other_calls_get_none() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        await client.ask(SERVICE, b"x")
        assert up.seen[-1].get("x-oriel-ticket") is None  # this gateway has no keys
        core.callers.tickets = Tickets([KEY])
        for _ in range(3):  # the head is recognised after the first one
            before = time()
            await client.ask(SERVICE, b"x", headers="x-oriel-ticket: forged\r\n")
            assert up.seen[-1].head.count("ticket") == 1
            found = up.seen[-1].get("x-oriel-ticket")
            assert found is not None
            tenant, tier, request_id, ends, _ = found.split("/")
            assert (tenant, tier, request_id) == ("g", "gold", up.seen[-1].get("x-request-id"))
            left_s = core.snapshot.tiers["gold"].give_up_s + core.snapshot.tiers["gold"].stream_max_s
            assert before + left_s - 1 <= int(ends) <= ceil(time() + left_s) + 1
        await client.ask(INFER, b"x")
        assert up.seen[-1].get("x-oriel-ticket") is None


async def test_a_ticket_of_another_gateway_with_the_same_key_calls_models_for_its_tenant() -> None:
    """`limited` may send two requests at once. Only the service's own call counts, and it is charged for the model's
    cost. The call has the request's id, whatever its sender says.
    """

    async def answer(seen: Seen) -> bytes:
        costs = b"x-oriel-cost-us: 77\r\nx-oriel-cost: dev=9;cpu=0;class=cpu\r\n"
        return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n" + costs + b"\r\nok"

    async with upstream() as up, gateway(documents([up.port])) as (public, core), internal(core, OTHER, KEY) as port:
        up.answer = answer
        async with Client(port) as client:
            for number in range(5):
                asked = by(ticket(request_id=f"r-{number}"))
                asked["headers"] += "x-request-id: of-another\r\n"
                reply = await client.ask(INFER, b"x", **asked)
                assert (reply.status, reply.headers["x-oriel-cost-us"]) == (200, "77")
                assert reply.headers["x-oriel-cost"] == "dev=9;cpu=0;class=cpu"
                assert reply.headers["x-request-id"] == up.seen[-1].get("x-request-id") == f"r-{number}"
            assert [up.seen[-1].get(f"x-oriel-{name}") for name in ("tenant", "tier")] == ["limited", "bronze"]
            assert "ticket" not in up.seen[-1].head.lower()
            assert not core.fronts or all(not front.memo.credentials for front in core.fronts)
        async with Client(public) as client:
            reply = await client.ask(INFER, b"x", key=LIMITED)
            assert reply.status == 200 and "x-oriel-cost-us" not in reply.headers
            assert "x-oriel-cost" not in reply.headers


def wrong() -> dict[str, tuple[str, str]]:
    """Return tickets that are refused, by what is wrong with them, and words of the refusal."""
    whole = ticket()
    tenant, tier, request_id, ends, signature = whole.split("/")
    return {
        "tenant": ("/".join(("g", tier, request_id, ends, signature)), "was altered"),
        "tier": ("/".join((tenant, "gold", request_id, ends, signature)), "was altered"),
        "request": ("/".join((tenant, tier, "r-2", ends, signature)), "was altered"),
        "end": ("/".join((tenant, tier, request_id, str(int(ends) + 1), signature)), "was altered"),
        "cut off": (whole[:-1], "was altered"),
        "signature only": (signature, "was altered"),
        "nothing": ("", "was altered"),
        "no ASCII": ("\xe9" + whole, "was altered"),
        "too long": ("x" * 5000, "was altered"),
        "another key": (ticket(key=b"x" * 32), "was altered"),
        "over": (ticket(left_s=-120.0), "has expired"),
        "unknown tenant": (ticket("nobody"), "tenant or tier of the ticket no longer exists"),
    }


@pytest.mark.parametrize("fault", wrong())
async def test_a_ticket_that_is_not_as_signed_or_over_is_refused(fault: str) -> None:
    text, words = wrong()[fault]
    async with upstream() as up, gateway(documents([up.port])) as (_, core), internal(core, KEY) as port:
        async with Client(port) as client:
            reply = await client.ask(INFER, b"x", **by(text))
        assert reply.status == 401 and words in reply.body.decode() and not up.seen


async def test_a_key_that_was_replaced_counts_as_long_as_it_is_listed() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (_, core), internal(core, OTHER, KEY) as port:
        async with Client(port) as client:
            assert (await client.ask(INFER, b"x", **by(ticket()))).status == 200
            core.callers.tickets = Tickets([OTHER])
            assert (await client.ask(INFER, b"x", **by(ticket()))).status == 401


async def test_the_public_port_takes_no_ticket_and_the_internal_one_nothing_else() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (public, core), internal(core, KEY) as port:
        async with Client(public) as client:
            for scheme in ("Oriel-Ticket", "Oriel-For", "oriel-for"):
                asked = f"authorization: {scheme} {ticket()}\r\n"
                reply = await client.ask(INFER, b"x", key=None, headers=asked)
                assert reply.status == 401 and b"a ticket and the gateway's internal port" in reply.body
            reply = await client.ask(INFER, b"x", key=None, headers=f"x-oriel-ticket: {ticket()}\r\n")
            assert reply.status == 401
        async with Client(port) as client:
            both = by(ticket())["headers"]
            for key, headers in ((GOLD, ""), (None, ""), (None, f"x-api-key: {BRONZE}\r\n"), (GOLD, both)):
                reply = await client.ask(INFER, b"x", key=key, headers=headers)
                assert reply.status == 401 and b"send the ticket of the request" in reply.body
        assert not up.seen


async def test_a_ticket_shows_nothing_of_its_tenant_and_calls_no_service() -> None:
    """Whoever could call for a tenant read its usage."""
    async with upstream() as up, gateway(documents([up.port])) as (_, core), internal(core, KEY) as port:
        async with Client(port) as client:
            for path in ("/v1/usage", "/v1/limits", "/docs", "/openapi.json", "/v1/services"):
                reply = await client.ask(path, method="GET", **by(ticket("g")))
                assert reply.status == 404, path
            for path in (SERVICE, "/v1/chat/completions", "/v2/repository/index"):
                assert (await client.ask(path, b"{}", **by(ticket("g")))).status == 404
            assert (await client.ask("/v2/health/live", method="GET", key=None)).status == 200
        assert not up.seen


async def test_a_ticket_ends_with_its_tenant() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (_, core), internal(core, KEY) as port:
        async with Client(port) as client:
            assert (await client.ask(INFER, b"x", **by(ticket("b")))).status == 200
            files = documents([up.port])
            text = files["all.toml"].decode()
            begin = text.index("[tenants.b]")
            files["all.toml"] = (text[:begin] + text[text.index("[tenants.limited]") :]).encode()
            core.adopt(compile_documents(files))
            assert (await client.ask(INFER, b"x", **by(ticket("b")))).status == 401


async def test_grpc_calls_are_judged_by_tickets_too() -> None:
    async with gateway(documents([1])) as (_, core), internal(core, KEY) as port:
        path = "/inference.GRPCInferenceService/RepositoryIndex"
        for credential, status in ((f"Bearer {GOLD}", 16), (f"Oriel-Ticket {ticket('g')}", 12)):
            answer = await raw_call(f"127.0.0.1:{port}", path, {"authorization": credential}, framed(b""))
            assert answer.status == status  # 12: an operator's method, so the caller was known


@linux
async def test_a_ticket_of_one_process_counts_at_another_with_the_same_key_and_no_environment_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORIEL_TICKET_KEYS", KEY.decode())
    internal_ports = [str(port) for port in free_ports("127.0.0.1", 2)]
    async with upstream() as up, AsyncExitStack() as stack:
        first, second = [
            await stack.enter_async_context(
                gateway_process(tmp_path, documents([up.port]), "--internal-port", port, "--usage", "none")
            )
            for port in internal_ports
        ]
        for process in (first, second):
            assert KEY not in Path(f"/proc/{process.pid}/environ").read_bytes()
        async with Client(first.port) as client:
            assert (await client.ask(SERVICE, b"x")).status == 200
        (found,) = [text for seen in up.seen if (text := seen.get("x-oriel-ticket"))]  # it asks for services, too
        for port in (*map(int, internal_ports), first.port, second.port):
            async with Client(port) as client:
                reply = await client.ask(INFER, b"x", **by(found))
                assert reply.status == (200 if str(port) in internal_ports else 401)


def test_keys_come_from_a_file_or_a_variable_that_is_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ticket_keys(None) == ()
    monkeypatch.setenv("ORIEL_TICKET_KEYS", f"{'a' * 32},{'b' * 40}")
    assert ticket_keys(None) == (b"a" * 32, b"b" * 40)
    file = tmp_path / "keys"
    file.write_text(f"{'c' * 32}\n\n{'d' * 32}\n")
    assert ticket_keys(file) == (b"c" * 32, b"d" * 32)
    for bad in ("", "short", f"{'a' * 32},short", ",".join(["a" * 32] * 9)):
        file.write_text(bad)
        with pytest.raises(StartFailed, match="openssl rand"):
            ticket_keys(file)
    with pytest.raises(StartFailed, match="cannot be read"):
        ticket_keys(tmp_path / "none")


def test_documents_with_the_scope_of_the_former_key_say_what_to_do() -> None:
    files = documents([1])
    files["all.toml"] = files["all.toml"].replace(b"[tenants.b]", b'[tenants.b]\nscopes = ["delegate"]')
    with pytest.raises(BadDocument, match=r"tenants.b.scopes: the scope 'delegate' is gone: remove it and this key"):
        compile_documents(files)
