"""The bill over any mix of calls: what the servers say they used, once, and nothing beside it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from oriel_cli.usage.grouping import billed_twice, group
from oriel_gateway.core import Gateway
from oriel_gateway.observe.usage import Usage
from oriel_policies.metering.prices import Price
from oriel_wire.context import format_cost
from oriel_wire.h1.chunked import LAST_CHUNK, chunk, last_chunk
from oriel_wire.usage.lines import UsageLine

from ..gateway.stack import Client, Seen, Upstream, digest, gateway, upstream
from ..waiting import until

LARGE = 600_000  # the bytes of an answer that one read does not take
MINUTE = "2026-11-24T17:05"
CLASSES = ("h100", "cpu")
TENANTS = ("gold", "silver")
PRICES = [
    Price(name="h100", device_class="h100", currency="EUR", valid_from="2026-01-01", device_hour=4 * 10**9),
    Price(name="cpu", device_class="cpu", currency="USD", valid_from="2026-01-01", device_hour=10**9),
    Price(name="base", device_class="", currency="EUR", valid_from="2026-01-01", million_tokens_out=2 * 10**9),
]
DOCUMENTS = """
[tiers.gold]
band = 0
target_ms = 60000
[pools.ours]
endpoints = ["127.0.0.1:{ours}", "127.0.0.1:{twin}"]
probe = ""
[pools.shadow]
endpoints = ["127.0.0.1:{shadow}"]
probe = ""
[pools.theirs]
endpoints = ["127.0.0.1:{theirs}"]
probe = ""
[[routes]]
model = "copied"
pool = "ours"
shadow = {{ pool = "shadow", percent = 100.0 }}
[[routes]]
model = "hedged"
pool = "ours"
idempotent = true
hedge_ms = 1
[[routes]]
model = "foreign"
pool = "theirs"
[[routes]]
model = "*"
pool = "ours"
[[routes]]
service = "*"
pool = "ours"
"""
TENANT = """
[tenants.{name}]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{digest}" }}]
limit = {{ tokens_per_minute = 1000000000 }}
"""


class Ledger:
    """The usage ledger of a server that keeps one: what each request used of which class of device."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.lines: list[UsageLine] = []

    def record(self, seen: Seen, why: str, *, device_ns: int, device_class: str, tokens: int) -> None:
        path = seen.head.split(" ")[1]
        target = path.split("/")[3] if path.startswith(("/v2/models/", "/v1/services/")) else "tiny"
        counted = (
            {"requests": 1, "tokens_in": tokens, "tokens_out": 2 * tokens, "bytes_out": 7} if why != "left" else {}
        )
        tenant = seen.get("x-oriel-tenant") or ""
        more: dict[str, Any] = {"device_class": device_class, "device_ns": device_ns, "why": why, **counted}
        self.lines.append(UsageLine(minute=MINUTE, unit=self.unit, tenant=tenant, tier="gold", target=target, **more))

    async def answer(self, seen: Seen) -> bytes:
        """Answer as the request's own headers ask, whole or streamed, with its cost."""
        if seen.get("x-how") is None or seen.head.startswith("GET"):
            return b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"  # a list, metadata: nothing is executed
        if seen.get("x-how") == "refused":
            return b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}"
        first_of_two = "/hedged/" in seen.head.split(" ")[1] and not seen.get("x-oriel-unbilled")
        left = first_of_two or "cut" in (seen.get("x-how") or "")
        why = seen.get("x-oriel-unbilled") or ("left" if left else "")
        device_ns, device_class = int(seen.get("x-ns") or 0), seen.get("x-class") or ""
        tokens = int(seen.get("x-tokens") or 0)
        self.record(seen, why, device_ns=device_ns, device_class=device_class, tokens=tokens)
        charged = (0, 0, device_class) if why else (device_ns, 0, device_class, tokens, 2 * tokens)
        cost = f"x-oriel-cost-us: 5\r\nx-oriel-cost: {format_cost(*charged)}\r\n"
        if seen.get("x-how") == "cut-unanswered" or first_of_two:  # so that the second copy is the one that is used
            await asyncio.Event().wait()
        if seen.get("x-how") in ("whole", "large"):
            body = b" " * LARGE if seen.get("x-how") == "large" else b"{}"
            return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n{cost}\r\n".encode() + body
        if seen.get("x-how") == "checked":  # its cost in its head, and something else in its trailers
            head = f"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n{cost}\r\n".encode()
            return head + chunk(b" " * LARGE) + last_chunk("x-checksum: 1\r\n")
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
        begun = head + b"trailer: x-oriel-cost\r\n\r\n" + chunk(b"data: 1\n\n")
        if seen.get("x-how") == "dropped":  # a proxy on the way has dropped the trailers
            cost = ""
        return begun if seen.get("x-how") == "cut-begun" else begun + last_chunk(cost)


async def foreign(seen: Seen) -> bytes:
    """Answer as a server that keeps no ledger: the gateway's estimate is the one record of it."""
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + chunk(b"x") + LAST_CHUNK if seen.get("x-how") == "streamed" else head + LAST_CHUNK


@dataclass
class House:
    """The servers behind one gateway, and their ledgers."""

    port: int
    core: Gateway
    ups: dict[str, Upstream]
    ledgers: list[Ledger] = field(default_factory=list)

    def usage(self) -> Usage:
        return self.core.records.stats.usage

    def servers_lines(self) -> list[UsageLine]:
        return [line for ledger in self.ledgers for line in ledger.lines]


