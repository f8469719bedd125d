"""Which requests of the gateway are traced, and what their spans say."""

import asyncio
import socket
from time import monotonic
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from oriel_gateway.admin.metrics import GatewayCollector
from oriel_gateway.core import Gateway
from oriel_gateway.observe.tracing import Address
from oriel_wire.engine.listener import served_at
from oriel_wire.observe.sampling import NEVER, Sampling
from oriel_wire.observe.trace import ListSink, Span

from .grpc_stack import Backend, infer, stack
from .limit_desk import on, tenant_t
from .openai_answers import CHAT, JSON, chat, whole
from .stack import BRONZE, GOLD, Client, Seen, Upstream, digest, documents, gateway, upstream

INFER = "/v2/models/digits/infer"
TRACE, PARENT = "a" * 32, "b" * 16
FAILING = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 4\r\n\r\noops"
WRONG = b"HTTP/1.1 422 Unprocessable Content\r\ncontent-length: 0\r\n\r\n"


def spans(core: Gateway) -> list[Span]:
    assert isinstance(core.sink, ListSink)
    return core.sink.spans


def recalled(core: Gateway) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []

    def recall(endpoint: Address, trace: str, grpc: bool) -> None:
        found.append((endpoint.port, trace))

    core.records.recall = recall
    return found


def answering(up: Upstream, answer: bytes) -> None:
    async def give(_: Seen) -> bytes:
        return answer

    up.answer = give


def late(**changed: Any) -> dict[str, bytes]:
    """Documents whose target nobody can keep."""
    return {
        name: text.replace(b"target_ms = 2000", b"target_ms = 1\ngive_up_ms = 60000")
        for name, text in documents(**changed).items()
    }


async def test_spans_have_the_names_and_attributes_of_the_conventions() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        assert (await client.ask(f"{INFER}?secret=1", b"x", headers="x-request-id: abc\r\n")).status == 200
        server, hop = spans(core)
        assert (server.name, server.kind, server.failed) == ("POST /v2/models/{model}/infer", "server", False)
        assert {
            "http.request.method": "POST",
            "url.scheme": "http",
            "url.path": INFER,
            "http.route": "/v2/models/{model}/infer",
            "http.response.status_code": 200,
            "network.protocol.version": "1.1",
            "oriel.request_id": "abc",
            "oriel.tenant": "g",
            "oriel.tier": "gold",
            "oriel.target": "model:digits",
            "oriel.model": "digits",
            "oriel.pool": "p",
            "oriel.outcome": "answered",
            "oriel.target_ms": 2000.0,
            "oriel.sla.result": "met",
            "oriel.kept": "ratio",
        }.items() <= dict(server.attributes).items()
        assert (hop.name, hop.kind, hop.parent_id) == ("POST", "client", server.context.span_id)
        assert hop.attributes["url.full"] == f"http://127.0.0.1:{up.port}{INFER}"
        assert (hop.attributes["server.address"], hop.attributes["server.port"]) == ("127.0.0.1", up.port)
        assert "secret" not in str(spans(core))


@pytest.mark.parametrize(
    ("answer", "failed", "hop_failed", "kept"),
    [(FAILING, True, True, "error"), (WRONG, False, True, ""), (b"", False, False, "")],
)
async def test_the_status_of_spans_and_what_is_kept_at_the_end(
    answer: bytes, failed: bool, hop_failed: bool, kept: str
) -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        if answer:
            answering(up, answer)
        await client.ask(INFER, b"x")
        server, hop = spans(core)
        assert (server.failed, hop.failed) == (failed, hop_failed)
        assert ("error.type" in server.attributes, "error.type" in hop.attributes) == (failed, hop_failed)
        assert not server.error and not hop.error
    async with upstream() as up, gateway(documents([up.port]), sampling=NEVER) as (port, core), Client(port) as client:
        if answer:
            answering(up, answer)
        asked = recalled(core)
        reply = await client.ask(INFER, b"x")
        assert core.records.kept == ({kept: 1} if kept else {})
        assert [span.attributes.get("oriel.kept") for span in spans(core)] == ([kept, None] if kept else [])
        trace = reply.headers["traceresponse"].split("-")[1]
        assert asked == ([(up.port, trace)] if kept else [])


