"""Compiled artefacts in a real server: the reference serves meanwhile, and nothing wrong or damaged ever serves."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from shutil import copyfile
from typing import Any

import pytest
from msgspec.structs import replace
from onnx import load, save_model

from oriel_inference.artefacts.folder import ArtefactFolder, Manifest, describe_files
from oriel_inference.artefacts.process import ArtefactRefused
from oriel_inference.backends.onnx_graph import ENTRY, OnnxGraph
from oriel_inference.backends.onnx_runtime import OnnxRuntimeSession
from oriel_inference.errors import BackendFailed
from oriel_inference.models.memory_budget import MemoryBudget
from oriel_inference.repository.outline import HOST
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models
from .artefact_server import COMPILE, COMPILED, built_ahead, forge, only_artefact, outcomes, served, state, until_state
from .control_server import ROW, put, serving, times


async def test_an_artefact_is_built_checked_and_swapped_in_under_load_without_a_failed_call(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        states, answers = set(), 0

        async def call_until_serving() -> None:
            nonlocal answers
            while True:
                states.add(seen := state(one.unit))
                assert seen != "refused"
                assert await one.answer() == 2.0  # raises for any other status than 200
                answers += 1
                if seen == "serving":
                    return

        await asyncio.gather(*(call_until_serving() for _ in range(4)))
        assert answers >= 4 and states - {"serving"}, "the reference answered before"
        statistics = one.unit.catalog.get("double").batcher.statistics
        assert sum(statistics.failures.values()) == 0
        assert outcomes(one) == {"built": 1}
        (line,) = (await one.lines()).values()
        assert line[0] == "READY"
        assert line[1].startswith(
            "compiled by onnxruntime-graph: serving, largest error 0 absolute, 0 relative over 2 "
        )
        text = (await one.client.get(f"http://127.0.0.1:{one.unit.metrics_port}/metrics")).text
        state_line = 'oriel_artefact_state{model="double",version="1",compiler="onnxruntime-graph",state="serving"} 1'
        assert state_line in text
        assert 'oriel_artefacts_total{compiler="onnxruntime-graph",outcome="built"} 1' in text
        (shown,) = (await one.client.get(f"http://127.0.0.1:{one.unit.metrics_port}/models")).json()
        assert shown["artefact"]["state"] == "serving"
        assert shown["artefact"]["fingerprint"] == only_artefact(tmp_path / "artefacts").name
        statistics_of = await one.client.get("/v2/models/double/stats")
        assert statistics_of.headers["x-oriel-artefact"] == "serving", "which the gateway's console shows"
        sink = one.unit.surface.sink
        assert isinstance(sink, ListSink)
        spans = {span.name: span.attributes for span in sink.spans if span.name.startswith("artefact")}
        assert spans["artefact build"]["oriel.outcome"] == "built"
        assert spans["artefact check"]["oriel.artefact.fingerprint"] == shown["artefact"]["fingerprint"]


async def test_a_later_start_finds_the_artefact_and_builds_nothing(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    for expected in ({"built": 1}, {"found": 1}):
        async with served(tmp_path / "models", tmp_path / "artefacts") as one:
            await until_state(one, "serving")
            assert await one.answer() == 2.0
            assert outcomes(one) == expected


async def test_servers_that_start_together_serve_one_artefact_and_each_builds_it_at_most_once(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with AsyncExitStack() as stack:
        two = await asyncio.gather(
            *(stack.enter_async_context(served(tmp_path / "models", tmp_path / "artefacts")) for _ in range(2))
        )
        await asyncio.gather(*(until_state(each, "serving") for each in two))
        found = [outcomes(each) for each in two]
        assert {"built": 1} in found and all(each.get("built", 0) <= 1 for each in found), found
        assert all(set(each) <= {"built", "found"} for each in found), found
        assert [await each.answer() for each in two] == [2.0] * 2
    only_artefact(tmp_path / "artefacts")


async def test_models_with_the_same_file_share_one_build(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    models.put(tmp_path / "models", "twin", times(2.0), COMPILED.replace('name: "double"', 'name: "twin"'))
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        await until_state(one, "serving", "twin")
        assert outcomes(one) == {"built": 1, "found": 1}


async def test_a_restart_does_not_repeat_a_build_that_was_refused_until_its_bounds_are_others(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    small = {"artefact_build_bytes": 1 << 20}
    for expected in ({"out_of_memory": 1}, {"remembered": 1}):
        async with served(tmp_path / "models", tmp_path / "artefacts", **small) as one:
            await until_state(one, "refused")
            assert outcomes(one) == expected
            assert await one.answer() == 2.0
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")


async def test_a_damaged_artefact_is_never_opened_but_built_again(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    folder = tmp_path / "artefacts"
    save_model(
        times(5.0), str(built_ahead(tmp_path / "models", folder) / ENTRY)
    )  # the manifest has the checksum of the right one
    async with served(tmp_path / "models", folder) as one:
        await until_state(one, "serving")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"damaged": 1, "built": 1}


async def test_an_artefact_that_somebody_else_publishes_during_the_build_serves_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two builds of one model need not have equal bytes."""
    put(tmp_path / "models", 2.0, config=COMPILED)
    publish = ArtefactFolder.publish

    def publish_second(self: ArtefactFolder, work: Path, manifest: Manifest) -> None:
        monkeypatch.setattr(ArtefactFolder, "publish", publish)
        with self.work() as other:
            for name in manifest.files:
                copyfile(work / name, other / name)
            model = load(str(other / ENTRY), load_external_data=False)
            model.doc_string = "another build"
            (other / ENTRY).write_bytes(model.SerializeToString())
            publish(self, other, replace(manifest, files=describe_files(other)))
        publish(self, work, manifest)

    monkeypatch.setattr(ArtefactFolder, "publish", publish_second)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        assert await one.answer() == 2.0
        assert outcomes(one) == {"built": 1, "found": 1}
    assert b"another build" in (only_artefact(tmp_path / "artefacts") / ENTRY).read_bytes()


