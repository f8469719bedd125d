"""The open-loop load generator against a scripted server in the same process, over real connections."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest

from oriel_cli.demo import closed_loop
from oriel_tools.load import generator, report
from oriel_tools.load.command import offer
from oriel_tools.load.lag import LagRule
from oriel_tools.load.report import as_document, as_text, progress_line
from oriel_tools.load.scenario import Phase, Scenario, Stream
from oriel_wire.engine.buffered import Exchange, serve
from oriel_wire.engine.client import HttpClient
from oriel_wire.engine.limits import HttpLimits
from oriel_wire.process.process import listen

Handler = Callable[[Exchange], None]
REFUSAL = b'{"error": "the queue is full", "reason": "queue_full", "request_id": "x"}'
OTHER_REFUSAL = b'{"error": {"message": "slower", "reason": "rate_limited"}}'


@pytest.fixture(autouse=True)
def lag_is_judged_by_the_schedule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not let a slow generator fail a load, because this machine may be busy. Tests of that rule set their own
    bound.
    """
    monkeypatch.setattr(report, "LagRule", partial(LagRule, max_busy=float("inf")))


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[int]:
    server = await serve(handler, listen("127.0.0.1", 0, "x"), limits=HttpLimits())
    try:
        yield server.port
    finally:
        await server.drain(1)


def scenario(port: int, *, rate: float = 200, seconds: float = 0.5, scheme: str = "http", **given: Any) -> Scenario:
    given.setdefault("max_lag_ms", 60_000)
    stream = {name: given.pop(name) for name in Stream.__struct_fields__ if name in given}
    url = f"{scheme}://127.0.0.1:{port}{given.pop('path', '/x')}"
    phase = Phase(name="only", rate=rate, seconds=seconds, arrivals="uniform")
    return Scenario(stream=[Stream(url=url, tier="gold", **stream)], phase=[phase], **given)


async def phase_of(asked: Scenario) -> dict[str, Any]:
    record = await offer(asked)
    document = as_document(asked, record, version="0")
    assert as_text(document)
    found: dict[str, Any] = document["phases"][0]
    return found


def at_once(exchange: Exchange) -> None:
    exchange.respond(200, [], b"{}")


async def test_every_arrival_is_sent_on_time_and_its_delay_is_measured() -> None:
    def slow(exchange: Exchange) -> None:
        asyncio.get_running_loop().call_later(0.03, exchange.respond, 200, [], b"{}")

    async with serving(slow) as port:
        found = await phase_of(scenario(port, target_ms=5000))
    gold = found["tiers"]["gold"]
    assert gold["scheduled"] == gold["sent"] == gold["good"] == 99
    assert 29 <= gold["latency_ms"]["p50"] < 10_000, "the script's 30 ms, and not us"
    assert found["quoted"] and gold["attainment"] == 1 and gold["goodput_per_s"] == pytest.approx(198, rel=0.01)


def busy_at(number: int, seconds: float) -> Handler:
    """Return a server that answers at once, but blocks the whole process at the request of that number."""
    count = 0

    def handler(exchange: Exchange) -> None:
        nonlocal count
        count += 1
        if count == number:
            time.sleep(seconds)
        at_once(exchange)

    return handler


class Stalling:
    """Answers at once, but for `stall_s` from `after_s` after the first request, when it holds everything back."""

    def __init__(self, after_s: float, stall_s: float) -> None:
        self._after_s, self._stall_s = after_s, stall_s
        self._held: list[Exchange] | None = None
        self._begun = False
        self.delayed = 0

    def __call__(self, exchange: Exchange) -> None:
        if not self._begun:
            self._begun = True
            loop = asyncio.get_running_loop()
            loop.call_later(self._after_s, self._begin)
            loop.call_later(self._after_s + self._stall_s, self._stop)
        if self._held is None:
            at_once(exchange)
        else:
            self._held.append(exchange)

    def _begin(self) -> None:
        self._held = []

    def _stop(self) -> None:
        held, self._held = self._held, None
        self.delayed = len(held or ())
        for exchange in held or ():
            at_once(exchange)