async def test_a_late_request_is_kept_and_its_server_is_asked() -> None:
    async def after_the_target(_: Seen) -> bytes:
        began_s = monotonic()
        while monotonic() - began_s < 0.002:
            await asyncio.sleep(0)
        return b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"

    async with upstream() as up, gateway(late(ports=[up.port]), sampling=NEVER) as (port, core), Client(port) as client:
        up.answer = after_the_target
        asked = recalled(core)
        assert (await client.ask(INFER, b"x")).status == 200
        server, hop = spans(core)
        assert (server.attributes["oriel.sla.result"], server.attributes["oriel.kept"]) == ("late", "sla")
        excess_ms = server.attributes["oriel.sla.excess_ms"]
        assert isinstance(excess_ms, float) and excess_ms > 0.0
        assert asked == [(up.port, f"{hop.context.trace_id:032x}")]


async def test_the_trace_of_a_refusal_that_breaks_the_promise_is_kept() -> None:
    async with gateway(documents([1]), sampling=NEVER) as (port, core):
        core.refusing = True
        async with Client(port) as client:
            assert (await client.ask(INFER, b"x")).status == 503
            server = spans(core)[0]
            assert (server.attributes["oriel.kept"], server.failed) == ("sla", True)
            assert server.attributes["error.type"] == server.attributes["oriel.outcome"]


async def test_head_sampling_is_told_to_the_next_hop() -> None:
    async with upstream() as up:
        async with gateway(documents([up.port])) as (port, _), Client(port) as client:
            await client.ask(INFER, b"x")
        assert (up.seen[-1].get("traceparent") or "").endswith("-03")
        assert up.seen[-1].get("tracestate") == "ot=th:0"
        async with gateway(documents([up.port]), sampling=NEVER) as (port, _), Client(port) as client:
            await client.ask(INFER, b"x")
            assert (up.seen[-1].get("traceparent") or "").endswith("-02") and up.seen[-1].get("tracestate") is None
            await client.ask(INFER, b"x", headers="baggage: a=1,b=2\r\n")
            assert up.seen[-1].get("baggage") == "a=1,b=2"


@pytest.mark.parametrize(("given", "sent"), [("00", "00"), ("01", "01"), ("02", "02"), ("03", "03")])
async def test_the_flags_of_a_client_go_on(given: str, sent: str) -> None:
    async with upstream() as up, gateway(documents([up.port]), sampling=NEVER) as (port, _), Client(port) as client:
        await client.ask(INFER, b"x", headers=f"traceparent: 00-{TRACE}-{PARENT}-{given}\r\ntracestate: v=1\r\n")
        assert (up.seen[-1].get("traceparent") or "").endswith(f"-{sent}") and up.seen[-1].get("tracestate") == "v=1"


async def test_a_tenants_clients_get_so_many_traces_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oriel_gateway.observe.tracing.monotonic", lambda: 5.0)
    async with upstream() as up, gateway(documents([up.port]), sampling=NEVER) as (port, core), Client(port) as client:
        header = f"traceparent: 00-{TRACE}-{PARENT}-03\r\ntracestate: ot=th:8,v=1\r\n"
        for _ in range(25):
            assert (await client.ask(INFER, b"x", headers=header)).status == 200
        flags = [(seen.get("traceparent") or "")[-2:] for seen in up.seen]
        assert flags == ["03"] * 20 + ["02"] * 5
        assert [seen.get("tracestate") for seen in up.seen[19:21]] == ["ot=th:8,v=1", "v=1"]
        assert core.records.kept == {"client": 20}


async def test_a_sampler_that_is_not_parent_based_decides_by_the_id() -> None:
    sampling = Sampling.by_ratio(0.5, parent_based=False)
    async with upstream() as up, gateway(documents([up.port]), sampling=sampling) as (port, _), Client(port) as client:
        for trace, sent in (("a" * 16 + "f" * 16, "01"), ("a" * 16 + "0" * 16, "00")):
            await client.ask(INFER, b"x", headers=f"traceparent: 00-{trace}-{PARENT}-0{1 - int(sent[1])}\r\n")
            assert (up.seen[-1].get("traceparent") or "").endswith(f"-{sent}")


async def test_each_attempt_is_a_span_of_its_own() -> None:
    async with upstream() as up:
        dead = await closed_port()
        async with gateway(documents([dead, up.port])) as (port, core), Client(port) as client:
            while len([span for span in spans(core) if span.kind == "client"]) <= len(up.seen):
                assert (await client.ask(INFER, b"x")).status == 200
            failed, good = [span for span in spans(core) if span.kind == "client"][-2:]
            assert (failed.attributes["server.port"], good.attributes["server.port"]) == (dead, up.port)
            assert failed.failed and not good.failed and failed.context.span_id != good.context.span_id
            assert good.attributes["http.request.resend_count"] == 1
            assert "http.request.resend_count" not in failed.attributes
            assert f"{good.context.span_id:016x}" in (up.seen[-1].get("traceparent") or "")


