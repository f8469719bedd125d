from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from oriel_cli import probe
from oriel_cli.main import main
from oriel_cli.watch.traces import REQUEST_ID, TraceStore, decode, routes
from oriel_cli.watch.traces import Span as StoredSpan
from oriel_wire.observe.otel_settings import resource_of
from oriel_wire.observe.otlp import ProtobufEncoder
from oriel_wire.observe.trace import Span, child, new_trace


def span(trace: int, number: int, parent: int = 0, *, request: str = "", start_ns: int = 0) -> tuple[str, StoredSpan]:
    return f"{trace:032x}", {
        "name": "n",
        "unit": "gateway",
        "span_id": f"{number:016x}",
        "parent_id": f"{parent:016x}" if parent else "",
        "start_ns": start_ns,
        "end_ns": start_ns + 1,
        "error": "",
        "attributes": {REQUEST_ID: request} if request else {},
    }


def numbers(store: TraceStore, request_id: str) -> list[int]:
    found = store.find(request_id)
    assert found is not None
    return [int(span["span_id"], 16) for span in found[2]]


def test_a_request_is_its_spans_and_all_below_in_the_order_they_began() -> None:
    store = TraceStore()
    store.add([span(1, 3, 2, start_ns=3), span(1, 2, 1, start_ns=2)])
    store.add([span(1, 1, 99, request="a", start_ns=1)])
    assert numbers(store, "a") == [1, 2, 3]


def test_requests_that_share_a_clients_trace_are_told_apart() -> None:
    store = TraceStore()
    store.add([span(1, 1, 99, request="a"), span(1, 2, 1), span(1, 3, 99, request="b"), span(1, 4, 3)])
    assert (numbers(store, "a"), numbers(store, "b")) == ([1, 2], [3, 4])


def test_parents_that_form_a_ring_end() -> None:
    store = TraceStore()
    store.add([span(1, 1, 2, request="a"), span(1, 2, 1)])
    assert sorted(numbers(store, "a")) == [1, 2]


def test_the_oldest_trace_goes_when_there_are_too_many() -> None:
    store = TraceStore(max_traces=2)
    for number, request in enumerate("abc", start=1):
        store.add([span(number, number, request=request)])
    assert store.find("a") is None and store.find("b") and store.find("c") and len(store) == 2


def test_bytes_are_bounded_and_given_back() -> None:
    store = TraceStore(max_bytes=6000)
    for number in range(1, 200):
        store.add([span(number, number, request=f"r{number}")])
        assert store.size_bytes <= 6000
    assert store.find("r199") and store.find("r1") is None and len(store) <= 10


def test_a_trace_keeps_its_newest_spans() -> None:
    store = TraceStore(max_trace_spans=3)
    for number in range(1, 6):
        store.add([span(1, number, request=f"r{number}")])
    assert store.find("r1") is None and store.find("r2") is None
    assert [numbers(store, f"r{number}") for number in (3, 4, 5)] == [[3], [4], [5]]


def test_age_is_the_time_since_the_last_span() -> None:
    now = [100.0]
    store = TraceStore(clock=lambda: now[0])
    store.add([span(1, 1, request="a")])
    now[0] += 2.5
    found = store.find("a")
    assert found is not None and found[1] == 2.5


def exported(*sent: Span) -> bytes:
    return ProtobufEncoder(resource_of("gateway"), "1").encode(sent)


def test_spans_of_a_unit_are_decoded() -> None:
    root = new_trace(True)
    sent = Span(
        name="gateway.request",
        context=child(root),
        parent_id=root.span_id,
        start_s=1.0,
        end_s=1.5,
        attributes={REQUEST_ID: "a", "rows": 3, "share": 0.5, "hit": True, "long": "x" * 1000},
        failed=True,
        error="it broke",
    )
    ((trace_id, got),) = decode(exported(sent))
    assert (trace_id, got["parent_id"]) == (f"{root.trace_id:032x}", f"{root.span_id:016x}")
    assert (got["unit"], got["name"], got["error"]) == ("gateway", "gateway.request", "it broke")
    assert got["end_ns"] - got["start_ns"] == 5e8
    assert got["attributes"] == {REQUEST_ID: "a", "rows": 3, "share": 0.5, "hit": True, "long": "x" * 256}


def test_an_error_without_a_description_is_named_by_its_type() -> None:
    sent = Span(
        name="POST",
        context=new_trace(True),
        parent_id=0,
        start_s=1.0,
        end_s=1.5,
        attributes={"error.type": "queue_full"},
        failed=True,
    )
    ((_, got),) = decode(exported(sent))
    assert got["error"] == "queue_full"


async def test_the_receiver_takes_spans_and_gives_traces() -> None:
    store = TraceStore()
    transport = httpx.ASGITransport(Starlette(routes=routes(store)))
    ctx = new_trace(True)
    body = exported(Span(name="n", context=ctx, parent_id=0, start_s=1, end_s=2, attributes={REQUEST_ID: "a b"}))
    async with httpx.AsyncClient(transport=transport, base_url="http://buffer") as client:
        assert (await client.post("/v1/traces", content=body)).status_code == 200
        found = await client.get("/traces/a%20b")
        assert found.json()["trace_id"] == f"{ctx.trace_id:032x}" and len(found.json()["spans"]) == 1
        unknown = await client.get("/traces/nobody")
        assert (unknown.status_code, unknown.json()) == (404, {"error": "no trace with this request id is kept"})


@pytest.mark.parametrize(("body", "status"), [(b"\xff" * 10, 400), (b"x" * ((4 << 20) + 1), 413)])
async def test_the_receiver_refuses_nonsense_and_too_much(body: bytes, status: int) -> None:
    store = TraceStore()
    transport = httpx.ASGITransport(Starlette(routes=routes(store)))
    async with httpx.AsyncClient(transport=transport, base_url="http://buffer") as client:
        assert (await client.post("/v1/traces", content=body)).status_code == status
    assert len(store) == 0


def test_a_trace_of_a_gateway_without_a_supervisor_comes_from_its_decisions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = {"receive": 1.0, "queue": 20.0, "upstream": 70.0, "answer": 9.0, "total": 100.0}
    decision = {"trace_id": "abc", "target": "model:digits", "tier": "gold", "reason": "answered", "status": 200}
    timed = {"stages_ms": stages, "server_timing": "queue;dur=5.000, compute;dur=60.000"}
    asked: list[tuple[str, int, str]] = []

    async def get(host: str, port: int, path: str, **_: Any) -> probe.Answer:
        asked.append((host, port, path))
        return probe.Answer(200, {"decisions": [decision | timed]})

    monkeypatch.setattr(probe, "get", get)
    assert main(["trace", "r 1", "--admin", "http://gateway:8082"]) == 0
    assert asked == [("gateway", 8082, "/decisions/r%201")]
    rows = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["queue", "gateway", "1.00", "20.00"] in rows and ["compute", "upstream", "26.00", "60.00"] in rows

    async def nothing(*_: Any, **__: Any) -> probe.Answer:
        return probe.Answer(404, {"decisions": []})

    monkeypatch.setattr(probe, "get", nothing)
    assert main(["trace", "r", "--admin", "http://gateway:8082"]) == 1
    assert "has kept no call with this request id" in capsys.readouterr().err
