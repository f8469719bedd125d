"""Metrics on the wire: names and formats, what counts where, and that counters only ever grow."""

import asyncio
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from fake_backend import FakeBackend, Gate

from oriel_inference.app import Unit
from oriel_inference.backends import nvml
from oriel_inference.batching.statistics import MAX_TIERS, OTHER_TIERS
from oriel_inference.catalog import Entry, ServingModel
from oriel_inference.errors import Outcome
from oriel_inference.metrics import FAMILIES
from oriel_inference.model import Gpu, ModelState
from oriel_policies.artefacts.lifecycle import ArtefactLife
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.observe.trace import ListSink
from oriel_wire.observe.unsampled import keep_body
from oriel_wire.v2.proto import model_config_pb2 as pb

from ..waiting import until
from . import models
from .clients import client_of
from .control_server import put, serving
from .ensembles import CHAIN, config, part
from .ensembles import infer as infer_ensemble
from .ensembles import put as put_ensemble
from .exposed import Read, families, read, scrape
from .gated import batcher_of, gated
from .language_bench import LanguageBench
from .management_library import BUS_IDS, UUIDS, ManagementLibrary
from .sequence_bench import SequenceBench
from .streams import WORDS, Fakes, streaming

DOCS = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"
DOUBLE = {"model": "double", "version": "1"}


# --- names and formats --------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, set[str]]]:
    """name -> (type, labels) of the table in docs/metrics.md."""
    rows = [[cell.strip() for cell in line.split("|")] for line in DOCS.read_text().splitlines()]
    return {
        row[1].strip("`"): (row[2], set(re.findall(r"`(\w+)`", row[3])))
        for row in rows
        if len(row) > 5 and row[1].startswith("`")
    }


def exposed_in(found: Any) -> dict[str, tuple[str, set[str]]]:
    """name -> (type, labels) of what was scraped."""
    exposed: dict[str, tuple[str, set[str]]] = {}
    for family in found.values():
        name = family.name
        if family.type == "counter" and name.startswith("oriel_"):
            name += "_total"  # the parsers cut it off
        # OpenMetrics knows no counter without it: Triton's are of unknown type there.
        kind = "counter" if family.type == "unknown" else family.type
        exposed[name] = (kind, {label for sample in family.samples for label in sample.labels} - {"le"})
    return exposed


async def test_documentation_names_every_metric_with_its_type_and_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [Gpu(number=number, capability="9.0", bus_id=bus_id) for number, bus_id in enumerate(BUS_IDS)]
    monkeypatch.setattr(nvml, "list_gpus", lambda: gpus)
    monkeypatch.setitem(sys.modules, "pynvml", ManagementLibrary())  # type: ignore[arg-type]
    headers = {"x-oriel-tier": "gold", "x-oriel-tenant": "acme"}
    async with streaming(tmp_path, Fakes()) as unit:
        async with client_of(unit.http_port) as client:
            assert (await client.post(INFER, json=ONES, headers=headers)).status_code == 200
            assert (await client.post(INFER, json={"inputs": []})).status_code == 400
        control = unit.surface.control
        control.rollout.failures.add("double", kind="config")
        one = {"double": 1}
        control.memory = SimpleNamespace(bytes={"host": (3, 2, 1)}, evictions=one, refusals=one)
        control.demand = SimpleNamespace(waiting=one, close=lambda: None)
        assert control.artefacts is not None
        control.artefacts.counts.outcomes["onnxruntime-graph", "built"] += 1
        control.artefacts.counts.build_s["onnxruntime-graph"] = 0.5
        control.artefacts.counts.rollbacks["double"] += 1
        unit.catalog.get("double").artefact = ArtefactLife("onnxruntime-graph")
        sampled = unit.surface.quality.of("double", 1)
        assert sampled is not None
        sampled.drift = lambda: {"y": (0.3, 0.01)}  # type: ignore[method-assign]
        sampled.totals["y"].confidence.observe(0.5)
        unit.catalog.get("double").spec = replace(unit.catalog.get("double").spec, cached=True)
        unit.surface.answers = AnswerCache(max_bytes=1)
        broken = Entry(name="double", version=2, state=ModelState.UNAVAILABLE, reason="not whole")
        unit.catalog.publish("double", [*unit.catalog.entries("double"), broken])
        unit.catalog.publish("half", [replace(broken, name="half")])
        sequences = SequenceBench().scheduler
        sequences.statistics.sequences["end"] += 1
        language = LanguageBench()
        language.ask()
        language.run(0.1)
        for each in (sequences, language.served):
            unit.catalog.leaving.append(ServingModel(each.spec, pb.ModelConfig(), each, (), 0.0))
        formats = [await families(unit, openmetrics=each) for each in (False, True)]
    for found in formats:
        assert exposed_in(found) == documented()
        used = {each.labels["gpu_uuid"]: each.value for each in found["nv_gpu_memory_used_bytes"].samples}
        assert used == {UUIDS[0]: 1 << 30, UUIDS[1]: 2 << 30}
        assert [each.value for each in found["nv_gpu_power_usage"].samples] == [70.5], "the other GPU gives none"