async def test_a_grpc_span_names_the_address_that_was_called() -> None:
    async with stack(Backend()) as (address, core):
        host, _, port = address.partition(":")
        await infer(address, "digits", GOLD)
        with pytest.raises(InferenceServerException):
            await infer(address, "other", BRONZE)  # refused before it is a call
        called = [span for span in spans(core) if span.kind == "server"]
        assert [span.attributes["rpc.status_code"] for span in called] == ["OK", "NOT_FOUND"]
        for span in called:
            assert (span.attributes["server.address"], span.attributes["server.port"]) == (host, int(port))


@pytest.mark.parametrize(("host", "named"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_a_listener_for_all_addresses_has_the_name_of_its_machine(host: str, named: str) -> None:
    with socket.socket() as sock:
        sock.bind((host, 0))
        assert served_at(sock) == (named, sock.getsockname()[1])


GEN_AI = "gen_ai.request.model", "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
ONE = f"""
[tenants.one]
tier = "gold"
models = ["m*"]
services = ["*"]
keys = [{{ sha256 = "{digest("one")}" }}]
"""


@pytest.mark.parametrize(
    ("files", "key", "answer", "told"),
    [
        (tenant_t("limit = { tokens_per_minute = 60, tokens_burst = 1000 }"), "key-t", None, ("m", 10, 20)),
        (documents([1], extra=ONE), "one", b"dev=1;cpu=2;class=cpu;tin=11;tout=12", ("m", 11, 12)),
        (documents([1], extra=ONE), "one", b"dev=1;cpu=2;class=cpu", ("m", 21, None)),
        (documents([1]), GOLD, b"dev=1;cpu=2;class=cpu;tin=11;tout=0", (None, 11, None)),
    ],
    ids=["tokens are limited", "models are limited", "the prompt is estimated", "nothing is limited"],
)
async def test_openai_spans_have_what_the_gateway_knows_anyhow(
    files: dict[str, bytes], key: str, answer: bytes | None, told: tuple[str | None, int | None, int | None]
) -> None:
    async with upstream() as up, gateway(on(up.port, files)) as (port, core), Client(port) as client:
        up.answer = whole
        if answer is not None:
            answering(up, b"HTTP/1.1 200 OK\r\nx-oriel-cost: %b\r\ncontent-length: 0\r\n\r\n" % answer)
        assert (await client.ask(CHAT, chat(), key=key, headers=JSON)).status == 200
        server = spans(core)[0]
        assert server.attributes["gen_ai.operation.name"] == "chat"
        assert tuple(server.attributes.get(name) for name in GEN_AI) == told
        assert (await client.ask("/v2/models/m/infer", b"x", key=key)).status == 200
        assert not any(name.startswith("gen_ai.") for name in spans(core)[-2].attributes)


def exemplars(registry: CollectorRegistry, name: str) -> list[tuple[dict[str, str], str]]:
    """Return labels and trace of each sample of this name that has an exemplar."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    samples = [each for family in families for each in family.samples if each.name == name]
    return [(each.labels, each.exemplar.labels["trace_id"]) for each in samples if each.exemplar is not None]


async def test_kept_traces_are_exemplars_of_the_duration() -> None:
    async with upstream() as up, gateway(documents([up.port])) as (port, core), Client(port) as client:
        reply = await client.ask(INFER, b"x")
        registry = CollectorRegistry()
        registry.register(GatewayCollector(core))
        ((_, trace),) = exemplars(registry, "oriel_gateway_request_duration_seconds_bucket")
        assert trace == reply.headers["traceresponse"].split("-")[1]
        assert not exemplars(registry, "oriel_gateway_slo_bad_total")


async def test_calls_that_broke_the_promise_are_exemplars_of_their_cause() -> None:
    async with upstream() as up, gateway(documents([up.port]), sampling=NEVER) as (port, core), Client(port) as client:
        answering(up, FAILING)
        registry = CollectorRegistry()
        registry.register(GatewayCollector(core))
        await client.ask(INFER, b"x")
        generate_latest(registry)  # gives the pair of tenant and target its name
        await client.ask(INFER, b"x")
        generate_latest(registry)  # a cause appears as 0 first
        reply = await client.ask(INFER, b"x")
        answered = {"tenant": "g", "tier": "gold", "target": "model:digits", "cause": "upstream_error"}
        found = exemplars(registry, "oriel_gateway_slo_bad_total")
        assert (answered, reply.headers["traceresponse"].split("-")[1]) in found


async def closed_port() -> int:
    async with upstream() as gone:
        return gone.port
