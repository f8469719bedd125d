"""Ensembles as their users see them: over the wire, through loads and updates."""

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from fake_backend import FakeBackend
from tritonclient.utils import InferenceServerException

from oriel_inference.app import open_unit
from oriel_inference.model import TensorInfo
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models
from .control_server import Served, serving
from .ensembles import CHAIN, DIAMOND, PART, ROW, Step, config, infer, part, put


def diamond(root: Path) -> None:
    for number, name in enumerate("abcd"):
        part(root, name, 2 + number)  # a: 2, b: 3, c: 4, d: 5
    put(root, "e", config(DIAMOND, outputs=["left", "out"]))
    nested: tuple[Step, ...] = (("e", {"in": "in"}, {"out": "half"}), ("a", {"x": "half"}, {"y": "end"}))
    put(root, "nested", config(nested, outputs=["end"]))


X, Y = ((TensorInfo(name=name, datatype="FP32", shape=(-1, 4)),) for name in "xy")


@contextlib.asynccontextmanager
async def faked(root: Path, backends: Mapping[str, FakeBackend], mode: str, **more: Any) -> AsyncIterator[Served]:
    """A server whose models wait at the gates of fakes."""
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    settings = Settings(repositories=(root,), cores=2, control_mode=mode, drain_s=5.0, **ports, **more)
    async with open_unit(settings, backends=backends.__getitem__, sink=ListSink()) as unit:
        address = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
            try:
                yield Served(unit, client)
            finally:
                for backend in backends.values():
                    backend.gate.open()


async def state(served: Served, name: str = "e") -> tuple[str, str]:
    lines = await served.lines()
    return next(line for (model, _), line in lines.items() if model == name)


async def until_state(served: Served, wanted: str, name: str = "e") -> str:
    """Wait until a model's line has that state; its reason."""
    line = ("", "")

    async def reached() -> bool:
        nonlocal line
        line = await state(served, name)
        return line[0] == wanted

    await until(reached)
    return line[1]


async def until_reason(served: Served, text: str, name: str = "e") -> None:
    """Wait until a model's line says that."""

    async def said() -> bool:
        return text in (await state(served, name))[1]

    await until(said)


async def until_answer(served: Served, value: float) -> None:
    """Wait until the ensemble answers with that value; it answers all the while."""

    async def answered() -> bool:
        status, found = await infer(served)
        assert status == 200, found
        return bool(found == value)

    await until(answered)


# --- over the wire ------------------------------------------------------------------------------------------------


def ask(client: Any, kit: Any) -> None:
    """What a user does with an unmodified client."""
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    given = kit.InferInput("in", [2, 4], "FP32")
    given.set_data_from_numpy(values)
    result = client.infer("e", [given])
    np.testing.assert_allclose(result.as_numpy("left"), values * 2 * 3)
    np.testing.assert_allclose(result.as_numpy("out"), values * 2 * 4 * 5)
    only = client.infer("e", [given], outputs=[kit.InferRequestedOutput("out")], priority=3, timeout=10_000_000)
    assert only.as_numpy("left") is None and only.as_numpy("out") is not None
    np.testing.assert_allclose(client.infer("nested", [given]).as_numpy("end"), values * 2 * 4 * 5 * 2)
    assert client.is_model_ready("e") and client.is_model_ready("nested")
    wrong = kit.InferInput("in", [2, 3], "FP32")
    wrong.set_data_from_numpy(values[:, :3].copy())
    with pytest.raises(InferenceServerException, match=r"unexpected shape for input 'in' for model 'e'"):
        client.infer("e", [wrong])