async def test_a_stall_is_charged_to_every_request_it_delayed() -> None:
    """A closed loop sends nothing while the server stalls, so each caller sees the stall once."""
    stalling = Stalling(0.3, 0.3)
    async with serving(stalling) as port:
        client = HttpClient(host="127.0.0.1", port=port, max_connections=1)
        shot = closed_loop.Shot(target="/x", headers=[], body=b"")
        await closed_loop.drive(client, shot, callers=1, duration_s=1.0)
        await client.close()
    async with serving(Stalling(0.3, 0.3)) as port:
        gold = (await phase_of(scenario(port, seconds=1.0, target_ms=50)))["tiers"]["gold"]
    assert stalling.delayed <= 1
    assert 250 < gold["latency_ms"]["p99"]
    assert gold["attainment"] < 0.85, "about a quarter of the arrivals fell into the stall"


async def test_progress_without_a_good_answer_has_no_percentile() -> None:
    async with serving(lambda exchange: None) as port:
        asked = scenario(port, timeout_s=0.1, seconds=0.1, rate=50)
        record = await offer(asked)
    line = progress_line(asked, record, 1.0, 0)
    assert " 0 good, " in line and "; p99 -, own lag p99 " in line


async def test_a_generator_that_lags_is_found_out_and_still_charges_the_schedule() -> None:
    async with serving(busy_at(40, 0.2)) as port:
        asked = scenario(port, max_lag_ms=10)
        record = await offer(asked)
    found = as_document(asked, record, version="0")["phases"][0]
    assert not found["quoted"] and "late" in found["objection"]
    gold = found["tiers"]["gold"]
    assert gold["good"] == 99, "counts are kept"
    assert gold["latency_ms"] is gold["attainment"] is gold["goodput_per_s"] is None
    tally = record.tallies[0][0]
    assert tally.latency.percentile_s(0.99) > 0.1, "counted from the scheduled arrival"
    assert "NOT QUOTED" in "\n".join(as_text(as_document(asked, record, version="0")))


async def test_what_exceeds_the_places_is_counted_as_the_generators_fault() -> None:
    async with serving(lambda exchange: None) as port:
        found = await phase_of(scenario(port, max_in_flight=4, timeout_s=1.0, seconds=0.2, rate=100))
    gold = found["tiers"]["gold"]
    assert gold["unsent"] == {"too many under way": 15} and gold["failed"] == {"timed out": 4}
    assert not found["quoted"] and "15 arrivals were not sent" in found["objection"]


async def test_what_is_hopelessly_late_is_counted_and_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator, "TOO_LATE_S", 0.05)
    async with serving(busy_at(20, 0.2)) as port:
        found = await phase_of(scenario(port))
    gold = found["tiers"]["gold"]
    assert 10 < gold["unsent"]["too late"] <= 99
    assert gold["scheduled"] == gold["sent"] + gold["unsent"]["too late"] == 99


async def test_refusals_are_told_apart_by_status_and_reason() -> None:
    answers = [(503, [("retry-after", "2")], REFUSAL), (429, [("retry-after", "7")], OTHER_REFUSAL), (500, [], b"oops")]
    count = 0

    def refusing(exchange: Exchange) -> None:
        nonlocal count
        status, headers, body = answers[count % 3]
        count += 1
        exchange.respond(status, headers, body)

    async with serving(refusing) as port:
        gold = (await phase_of(scenario(port)))["tiers"]["gold"]
    assert gold["refused"] == {"503 queue_full": 33, "429 rate_limited": 33, "500": 33}
    assert gold["refused_ms"].keys() == gold["refused"].keys()
    assert all(0 < found["p50"] <= found["max"] < 10_000 for found in gold["refused_ms"].values())
    assert gold["retry_after"] == {"count": 66, "least_s": 2.0, "most_s": 7.0}
    assert gold["good"] == 0 and gold["attainment"] == 0 and gold["latency_ms"] is None