async def test_formats_follow_what_the_scraper_accepts(unit: Unit) -> None:
    plain = await scrape(unit)
    assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "# TYPE nv_inference_request_success counter\n" in plain.text and "# EOF" not in plain.text
    asked = await scrape(unit, "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5,*/*;q=0.1")
    assert asked.headers["content-type"] == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert "# TYPE nv_inference_request_success unknown\n" in asked.text and asked.text.endswith("# EOF\n")
    line = 'nv_inference_request_success{model="double",version="1"} 0\n'
    assert line in plain.text and line in asked.text, "the name is Triton's in both"


async def traces(unit: Unit) -> set[tuple[str, str, str]]:
    """Return tier and bucket of each exemplar of a latency, and its trace."""
    found = (await families(unit, openmetrics=True))["oriel_request_duration_seconds"].samples
    return {
        (each.labels["tier"], each.exemplar.labels["trace_id"], each.labels["version"])
        for each in found
        if each.exemplar is not None
    }


async def test_kept_traces_are_exemplars_of_the_latency_also_those_that_are_asked_for_later(
    unit: Unit, http: httpx.AsyncClient, sink: ListSink
) -> None:
    kept, other = "a" * 32, "b" * 32
    for trace, flag in ((kept, "01"), (other, "00")):
        headers = {"traceparent": f"00-{trace}-{'c' * 16}-{flag}", "x-oriel-tier": f"tier-{flag}"}
        assert (await http.post(INFER, json=ONES, headers=headers)).status_code == 200
    assert await traces(unit) == {("tier-01", kept, "1")}
    assert "# {" not in (await scrape(unit)).text, "the text format has no exemplars"
    recalled = await http.post("/oriel/v1/keep", content=keep_body([kept, other]))
    assert recalled.json() == {"known": 1}
    assert await traces(unit) == {("tier-01", kept, "1"), ("tier-00", other, "1")}
    assert {span.attributes.get("oriel.model.version") for span in sink.spans if span.kind == "server"} == {"1"}
    assert (await read(unit)).value("oriel_trace_kept_total", unit="inference", why="client") == 1


async def test_tags_of_the_configuration_are_labels_as_triton_writes_them(tmp_path: Path) -> None:
    tags = 'metric_tags { key: "team" value: "se\\"arch\\\\\\n" } metric_tags { key: "a1" value: "b" }'
    models.put(tmp_path, "double", models.double(), models.DOUBLE + tags)
    async with serving(tmp_path, "none") as served:
        found = await read(served.unit)
    labels = {**DOUBLE, "_team": 'se"arch\\\n', "_a1": "b"}
    assert found.value("nv_inference_count", **labels) == 0
    assert {name for name, each in found.samples if "model" in dict(each) and dict(each).get("_a1") != "b"} == set()


# --- what counts where --------------------------------------------------------------------------------------------