async def test_unmodified_clients_use_an_ensemble_like_any_model(tmp_path: Path) -> None:
    diamond(tmp_path)

    def over_http(port: int) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
            ask(client, tritonclient.http)
            metadata, shown = client.get_model_metadata("e"), client.get_model_config("e")
            assert metadata["platform"] == shown["platform"] == "ensemble" and metadata["versions"] == ["1"]
            assert metadata["inputs"] == [{"name": "in", "datatype": "FP32", "shape": [-1, 4]}]
            assert [each["name"] for each in metadata["outputs"]] == ["left", "out"]
            assert [each["model_name"] for each in shown["ensemble_scheduling"]["step"]] == list("abcd")
            assert shown["ensemble_scheduling"]["step"][0]["input_map"] == {"x": "in"}
            stats = client.get_inference_statistics("e")["model_stats"][0]
            assert stats["inference_count"] >= 4 and stats["inference_stats"]["compute_infer"]["count"] >= 2
            counts = {name: client.get_inference_statistics(name)["model_stats"][0]["inference_count"] for name in "bc"}
            assert counts == {"b": 2, "c": 6}  # once both outputs were asked for, then only what c makes

    def over_grpc(port: int) -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            ask(client, tritonclient.grpc)
            assert client.get_model_metadata("e").platform == client.get_model_config("e").config.platform == "ensemble"
            assert client.get_inference_statistics("e").model_stats[0].execution_count >= 2

    async with serving(tmp_path, "none") as served:
        await asyncio.to_thread(over_http, served.unit.http_port)
        await asyncio.to_thread(over_grpc, served.unit.grpc_port)
        metrics = await served.client.get(f"http://127.0.0.1:{served.unit.metrics_port}/metrics")
        assert 'nv_inference_request_success{model="e",version="1"}' in metrics.text
        table = (await served.client.get(f"http://127.0.0.1:{served.unit.metrics_port}/models")).json()
        assert {line["name"] for line in (table if isinstance(table, list) else table["models"])} >= set("abcde")