async def test_nobody_there_and_connections_cut_are_failures() -> None:
    with socket.socket() as held:  # the port is taken and nobody listens on it
        held.bind(("127.0.0.1", 0))
        gold = (await phase_of(scenario(held.getsockname()[1], seconds=0.1)))["tiers"]["gold"]
    assert gold["failed"] == {"unreachable": 19}

    async def cut(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(cut, "127.0.0.1", 0)
    gold = (await phase_of(scenario(server.sockets[0].getsockname()[1], seconds=0.1)))["tiers"]["gold"]
    server.close()
    assert gold["failed"] == {"broken": 19}


async def test_the_request_carries_key_deadline_headers_and_body(tmp_path: Any) -> None:
    (tmp_path / "b.json").write_bytes(b'{"a": 1}')
    seen: list[Exchange] = []

    def keep(exchange: Exchange) -> None:
        seen.append(exchange)
        at_once(exchange)

    async with serving(keep) as port:
        await phase_of(
            scenario(port, seconds=0.05, key="k", deadline_ms=80, headers={"X-A": "b"}, body=str(tmp_path / "b.json"))
        )
    head = seen[0].head
    assert (seen[0].body, head.method, head.get("content-type")) == (b'{"a": 1}', "POST", "application/json")
    assert (head.get("authorization"), head.get("x-request-timeout-ms"), head.get("x-a")) == ("Bearer k", "80", "b")
    assert (head.get("traceparent") or "").endswith(("-00", "-02")), "a load is not traced"


async def test_tiers_and_phases_are_counted_apart() -> None:
    def by_key(exchange: Exchange) -> None:
        exchange.respond(200 if exchange.head.get("authorization") == "Bearer g" else 503, [], b"")

    async with serving(by_key) as port:
        url = f"http://127.0.0.1:{port}/x"
        asked = Scenario(
            max_lag_ms=60_000,
            stream=[
                Stream(url=url, name="a", tier="gold", key="g"),
                Stream(url=url, name="b", tier="gold", key="g"),
                Stream(url=url, name="c", tier="bronze", key="z", weight=2.0),
            ],
            phase=[
                Phase(name="both", rate=400, seconds=0.2, arrivals="uniform"),
                Phase(name="gold only", rates={"a": 100}, seconds=0.2),
                Phase(name="warm", rate=100, seconds=0.1, warm_up=True),
            ],
        )
        document = as_document(asked, await offer(asked), version="0")
    both, gold, warm = document["phases"]
    assert (both["tiers"]["gold"]["good"], both["tiers"]["bronze"]["refused"]) == (38, {"503": 39})
    assert both["streams"]["a"]["good"] == 19
    assert gold["tiers"]["bronze"]["scheduled"] == 0 and gold["tiers"]["bronze"]["attainment"] is None
    assert not warm["quoted"] and document["quoted"], "a warm-up is never quoted and that is no objection"
    timeline = document["timeline"]
    assert sum(timeline["gold"]["arrivals"]) == sum(each["tiers"]["gold"]["scheduled"] for each in document["phases"])


class _Refusing(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.calls = 0

    def service(self, details: Any) -> Any:
        async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            self.calls += 1
            if self.calls % 2:
                return request
            trailers = (("x-oriel-reason", "displaced"), ("retry-after", "3"))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "make room", trailers)

        return grpc.unary_unary_rpc_method_handler(answer)


async def test_grpc_calls_are_counted_with_code_reason_and_retry_after(tmp_path: Any) -> None:
    (tmp_path / "b.bin").write_bytes(b"xyz")
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        asked = scenario(port, scheme="grpc", path="/a.B/C", rate=100, body=str(tmp_path / "b.bin"), target_ms=1000)
        gold = (await phase_of(asked))["tiers"]["gold"]
    finally:
        await server.stop(0)
    assert gold["good"] == 25 and gold["refused"] == {"UNAVAILABLE displaced": 24}
    assert gold["retry_after"] == {"count": 24, "least_s": 3.0, "most_s": 3.0}