async def test_a_server_whose_build_is_refused_takes_what_another_one_has_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    publish = ArtefactFolder.publish

    def publish_late(self: ArtefactFolder, work: Path, manifest: Manifest) -> None:
        publish(self, work, manifest)
        raise ArtefactRefused(RefusalKind.TIMED_OUT, "it took too long")

    monkeypatch.setattr(ArtefactFolder, "publish", publish_late)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        assert outcomes(one) == {"found": 1}
    assert [path.name for path in (tmp_path / "artefacts").iterdir()] == [only_artefact(tmp_path / "artefacts").name]


async def test_a_forged_artefact_with_the_right_checksums_is_refused_by_its_outputs(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    folder = tmp_path / "artefacts"
    artefact = built_ahead(tmp_path / "models", folder)
    forge(artefact, ENTRY, times(5.0).SerializeToString())
    for expected in ({"outputs_differ": 1}, {"remembered": 1}):
        async with served(tmp_path / "models", folder) as one:
            await until_state(one, "refused")
            assert await one.answer() == 2.0
            assert outcomes(one) == expected
            (line,) = (await one.lines()).values()
            assert line[0] == "READY" and "output 'y' differs in " in line[1]
    assert not artefact.exists(), "it is removed, so that nobody loads it"


async def test_another_file_is_another_fingerprint_and_a_refusal_does_not_hold_for_it(tmp_path: Path) -> None:
    folder = tmp_path / "artefacts"
    put(tmp_path / "models", 2.0, config=COMPILED)
    async with serving(tmp_path / "models", "poll", artefact_folder=folder) as one:
        await until_state(one, "serving")
        before = one.unit.catalog.get("double").artefact
        put(tmp_path / "models", 3.0, version=2, config=COMPILED)
        await one.until_answer(3.0)
        await until_state(one, "serving")
        after = one.unit.catalog.get("double").artefact
        assert before is not None and after is not None
        assert before.state.value == "retired" and before.fingerprint != after.fingerprint
        assert await one.answer() == 3.0


class Failing(OnnxRuntimeSession):
    """A session of an artefact that fails once it is told to."""

    fails = False

    def run(self, inputs: Any, outputs: Any) -> Any:
        if self.fails:
            raise BackendFailed("the artefact is broken")
        return super().run(inputs, outputs)


async def test_an_artefact_that_fails_in_service_is_rolled_back_and_its_caller_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Failing] = []
    right = OnnxGraph.open

    def broken(self: OnnxGraph, path: Path, options: Any) -> Failing:
        session = right(self, path, options)
        session.__class__ = Failing
        assert isinstance(session, Failing)
        opened.append(session)
        return session

    monkeypatch.setattr(OnnxGraph, "open", broken)
    put(tmp_path / "models", 2.0, config=COMPILED + "instance_group { count: 2 kind: KIND_CPU }")
    folder = tmp_path / "artefacts"
    async with served(tmp_path / "models", folder) as one:
        await until_state(one, "serving")
        assert await one.answer() == 2.0
        for session in opened:
            session.fails = True
        assert set(await asyncio.gather(*(one.answer() for _ in range(20)))) == {2.0}
        await until_state(one, "refused")
        assert set(await asyncio.gather(*(one.answer() for _ in range(20)))) == {2.0}
        assert len(opened) == 2
        await until(lambda: all(session._session is None for session in opened))
        text = (await one.client.get(f"http://127.0.0.1:{one.unit.metrics_port}/metrics")).text
        assert 'oriel_artefact_rollbacks_total{model="double"} 1' in text
        await until(lambda: list(folder.glob("*.refused")))
    async with served(tmp_path / "models", folder) as one:
        await until_state(one, "refused")
        assert outcomes(one) == {"remembered": 1}
        (line,) = (await one.lines()).values()
        assert "it failed in service, where the model answers: the artefact is broken" in line[1]