@asynccontextmanager
async def house() -> AsyncIterator[House]:
    async with upstream() as ours, upstream() as twin, upstream() as shadow, upstream() as theirs:
        ups = {"ours": ours, "twin": twin, "shadow": shadow, "theirs": theirs}
        text = DOCUMENTS.format(**{name: up.port for name, up in ups.items()})
        text += "".join([TENANT.format(name=name, digest=digest(f"key-{name}")) for name in TENANTS])
        ledgers = [Ledger("inference") for _ in range(3)]
        ours.answer, twin.answer, shadow.answer = (ledger.answer for ledger in ledgers)
        theirs.answer = foreign
        async with gateway({"all.toml": text.encode()}) as (port, core):
            yield House(port, core, ups, ledgers)


INFER, HEDGED, FOREIGN = (f"/v2/models/{name}/infer" for name in ("m", "hedged", "foreign"))
CALLS = st.lists(
    st.tuples(
        st.sampled_from(
            ["whole", "large", "checked", "streamed", "cut-begun", "cut-unanswered", "refused", "listed", "described"]
        ),
        st.sampled_from([INFER, "/v2/models/copied/infer", HEDGED, FOREIGN, "/v1/chat/completions", "/v1/services/m"]),
        st.sampled_from(TENANTS),
        st.integers(0, 10**12),
        st.sampled_from(CLASSES),
        st.integers(0, 10**6),
    ),
    max_size=8,
)
LISTED = {"listed": "/v1/models", "described": "/v2/models/m"}


async def call(it: House, how: str, path: str, tenant: str, ns: int, device_class: str, tokens: int) -> None:
    """Make one call; a call that is cut off is left by its client once the server has it."""
    asked = f"x-how: {how}\r\nx-ns: {ns}\r\nx-class: {device_class}\r\nx-tokens: {tokens}\r\n"
    async with Client(it.port) as client:
        if how in LISTED:
            await client.ask(LISTED[how], method="GET", key=f"key-{tenant}")
            return
        if how.startswith("cut") and path == FOREIGN:
            return  # nobody records it
        before = len(it.servers_lines())
        client.send(path, b'{"model":"tiny"}', key=f"key-{tenant}", headers=asked)
        if how == "cut-begun":
            await client.reader.readuntil(b"\r\n\r\n")
        elif how == "cut-unanswered":
            await until(lambda: len(it.servers_lines()) > before)
        else:
            await client.reply()


def sums(lines: list[UsageLine]) -> Counter[tuple[str, str, str]]:
    """Add up what tenants are charged: (tenant, class, counter) -> units."""
    found: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        if line.tenant and not line.why:
            for name in ("device_ns", "tokens_in", "tokens_out"):
                found[line.tenant, line.device_class, name] += getattr(line, name)
    return +found


def bill(lines: list[UsageLine]) -> Counter[tuple[str, str]]:
    """Return the amounts: (tenant, currency) -> 10^-9 units."""
    found: Counter[tuple[str, str]] = Counter()
    for each in group([line for line in lines if not line.why], ["tenant"]):
        if (priced := each.priced(PRICES)) is not None:
            found[each.keys["tenant"], priced[0].currency] += priced[1].device + priced[1].tokens_out
    return +found


@settings(max_examples=40, deadline=None)
@given(CALLS)
@example(
    [
        *[("streamed", INFER, "gold", 9 * 10**9, "h100", 1000)] * 2,  # both servers keep a connection
        *[(how, INFER, "silver", 5, "cpu", 1) for how in ("large", "large", "checked", "checked")],
    ]
)
def test_the_bill_of_any_mix_of_calls_is_what_the_servers_say(
    calls: list[tuple[str, str, str, int, str, int]],
) -> None:
    """A stream was billed twice: its server recorded it, and the gateway estimated it because its head said nothing.

    An answer that came in several reads was charged what an earlier one on its connection had in its trailers.
    """

    async def check() -> None:
        async with house() as it:
            hedged = 0
            for how, path, *rest in calls:
                hedged += path == HEDGED
                await call(it, how, INFER if path == HEDGED and hedged > 1 else path, *rest)  # their number is bounded
            await until(lambda: not any(pool.calls for pool in it.core.pools.values()) and not it.core.routing.shadows)
            it.core.records.stats.count()
            ours = it.usage().added(MINUTE)
            estimates = [line for line in ours if line.kind == "use" and line.estimated]
            assert {line.target for line in estimates} <= {"foreign"}
            servers = it.servers_lines()
            billed = [line for line in (*ours, *servers) if line.kind == "use" and line not in estimates]
            assert sums(billed) == sums(servers)
            assert bill(billed) == bill(servers)
            assert billed_twice([*ours, *servers]) == []
            for tenant in TENANTS:
                shown = [each for each in it.usage().of(tenant)["month"]["targets"] if not each["estimated"]]
                # A report without tokens leaves them to the gateway, which counts those of the answer for its page.
                counted = ["device_ns"] + ["tokens_in", "tokens_out"] * all(each[-1] for each in calls)
                for name in counted:
                    expected = sum(n for at, n in sums(servers).items() if (at[0], at[2]) == (tenant, name))
                    assert sum(each[name] for each in shown) == expected

    asyncio.run(check())


async def test_a_stream_without_its_trailers_is_billed_once_and_counts_for_its_tenant() -> None:
    async with house() as it:
        await call(it, "dropped", INFER, "gold", 7, "cpu", 3)
        await until(lambda: not any(pool.calls for pool in it.core.pools.values()))
        it.core.records.stats.count()
        lines = [*it.usage().added(MINUTE), *it.servers_lines()]
        assert sums([line for line in lines if line.kind == "use"]) == sums(it.servers_lines())
        assert billed_twice(lines) == []
        assert it.usage().of("gold")["month"]["device_ns"] > 0