async def test_class_names_come_from_the_model_that_makes_the_output(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    text = PART.replace('output [ { name: "y"', 'output [ { name: "y" label_filename: "names.txt"')
    (part(tmp_path, "b", 3, text=text) / "names.txt").write_text("one\ntwo\nthree\nfour\n")
    put(tmp_path, "e", config(CHAIN))
    async with serving(tmp_path, "none") as served:
        body = {**ROW, "outputs": [{"name": "out", "parameters": {"classification": 1}}]}
        response = await served.client.post("/v2/models/e/infer", json=body)
        assert response.json()["outputs"][0]["data"] == ["24.000000:3:four"]


async def test_a_request_under_way_finishes_on_the_parts_it_began_with(tmp_path: Path) -> None:
    backends = {"first": FakeBackend(X, Y), "second": FakeBackend(X, Y)}
    for name, backend in zip("ab", backends, strict=True):
        models.put(tmp_path, name, models.double(), f'backend: "{backend}" ' + PART)
    put(tmp_path, "e", config(CHAIN))
    async with faked(tmp_path, backends, "explicit", load_models=("e",)) as served, asyncio.TaskGroup() as group:
        (old,) = backends["second"].sessions
        warmed = len(old.batches)
        gate = backends["first"].gate
        gate.close()
        request = group.create_task(infer(served))
        await asyncio.to_thread(gate.wait_for_runs, 1)
        models.put(tmp_path, "b", models.double(), version=2)
        assert (await load(served, "b")).status_code == 200
        assert (await load(served, "e", "unload")).status_code == 200
        lines = await served.lines()
        assert lines["b", "2"][0] == "READY" and lines["b", "1"][0] == lines["e", "1"][0] == "UNLOADING"
        gate.open()
        assert await request == (200, 4)
        assert len(old.batches) == warmed + 1
        await until(lambda: old.closed)


async def test_a_sampled_request_shows_each_step_as_a_span(tmp_path: Path) -> None:
    diamond(tmp_path)
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    async with serving(tmp_path, "none") as served:
        response = await served.client.post("/v2/models/nested/infer", json=ROW, headers={"traceparent": parent})
        assert response.status_code == 200 and int(response.headers["x-oriel-cost-us"]) >= 0
        sink = served.unit.surface.sink
        assert isinstance(sink, ListSink)
        spans = {span.context.span_id: span for span in sink.spans if span.name.startswith("step ")}
        (compute,) = (span for span in sink.spans if span.name == "compute")
        outer = [span for span in spans.values() if span.parent_id == compute.context.span_id]
        assert [span.attributes["oriel.model"] for span in outer] == ["e", "a"]
        inner = [span for span in spans.values() if span.parent_id == outer[0].context.span_id]
        # b makes nothing that is asked for
        assert sorted(str(span.attributes["oriel.model"]) for span in inner) == list("acd")
        assert all(outer[0].start_s <= span.start_s <= span.end_s <= outer[0].end_s for span in inner)


# --- loads and updates --------------------------------------------------------------------------------------------


async def test_an_ensemble_is_ready_once_its_parts_are(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    put(tmp_path, "e", config(CHAIN))
    async with serving(tmp_path, "poll") as served:
        assert await state(served) == ("UNAVAILABLE", "needs model 'b', which is not ready: it is not loaded")
        status, body = await infer(served)
        assert status == 503 and body["reason"] == "model_not_ready"
        assert "'e' has no version that is ready: it needs model 'b'" in body["error"]
        folder = part(tmp_path, "b", 3)
        assert await until_state(served, "READY") == ""
        assert await infer(served) == (200, 6)
        (folder / "1/model.onnx").write_bytes(b"junk")  # what serves goes on
        await until_reason(served, "newer ones were refused", "b")
        assert await infer(served) == (200, 6)
        shutil.rmtree(folder)
        assert "needs model 'b', which is not ready" in await until_state(served, "UNAVAILABLE")
        part(tmp_path, "b", 5)
        assert await until_state(served, "READY") == ""
        assert await infer(served) == (200, 10)


async def test_a_new_version_of_a_part_takes_over_without_a_failed_request(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    part(tmp_path, "b", 3)
    put(tmp_path, "e", config(CHAIN))
    pinned = config(CHAIN).replace('"b" model_version: -1', '"b" model_version: 1')
    put(tmp_path, "pinned", pinned)
    async with serving(tmp_path, "poll") as served:
        part(tmp_path, "b", 7, version=2)
        answers = []

        async def answered() -> bool:
            status, value = await infer(served)
            assert status == 200, value
            answers.append(value)
            return bool(value == 14)

        await until(answered)
        assert {14} <= set(answers) <= {6, 14}
        # the version it asks for has left
        assert "needs model 'b' version 1, which is not ready" in await until_state(served, "UNAVAILABLE", "pinned")
        (tmp_path / "b/config.pbtxt").write_text(PART + "version_policy { all {} }")
        await until_state(served, "READY", "pinned")
        assert await infer(served, "pinned") == (200, 6) and await infer(served) == (200, 14)


async def test_a_part_that_changes_its_shape_takes_the_ensemble_out_until_it_fits_again(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    folder = part(tmp_path, "b", 3)
    put(tmp_path, "e", config(CHAIN))
    async with serving(tmp_path, "poll") as served:
        assert await infer(served) == (200, 6)
        models.put(tmp_path, "b", models.double(("n", 5)), PART.replace("dims: [ 4 ]", "dims: [ 5 ]"), 2)
        reason = await until_state(served, "UNAVAILABLE")
        assert "tensor 't' is [-1, 4] as output 'y' of 'a' but [-1, 5] as input 'x' of 'b'" in reason
        assert (await infer(served))[0] == 404
        shutil.rmtree(folder)
        part(tmp_path, "b", 5)
        await until_state(served, "READY")
        assert await infer(served) == (200, 10)


async def test_a_bad_change_of_the_ensemble_keeps_the_old_one(tmp_path: Path) -> None:
    for name, factor in (("a", 2), ("b", 3)):
        part(tmp_path, name, factor)
    put(tmp_path, "e", config(CHAIN))
    swapped = config((("b", {"x": "in"}, {"y": "t"}), ("c", {"x": "t"}, {"y": "out"})))
    async with serving(tmp_path, "poll") as served:
        for text, reason in ((config(()), "step: is missing"), (swapped, "needs model 'c', which is not ready")):
            put(tmp_path, "e", text)
            await until_reason(served, reason)
            assert await infer(served) == (200, 6)
            assert (await state(served))[0] == "READY"
        part(tmp_path, "c", 10)  # now the change can be had
        await until_answer(served, 30)
        assert await state(served) == ("READY", "")


async def test_ensembles_that_lead_back_to_themselves_are_refused(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    other = (("e", {"in": "in"}, {"out": "out"}),)
    put(tmp_path, "e", config((("a", {"x": "in"}, {"y": "out"}),)))
    put(tmp_path, "f", config(other))
    async with serving(tmp_path, "poll") as served:
        assert await infer(served, "f") == (200, 2)
        put(tmp_path, "e", config((("f", {"in": "in"}, {"out": "out"}),)))
        await until_reason(served, "leads back to the ensemble itself")
        assert await infer(served, "f") == (200, 2) and await infer(served) == (200, 2)
    async with serving(tmp_path, "none", strict_readiness=False) as served:  # nothing served before
        assert {(await state(served, name))[0] for name in "ef"} == {"UNAVAILABLE"}
        assert (await infer(served))[0] == 503


async def test_nesting_is_bounded(tmp_path: Path) -> None:
    part(tmp_path, "m0", 1)
    for depth in range(1, 11):
        step = ("m0", {"x": "in"}, {"y": "out"}) if depth == 1 else (f"m{depth - 1}", {"in": "in"}, {"out": "out"})
        put(tmp_path, f"m{depth}", config((step,)))
    async with serving(tmp_path, "none", strict_readiness=False) as served:
        assert await infer(served, "m8") == (200, 1)
        assert "nested more than 8 deep" in (await state(served, "m9"))[1]
        assert "needs model 'm9'" in (await state(served, "m10"))[1]


async def load(served: Served, name: str, what: str = "load", **parameters: object) -> Any:
    return await served.client.post(f"/v2/repository/models/{name}/{what}", json={"parameters": parameters})


async def test_loading_an_ensemble_loads_its_parts_and_unloading_may_unload_them(tmp_path: Path) -> None:
    diamond(tmp_path)
    async with serving(tmp_path, "explicit") as served:
        assert (await load(served, "a")).status_code == 200
        loaded = await load(served, "nested")
        assert loaded.status_code == 200, loaded.text
        assert await infer(served, "nested") == (200, 80)
        assert {(await state(served, name))[0] for name in ("nested", *"abcde")} == {"READY"}
        # a part of its own will: the ensemble goes, and comes back with it
        assert (await load(served, "b", "unload")).status_code == 200
        assert (await state(served))[1] == "needs model 'b', which is not ready: unloaded"
        assert "needs model 'e'" in (await state(served, "nested"))[1]
        assert (await infer(served, "nested"))[0] == 503
        assert (await load(served, "b")).status_code == 200
        assert await infer(served, "nested") == (200, 80)
        assert (await load(served, "nested", "unload")).status_code == 200
        assert await infer(served) == (200, 6)
        assert (await load(served, "nested")).status_code == 200
        assert (await load(served, "nested", "unload", unload_dependents=True)).status_code == 200
        for name in "cde":
            await until_state(served, "UNAVAILABLE", name)
        assert {name: (await state(served, name))[0] for name in "abcde"} == {
            "a": "READY",  # asked for by name
            "b": "READY",
            "c": "UNAVAILABLE",
            "d": "UNAVAILABLE",
            "e": "UNAVAILABLE",
        }


async def test_parts_that_another_ensemble_runs_on_stay(tmp_path: Path) -> None:
    for name, factor in (("a", 2), ("b", 3)):
        part(tmp_path, name, factor)
    put(tmp_path, "e", config(CHAIN))
    put(tmp_path, "f", config((("a", {"x": "in"}, {"y": "out"}),)))
    async with serving(tmp_path, "explicit", load_models=("e", "f")) as served:
        assert await infer(served) == (200, 6)
        assert (await load(served, "e", "unload", unload_dependents=True)).status_code == 200
        await until_state(served, "UNAVAILABLE", "b")
        assert await infer(served, "f") == (200, 2)


async def test_a_load_that_lacks_a_part_says_so(tmp_path: Path) -> None:
    part(tmp_path, "a", 2)
    put(tmp_path, "e", config(CHAIN))
    put(tmp_path, "r", config((("s", {"in": "in"}, {"out": "out"}),)))
    put(tmp_path, "s", config((("r", {"in": "in"}, {"out": "out"}),)))
    async with serving(tmp_path, "explicit") as served:
        refused = await load(served, "e")
        assert refused.status_code == 400 and "failed to load 'e': needs model 'b'" in refused.json()["error"]
        assert (await load(served, "r")).status_code == 400  # and comes to an end
        text = '{"platform": "ensemble"}'
        assert "ensemble_scheduling.step: is missing" in (await load(served, "e", config=text)).json()["error"]
        part(tmp_path, "b", 3)
        assert (await load(served, "e")).status_code == 200
        assert await infer(served) == (200, 6)
