"""The load and cost that an answer reports, and to which callers."""

import asyncio
import json
import re
from pathlib import Path

import grpc.aio
import httpx
import pytest
from fake_backend import FakeBackend

from oriel_inference.app import Unit
from oriel_inference.model import TensorInfo
from oriel_wire.observe.orca import LOAD_FORMAT, LOAD_METRICS

from ..waiting import until
from .gated import gated
from .grpc_calls import infer, ones
from .streams import Fakes, streaming

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"


def named_in(value: str) -> dict[str, float]:
    """Return the metrics of a report, in either form."""
    form, _, text = value.partition(" ")
    if form == "JSON":
        return {name: float(number) for name, number in json.loads(text)["named_metrics"].items()}
    pairs = [pair.removeprefix("named_metrics.").split("=") for pair in text.split(", ")]
    return {name: float(number) for name, number in pairs}


@pytest.fixture
def fake() -> FakeBackend:
    return FakeBackend(
        (TensorInfo(name="x", datatype="FP32", shape=(-1, 4)),), (TensorInfo(name="y", datatype="FP32", shape=(-1, 4)),)
    )


@pytest.mark.parametrize(("form", "begins"), [("text", "TEXT "), ("JSON", "JSON {"), ("http", "TEXT ")])
async def test_load_is_reported_to_those_who_ask(http: httpx.AsyncClient, form: str, begins: str) -> None:
    for _ in range(3):  # decoded, then recognised
        answer = await http.post(INFER, json=ONES, headers={LOAD_FORMAT: form})
        value = answer.headers[LOAD_METRICS]
        assert value.startswith(begins)
        named = named_in(value)
        assert named == {"queue_depth": 0.0, "warm_models": 4.0, "expected_wait_seconds": 0.0}


async def test_nobody_who_does_not_ask_is_told(http: httpx.AsyncClient) -> None:
    for headers in ({}, {LOAD_FORMAT: "bin"}, {LOAD_FORMAT: ""}):
        assert LOAD_METRICS not in (await http.post(INFER, json=ONES, headers=headers)).headers


async def test_report_is_for_the_priority_of_who_asks_and_comes_with_refusals(
    tmp_path: Path, fake: FakeBackend
) -> None:
    async with gated(tmp_path, fake, max_queue_items=2) as (unit, client), asyncio.TaskGroup() as group:
        batcher = unit.catalog.get("double").batcher
        group.create_task(client.post(INFER, json=ONES))
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        for _ in range(2):
            group.create_task(client.post(INFER, json=ONES, headers={"x-oriel-priority": "1"}))
        await until(lambda: batcher.pending == 2)
        waits = {}
        for band in ("1", "2"):
            answer = await client.post(INFER, json=ONES, headers={LOAD_FORMAT: "text", "x-oriel-priority": band})
            assert answer.status_code == 503
            named = named_in(answer.headers[LOAD_METRICS])
            assert named["queue_depth"] == 2.0
            waits[band] = named["expected_wait_seconds"]
        assert waits["1"] > 0.0 and waits["2"] > 0.0
        late = await client.post(INFER, json=ONES, headers={LOAD_FORMAT: "text", "x-oriel-timeout-ms": "0"})
        ahead = named_in(late.headers[LOAD_METRICS])["expected_wait_seconds"]
        assert ahead < waits["1"], "what waits in lower bands is not ahead of band 0"
        fake.gate.open()


async def test_grpc_reports_in_trailing_metadata(unit: Unit) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
        asked = infer(channel)(ones(), metadata=((LOAD_FORMAT, "json"),))
        await asked
        assert named_in(dict(await asked.trailing_metadata())[LOAD_METRICS])["warm_models"] == 4.0
        silent = infer(channel)(ones())
        await silent
        assert LOAD_METRICS not in dict(await silent.trailing_metadata())


async def test_cost_is_said_to_trusted_peers_only(tmp_path: Path, fake: FakeBackend) -> None:
    for trusted, said in ((("127.0.0.0/8",), True), (("10.0.0.0/8",), False)):
        async with gated(tmp_path, fake, trusted_peers=trusted) as (unit, client):
            fake.gate.open()
            for _ in range(2):  # decoded, then recognised
                answer = await client.post(INFER, json=ONES)
                assert ("x-oriel-cost-us" in answer.headers) is said
                assert "server-timing" in answer.headers
            async with grpc.aio.insecure_channel(f"127.0.0.1:{unit.grpc_port}") as channel:
                call = infer(channel)(ones())
                await call
                assert ("x-oriel-cost-us" in dict(await call.trailing_metadata())) is said
                stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
                answers = stream(iter((ones().SerializeToString(), ones().SerializeToString())))
                assert len([each async for each in answers]) == 2
                told = dict(await answers.trailing_metadata())
                assert ("x-oriel-cost-us" in told) is said and "x-request-id" in told
                nothing = stream(iter(()))
                assert [each async for each in nothing] == []
                told = dict(await nothing.trailing_metadata())
                assert told.get("x-oriel-cost") == ("dev=0;cpu=0;class=" if said else None)


async def test_the_cost_of_events_follows_the_last_one_and_only_trusted_peers_see_it(tmp_path: Path) -> None:
    for trusted, said in ((("127.0.0.0/8",), True), (("10.0.0.0/8",), False)):
        async with streaming(tmp_path / str(said), Fakes(), trusted_peers=trusted) as unit:
            for unbilled, charged in ((None, True), ("shadow", False)):
                raw = await events_of(unit.http_port, {"x-oriel-tenant": "a", "x-oriel-unbilled": unbilled})
                head, _, rest = raw.partition("\r\n\r\n")
                assert ("trailer: x-oriel-cost" in head) is said and "x-oriel-cost:" not in head
                trailers = rest.partition("\r\n0\r\n")[2]
                assert ("x-oriel-cost-us: " in trailers) is said
                assert (re.search("x-oriel-cost: dev=[1-9]", trailers) is not None) is (said and charged)


async def events_of(port: int, headers: dict[str, str | None]) -> str:
    """Return all bytes of a stream of events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = b'{"text_input":"one two"}'
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items() if value])
    head = "POST /v2/models/words/generate_stream HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    writer.write(f"{head}{lines}content-length: {len(body)}\r\n\r\n".encode() + body)
    raw = await reader.read()
    writer.close()
    return raw.decode()