async def test_a_request_that_the_model_itself_refuses_says_nothing_about_its_artefact(tmp_path: Path) -> None:
    config = """
    max_batch_size: 0
    input [ { name: "index" data_type: TYPE_INT64 dims: [ -1 ] } ]
    output [ { name: "row" data_type: TYPE_FP32 dims: [ -1, 2 ] } ]
    """
    models.put(tmp_path / "models", "lookup", models.lookup(), config + COMPILE)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving", "lookup")
        for index, status in ((2, 200), (7, 500), (1, 200)):
            body = {"inputs": [{"name": "index", "shape": [1], "datatype": "INT64", "data": [index]}]}
            response = await one.client.post("/v2/models/lookup/infer", json=body)
            assert (response.status_code == 200) == (status == 200), response.text
        assert state(one.unit, "lookup") == "serving"


async def test_a_server_that_stops_ends_the_build_that_is_under_way(tmp_path: Path) -> None:
    models.put(tmp_path / "models", "double", models.double(), COMPILED)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until(lambda: state(one.unit) in ("building", "checking", "serving"))
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        response = await one.client.post("/v2/models/double/infer", json=ROW)
        assert response.json()["outputs"][0]["data"] == [2, 4, 6, 8]


async def test_a_folder_that_others_may_write_is_not_used_and_the_model_serves(tmp_path: Path) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    (tmp_path / "artefacts").mkdir()
    (tmp_path / "artefacts").chmod(0o777)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until(lambda: outcomes(one) == {"no_space": 1})
        await until(lambda: (life := one.unit.catalog.get("double").artefact) is not None and life.reason)
        assert state(one.unit) == "absent"
        assert "may be written by others" in str((await one.lines()).values())
        assert await one.answer() == 2.0
    assert list((tmp_path / "artefacts").iterdir()) == []


async def test_an_artefact_for_which_the_memory_budget_has_no_room_does_not_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED)
    monkeypatch.setattr(MemoryBudget, "grow", lambda self, serving, device, size_bytes: False)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until(lambda: outcomes(one).get("no_space"))
        await until(lambda: (life := one.unit.catalog.get("double").artefact) is not None and life.reason)
        assert state(one.unit) == "absent"
        assert "no room in the memory budget" in str((await one.lines()).values())
        assert await one.answer() == 2.0


async def test_every_instance_of_an_artefact_counts_towards_the_memory_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "models", 2.0, config=COMPILED + "instance_group { count: 3 kind: KIND_CPU }")
    grown: list[tuple[str, int]] = []

    def grow(self: MemoryBudget, serving: Any, device: str, size_bytes: int) -> bool:
        grown.append((device, size_bytes))
        return True

    monkeypatch.setattr(MemoryBudget, "grow", grow)
    async with served(tmp_path / "models", tmp_path / "artefacts") as one:
        await until_state(one, "serving")
        manifest = ArtefactFolder(tmp_path / "artefacts", max_bytes=0).find(only_artefact(tmp_path / "artefacts").name)
        assert manifest is not None and grown == [(HOST, 3 * manifest.size_bytes)]