async def test_requests_of_both_protocols_are_counted_once(unit: Unit) -> None:
    def over(module: object, port: int) -> None:
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:  # type: ignore[attr-defined]
            given = module.InferInput("x", [3, 4], "FP32")  # type: ignore[attr-defined]
            given.set_data_from_numpy(np.ones((3, 4), np.float32))
            client.infer("double", [given])

    await asyncio.to_thread(over, tritonclient.http, unit.http_port)
    await asyncio.to_thread(over, tritonclient.grpc, unit.grpc_port)
    found = await read(unit)
    assert found.value("nv_inference_request_success", **DOUBLE) == 2
    assert found.value("nv_inference_count", **DOUBLE) == 6
    assert found.value("nv_inference_exec_count", **DOUBLE) == 2
    assert found.value("oriel_requests_total", **DOUBLE, tier="", reason="ok") == 2
    assert found.value("oriel_request_duration_seconds_count", **DOUBLE, tier="") == 2
    assert found.value("oriel_batch_rows_bucket", **DOUBLE, le="2.0") == 0
    assert found.value("oriel_batch_rows_bucket", **DOUBLE, le="4.0") == 2
    assert found.value("oriel_batch_rows_sum", **DOUBLE) == 6
    assert sum(found.where("oriel_batches_released_total", **DOUBLE).values()) == 2
    assert found.value("nv_inference_request_duration_us", **DOUBLE) >= found.value(
        "nv_inference_compute_infer_duration_us", **DOUBLE
    )


async def test_tiers_of_trusted_peers_are_told_apart_up_to_a_bound(unit: Unit, http: httpx.AsyncClient) -> None:
    for number in range(MAX_TIERS + 5):
        await http.post(INFER, json=ONES, headers={"x-oriel-tier": f"tier{number}"})
    counts = {
        dict(labels)["tier"]: value
        for labels, value in (await read(unit)).where("oriel_request_duration_seconds_count").items()
    }
    assert len(counts) == MAX_TIERS + 1
    assert counts[OTHER_TIERS] == 5 and counts["tier0"] == 1


async def test_headers_of_strangers_count_for_nothing(tmp_path: Path, fake: FakeBackend) -> None:
    async with gated(tmp_path, fake, trusted_peers=("10.0.0.0/8",)) as (unit, client):
        fake.gate.open()
        headers = {"x-oriel-tier": "gold", "x-oriel-timeout-ms": "0"}
        assert (await client.post(INFER, json=ONES, headers=headers)).status_code == 200
        found = await read(unit)
    assert found.value("oriel_requests_total", **DOUBLE, tier="", reason="ok") == 1


async def test_names_that_strangers_make_up_are_no_labels(unit: Unit, http: httpx.AsyncClient) -> None:
    for number in range(3):
        await http.post(f"/v2/models/absent{number}/infer", json=ONES)
        await http.get(f"/nothing/{number}")
    await http.post(INFER, json={"inputs": []})
    found = await read(unit)
    assert found.value("oriel_requests_total", model="", version="", tier="", reason="unknown_model") == 3
    assert found.value("oriel_requests_total", model="", version="", tier="", reason="not_found") == 3
    assert found.value("oriel_requests_total", model="double", version="", tier="", reason="invalid_request") == 1
    assert not any("absent" in value for _, labels in found.samples for _, value in labels)


