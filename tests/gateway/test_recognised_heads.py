"""The common part of the heads of one connection is parsed and judged once; the rest is judged for each request."""

from hashlib import sha256

import pytest
from tritonclient.grpc import aio as triton
from tritonclient.utils import InferenceServerException

from oriel_policies.documents import compile_documents

from .fake_transport import core_connections
from .grpc_stack import Backend, headers, stack, tensor
from .stack import BRONZE, GOLD, Client, Upstream, documents, gateway, upstream

INFER = "/v2/models/digits/infer"


def trace(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


async def asked(client: Client, up: Upstream, number: int, size: int, key: str = GOLD) -> tuple[int, str]:
    headers = f"x-request-id: r{number}\r\ntraceparent: {trace(number)}\r\n"
    reply = await client.ask(INFER, b"b" * size, key=key, headers=headers)
    if reply.status == 200:
        seen = up.seen[-1]
        assert reply.headers["x-request-id"] == seen.get("x-request-id") == f"r{number}"
        assert (seen.get("traceparent") or "")[:36] == reply.headers["traceresponse"][:36] == trace(number)[:36]
        assert seen.body == b"b" * size and seen.get("content-length") == str(size)
        assert seen.head.lower().count("content-length") == seen.head.lower().count("x-request-id") == 1
    return reply.status, up.seen[-1].get("x-oriel-tenant") or ""


async def test_ids_and_sizes_of_their_own() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        for number, size in enumerate((5, 5, 7, 1, 900, 200_000, 3, 0, 2), 1):
            assert await asked(client, up, number, size) == (200, "g")
        ended = core.records.decisions.of("r5")
        assert len(ended) == 1 and ended[0].mark.trace == f"{5:032x}" and ended[0].bytes_in == 900


async def test_another_key_is_another_sender() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        for number in range(1, 5):
            assert await asked(client, up, number, 5) == (200, "g")
        assert (await asked(client, up, 5, 5, "key-nobody"))[0] == 401
        for number in range(6, 10):
            assert await asked(client, up, number, 5, BRONZE) == (200, "b")
        assert await asked(client, up, 10, 5) == (200, "g")


async def test_a_caller_is_judged_once_and_no_bytes_of_its_key_are_kept() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        for number in range(1, 5):
            assert await asked(client, up, number, 5) == (200, "g")
        assert await asked(client, up, 5, 5, BRONZE) == (200, "b")
        kept = [credential for server in core.fronts for _, credential in server.heads._decisions]
        before = [(credential.owner.tenant.name, credential.line, credential.value) for credential in kept]
        assert before.count(("b", b"", "")) == 1 and set(before) == {("b", b"", ""), ("g", b"", "")}
        assert await asked(client, up, 6, 5, BRONZE) == (200, "b")
        assert len(before) == sum(len(server.heads._decisions) for server in core.fronts)


async def test_a_length_beyond_the_bound_is_refused_also_of_a_head_that_is_known() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, _), Client(port) as client:
        for number in range(1, 5):
            assert await asked(client, up, number, 5) == (200, "g")
        assert (await asked(client, up, 5, 1_000_001))[0] == 413


async def test_clients_mixed_on_one_connection_stay_apart() -> None:
    """As behind a load balancer: each client has its own key and header lines, and some lines differ in each
    request.
    """
    keys = {GOLD: "g", BRONZE: "b"}
    async with upstream() as up, gateway(documents([up.port])) as (port, _):
        for _ in range(2):  # the second connection begins with what the first one has taught
            async with Client(port) as client:
                for number in range(24):
                    key = GOLD if number % 3 else BRONZE
                    headers = f"user-agent: {keys[key]}\r\nx-note: {number}\r\nx-oriel-tenant: mallory\r\n"
                    if number % 5 == 0:
                        headers += "x-more: yes\r\n"
                    reply = await client.ask(INFER, b"b" * number, key=key, headers=headers)
                    seen = up.seen[-1]
                    assert reply.status == 200 and seen.body == b"b" * number
                    assert [seen.get(name) for name in ("x-oriel-tenant", "user-agent")] == [keys[key]] * 2
                    assert (seen.get("x-note"), seen.get("x-more")) == (str(number), None if number % 5 else "yes")
                    names = [line.partition(":")[0].lower() for line in seen.head.splitlines()[1:]]
                    assert len(names) == len(set(names)) and "authorization" not in names
                assert (await client.ask(INFER, b"", key="key-nobody", headers="user-agent: g\r\n")).status == 401


async def test_grpc_calls_of_one_connection_are_recognised_and_judged_one_by_one() -> None:
    backend = Backend()
    async with stack(backend) as (address, core), triton.InferenceServerClient(address) as client:
        keys = {GOLD: "g", BRONZE: "b"}
        for number in range(24):
            key = GOLD if number % 3 else BRONZE
            more = {"x-request-id": f"r{number}", "traceparent": trace(number + 1), "x-note": f"{number}"}
            if number % 5 == 0:
                more["x-more"] = "yes"
            await client.infer("digits", tensor(), headers=headers(key, **more, **{"x-oriel-tenant": "mallory"}))
            seen = backend.seen[-1][2]
            assert [seen.get(name) for name in ("x-oriel-tenant", "x-request-id", "x-note", "x-more")] == [
                *(keys[key], f"r{number}", f"{number}"),
                None if number % 5 else "yes",
            ]
            assert seen["traceparent"][:36] == trace(number + 1)[:36] and "authorization" not in seen
            assert core.records.decisions.of(f"r{number}")[0].tenant.name == keys[key]
        (connection,) = core_connections(core)
        assert connection._recent, "no block was recognised"
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            await client.infer("digits", tensor(), headers=headers("key-nobody", **{"x-note": "1"}))
        withdrawn = {
            name: text.replace(sha256(GOLD.encode()).hexdigest().encode(), b"0" * 64)
            for name, text in documents([1]).items()
        }
        core.adopt(compile_documents(withdrawn))
        with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
            await client.infer("digits", tensor(), headers=headers(GOLD, **{"x-note": "1"}))