async def test_failures_have_tritons_reasons_and_ours(tmp_path: Path, fake: FakeBackend) -> None:
    async with gated(tmp_path, fake, max_queue_items=1) as (unit, client), asyncio.TaskGroup() as group:
        first = group.create_task(client.post(INFER, json=ONES))
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        batcher = batcher_of(unit)
        gone = asyncio.create_task(client.post(INFER, json=ONES))
        await until(lambda: batcher.pending == 1)
        refused = await client.post(INFER, json=ONES)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        gone.cancel()
        await until(lambda: batcher.pending == 0)
        late = await client.post(INFER, json=ONES, headers={"x-oriel-timeout-ms": "30"})
        assert late.status_code == 504 and "queue;dur=" in late.headers["server-timing"] and batcher.running == 1
        fake.gate.open()
        assert (await first).status_code == 200
        assert fake.sessions[0].batches == [1] * 4, "three to warm up, and none of those that were refused"
        fake.sessions[0].fail = True
        assert (await client.post(INFER, json=ONES)).status_code == 500
        found = await read(unit)
    failures = {dict(labels)["reason"]: n for labels, n in found.where("nv_inference_request_failure").items()}
    assert failures == {"REJECTED": 2, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
    endings = {dict(labels)["reason"]: n for labels, n in found.where("oriel_requests_total", **DOUBLE).items()}
    reasons = (Outcome.OK, Outcome.QUEUE_FULL, Outcome.DEADLINE_EXCEEDED, Outcome.CALLER_LEFT, Outcome.BACKEND_FAILED)
    assert endings == {reason.value: 1 for reason in reasons}
    assert found.value("oriel_request_duration_seconds_count", **DOUBLE, tier="") == 1, "of answered requests"


async def test_queue_depth_and_expected_wait_by_priority(tmp_path: Path, fake: FakeBackend) -> None:
    async with gated(tmp_path, fake) as (unit, client), asyncio.TaskGroup() as group:
        group.create_task(client.post(INFER, json=ONES))
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        batcher = batcher_of(unit)
        for band in (0, 2, 2):
            group.create_task(client.post(INFER, json=ONES, headers={"x-oriel-priority": str(band)}))
        await until(lambda: batcher.pending == 3)
        found = await read(unit)
        fake.gate.open()
    assert found.value("nv_inference_pending_request_count", **DOUBLE) == 3
    depths = {dict(labels)["priority"]: n for labels, n in found.where("oriel_queue_depth").items()}
    assert depths == {"0": 1, "2": 2}
    waits = {dict(labels)["priority"]: n for labels, n in found.where("oriel_expected_wait_seconds").items()}
    assert 0 < waits["0"] < waits["2"], "the warm-up has shown how long a batch takes"


async def test_first_responses_of_decoupled_models_only(tmp_path: Path) -> None:
    async with streaming(tmp_path, Fakes()) as unit:
        async with client_of(unit.http_port) as client:
            answer = await client.post("/v2/models/words/generate_stream", json={"text_input": "a b c"})
            assert answer.text.count("data:") == 3
        found = await read(unit)
    name = "nv_inference_first_response_histogram_ms"
    assert found.value(f"{name}_count", model="words", version="1") == 1
    assert found.value(f"{name}_sum", model="words", version="1") > 0
    assert {dict(labels)["le"] for labels in found.where(f"{name}_bucket", model="words")} == {
        "100.0", "500.0", "2000.0", "5000.0", "+Inf",
    }  # fmt: skip
    assert not found.where(f"{name}_count", model="double")


async def test_buckets_of_first_responses_are_the_models_own(tmp_path: Path) -> None:
    own = """model_metrics { metric_control { metric_identifier { family: "nv_inference_first_response_histogram_ms" }
        histogram_options { buckets: [ -1, 2.5 ] } } metric_control { metric_identifier { family: "else" } } }"""
    models.put(tmp_path, "words2", models.double(), WORDS + own)
    async with streaming(tmp_path, Fakes()) as unit:
        found = await read(unit)
    name = "nv_inference_first_response_histogram_ms_bucket"
    bounds = {dict(labels)["le"] for labels in found.where(name, model="words2")}
    assert bounds == {"-1.0", "2.5", "+Inf"}


async def test_an_ensemble_counts_beside_the_models_of_its_steps(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    part(tmp_path, "b", 3)
    put_ensemble(tmp_path, "e", config(CHAIN))
    async with serving(tmp_path, "none") as served:
        assert await infer_ensemble(served) == (200, 6.0)
        found = await read(served.unit)
        await families(served.unit)
    for name in "abe":
        labels = {"model": name, "version": "1"}
        assert found.value("nv_inference_request_success", **labels) == 1
        assert found.value("nv_inference_pending_request_count", **labels) == 0
        assert found.value("oriel_expected_wait_seconds", **labels, priority="0") == 0
    asked = {dict(labels)["model"] for labels in found.where("oriel_requests_total", reason="ok")}
    assert asked == {"e"}, "its steps are no requests of anybody"


async def test_counts_of_what_came_to_no_version_are_bounded(unit: Unit, http: httpx.AsyncClient) -> None:
    unit.surface.meter.max_refused = 2
    failures = unit.surface.control.rollout.failures
    failures.max_names = len(failures.counts) + 1
    for tier in ("a", "b", "c", "d"):
        await http.post(INFER, json={"inputs": []}, headers={"x-oriel-tier": tier})
        failures.add(f"model-{tier}", kind="config")
    found = await read(unit)
    counts = {
        (dict(labels)["model"], dict(labels)["tier"]): value
        for labels, value in found.where("oriel_requests_total", version="").items()
    }
    assert counts == {("double", "a"): 1, ("double", "b"): 1, ("", OTHER_TIERS): 2}
    assert found.value("oriel_model_load_failures_total", model="model-a", reason="config") == 1
    assert found.value("oriel_model_load_failures_total", model="", reason="config") == 3


# --- over time ----------------------------------------------------------------------------------------------------


def grown(before: Read, after: Read) -> list[str]:
    """Counters and buckets that went back."""
    return [
        f"{name} {dict(labels)}: {value} -> {after.samples.get((name, labels))}"
        for (name, labels), value in before.samples.items()
        if name not in {family.name for family in FAMILIES if family.kind == "gauge"}
        and not name.startswith("nv_cpu")
        and after.samples.get((name, labels), 0.0) < value
    ]


async def test_counters_go_on_when_a_version_is_loaded_again(tmp_path: Path) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, "explicit", load_models=("double",)) as served:
        for _ in range(3):
            await served.answer()
        await served.client.post(INFER, json=ONES, headers={"x-oriel-timeout-ms": "0"})
        before = await read(served.unit)
        put(tmp_path, 3)
        assert (await served.client.post("/v2/repository/models/double/load", json={})).status_code == 200
        assert await served.answer() == 3
        after = await read(served.unit)
        assert grown(before, after) == []
        assert after.value("nv_inference_request_success", **DOUBLE) == 4
        assert after.value("nv_inference_request_failure", **DOUBLE, reason="REJECTED") == 1
        assert (await served.client.post("/v2/repository/models/double/unload", json={})).status_code == 200
        await until(lambda: not served.unit.catalog.leaving)
        gone = await read(served.unit)
        assert not gone.where("nv_inference_count") and grown(gone, await read(served.unit)) == []
        assert (await served.client.post("/v2/repository/models/double/load", json={})).status_code == 200
        assert (await read(served.unit)).value("nv_inference_request_success", **DOUBLE) == 4


async def test_what_leaves_and_what_replaces_it_share_their_series(tmp_path: Path, fake: FakeBackend) -> None:
    async with gated(tmp_path, fake, cores=2, control_mode="explicit", load_models=("double",)) as (unit, client):
        batcher = batcher_of(unit)
        batcher.units = batcher._contender.units = 1  # what waits at the gate leaves a core to the other
        held, fake.gate = fake.gate, Gate()  # only the old sessions wait
        async with asyncio.TaskGroup() as group:
            group.create_task(client.post(INFER, json=ONES))
            await asyncio.to_thread(held.wait_for_runs, 1)
            group.create_task(client.post(INFER, json=ONES))
            await until(lambda: batcher_of(unit).pending == 1)
            single = 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
            models.put(tmp_path, "double", models.double(), models.DOUBLE + single)
            assert (await client.post("/v2/repository/models/double/load", json={})).status_code == 200
            assert (await client.post(INFER, json=ONES)).status_code == 200
            found = await read(unit)
            assert found.value("nv_inference_pending_request_count", **DOUBLE) == 1
            assert found.value("oriel_queue_depth", **DOUBLE, priority="0") == 1
            assert found.value("nv_inference_request_success", **DOUBLE) == 1
            held.open()
        await until(lambda: not unit.catalog.leaving)
        assert (await read(unit)).value("nv_inference_request_success", **DOUBLE) == 3


async def test_repository_that_cannot_be_read_is_seen_in_the_metrics(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, 2)
    async with serving(root, "poll") as served:
        assert (await read(served.unit)).value("oriel_model_repository_up") == 1
        shutil.move(root, tmp_path / "elsewhere")

        async def down() -> bool:
            return not (await read(served.unit)).value("oriel_model_repository_up")

        await until(down)
        assert await served.answer() == 2


async def test_loads_that_fail_are_counted_by_model_and_kind(tmp_path: Path) -> None:
    put(tmp_path, 2)
    (models.put(tmp_path, "junk", None, 'backend: "onnxruntime"') / "1/model.onnx").write_bytes(b"junk")
    models.put(tmp_path, "wrong", models.double(), models.DOUBLE + 'metric_tags { key: "a-b" value: "c" }')
    async with serving(tmp_path, "explicit", load_models=("*",)) as served:
        for _ in range(2):
            await served.client.post("/v2/repository/models/junk/load", json={})
        found = await read(served.unit)
    assert found.where("oriel_model_load_failures_total") == {
        frozenset({("model", "junk"), ("reason", "model")}): 3.0,
        frozenset({("model", "wrong"), ("reason", "config")}): 1.0,
    }
