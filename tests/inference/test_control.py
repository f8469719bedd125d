"""Control modes, hot update, and uploads that must not disturb what serves."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
from fake_backend import FakeBackend
from onnx import TensorProto, external_data_helper, save_model
from tritonclient.utils import InferenceServerException

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.models.load_slots import LoadSlots
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.servers.surface import Surface
from oriel_inference.stores.local import LocalStore

from ..waiting import until
from . import models
from .control_server import ROW, Served, put, serving, times
from .exposed import read
from .gated import gated

INFER = "/v2/models/double/infer"


async def test_new_version_takes_over_and_the_old_one_leaves(tmp_path: Path) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, "poll") as served:
        assert await served.answer() == 2
        put(tmp_path, 3, version=2)
        lines = await served.until(lambda lines: lines.keys() == {("double", "2")})
        assert lines["double", "2"] == ("READY", "")
        assert await served.answer() == 3
        put(tmp_path, 4, version=2)  # the same version with other files
        await served.until_answer(4)
        shutil.rmtree(tmp_path / "double")

        async def gone() -> bool:
            return not await served.lines()

        await until(gone)
        assert (await served.client.post(INFER, json=ROW)).status_code == 404


async def test_requests_in_flight_finish_on_the_old_version(tmp_path: Path, fake: FakeBackend) -> None:
    explicit = {"control_mode": "explicit", "load_models": ("double",)}
    async with gated(tmp_path, fake, **explicit) as (unit, client), asyncio.TaskGroup() as group:
        served, batcher = Served(unit, client), unit.catalog.get("double").batcher
        inflight = [group.create_task(client.post(INFER, json=ROW))]
        await asyncio.to_thread(fake.gate.wait_for_runs, 1)
        inflight += [group.create_task(client.post(INFER, json=ROW)) for _ in range(3)]
        await until(lambda: batcher.pending == 3)
        assert (await client.post("/v2/repository/models/double/unload", json={})).status_code == 200
        assert (await served.lines())["double", "1"][0] == "UNLOADING"
        assert (await client.post(INFER, json=ROW)).status_code == 503
        fake.gate.open()
        assert [(await each).status_code for each in inflight] == [200] * 4

        async def unloaded() -> bool:
            return (await served.lines())["double", "1"] == ("UNAVAILABLE", "unloaded")

        await until(unloaded)


async def test_unloading_what_is_not_loaded_is_no_error(tmp_path: Path) -> None:
    """As in Triton: scripts unload before they load. Only a name that nobody has is refused."""
    put(tmp_path, 2)
    async with serving(tmp_path, "explicit") as served:
        for name, status in (("double", 200), ("double", 200), ("doubel", 404)):
            assert (await served.client.post(f"/v2/repository/models/{name}/unload")).status_code == status
        assert (await served.client.post("/v2/repository/models/double/load")).status_code == 200
        assert await served.answer() == 2


@pytest.mark.parametrize("mode", ["poll", "explicit"])
async def test_a_file_whose_check_hangs_keeps_no_other_model_from_being_ready(tmp_path: Path, mode: str) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, mode, load_models=("double",), check_timeout_s=60.0) as served:
        models.put(tmp_path, "a-hangs", models.endless(), models.DOUBLE.replace('name: "double"', ""))
        loading = None
        if mode == "explicit":
            loading = asyncio.create_task(served.client.post("/v2/repository/models/a-hangs/load", json={}))
        await served.until(lambda lines: ("LOADING", "") in lines.values())
        models.put(tmp_path, "b-fine", times(3), models.DOUBLE.replace('name: "double"', ""))
        if mode == "explicit":
            assert (await served.client.post("/v2/repository/models/b-fine/load", json={})).status_code == 200
            put(tmp_path, 4)
            assert (await served.client.post("/v2/repository/models/double/load", json={})).status_code == 200
            assert await served.answer() == 4
        lines = await served.until(lambda lines: lines.get(("b-fine", "1"), ("",))[0] == "READY")
        assert await served.answer("b-fine") == 3
        assert {name: line for (name, _), line in lines.items()}["a-hangs"] == ("LOADING", "")
        if loading is not None:
            loading.cancel()


async def test_models_load_at_the_same_time_and_one_model_one_load_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abcd":
        models.put(tmp_path, name, times(2), models.DOUBLE.replace('name: "double"', ""))
    together = threading.Barrier(2)
    under_way: list[str] = []
    most = 0

    def slowly(loading: Loading) -> Any:
        @contextmanager
        def slot() -> Iterator[float]:
            nonlocal most
            with loading.slot() as waited_s:
                assert loading.model not in under_way
                under_way.append(loading.model)
                most = max(most, len(under_way))
                together.wait(120)
                under_way.remove(loading.model)
                yield waited_s

        return load_model(replace(loading, slot=slot))

    monkeypatch.setattr("oriel_inference.models.rollout.load_model", slowly)
    # On a busy machine a load would count as slow and leave its slot to another one.
    monkeypatch.setattr("oriel_inference.models.rollout.LoadSlots", partial(LoadSlots, slow_s=3600.0))
    async with serving(tmp_path, "explicit", load_models=("*",)) as served:
        assert {line[0] for line in (await served.lines()).values()} == {"READY"}
        again = [served.client.post(f"/v2/repository/models/{name}/load", json={}) for name in "aabb"]
        assert [each.status_code for each in await asyncio.gather(*again)] == [200] * 4
    assert most == 2


def external(folder: Path, location: str) -> None:
    model = times(2)
    tensor = model.graph.initializer[0]
    external_data_helper.set_external_data(tensor, location=location)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def many(folder: Path) -> None:
    for number in range(10_001):
        (folder / f"f{number}").touch()


ATTACKS = {
    "half": (lambda f: (f / "model.onnx").write_bytes(times(3).SerializeToString()[:-20]), "not a whole ONNX file"),
    "junk": (lambda f: (f / "model.onnx").write_bytes(b"\0" * 100), "not a whole ONNX file"),
    "link out": (lambda f: (f / "model.onnx").symlink_to("/etc/passwd"), "leads out of the model repository"),
    "pipe": (lambda f: os.mkfifo(f / "model.onnx"), "pipes, sockets and devices"),
    "pickle": (lambda f: (f / "model.onnx").write_bytes(b"\x80\x04K\x01."), "pickle"),
    "absolute weights": (lambda f: external(f, "/etc/passwd"), "outside its version folder"),
    "climbing weights": (lambda f: external(f, "../1/model.onnx"), "outside its version folder"),
    "many": (many, "more than 10000 entries"),
    "empty": (lambda f: (f / "model.onnx").touch(), "is empty"),
}


# 10,001 files take seconds; test_hostile_repository.py tries a smaller bound.
@pytest.mark.parametrize("attacks", [[*ATTACKS.keys() - {"many"}], pytest.param(["many"], marks=pytest.mark.long)])
async def test_bad_upload_is_named_and_disturbs_nothing(tmp_path: Path, attacks: list[str]) -> None:
    tmp_path, upload = tmp_path / "models", tmp_path / "upload"
    put(tmp_path, 2)
    async with serving(tmp_path, "poll", poll_s=0.5 if "many" in attacks else 0.05) as served:
        for version, attack in enumerate(sorted(attacks), 2):
            do, reason = ATTACKS[attack]
            folder = tmp_path / "double" / str(version)
            upload.mkdir()
            do(upload)
            upload.rename(folder)
            line = ("double", str(version))
            lines = await served.until(lambda lines, line=line: line in lines)
            assert lines[line][0] == "UNAVAILABLE" and reason in lines[line][1], attack
            assert str(tmp_path) not in lines[line][1]
            assert lines["double", "1"][0] == "READY" and await served.answer() == 2
            assert (await served.client.get("/v2/health/ready")).status_code == 200
            shutil.rmtree(folder)
        put(tmp_path, 3, version=2)
        await served.until(lambda lines: lines.get(("double", "2"), ("",))[0] == "READY")
        assert await served.answer() == 3


async def test_bad_configuration_keeps_the_old_one(tmp_path: Path) -> None:
    folder = put(tmp_path, 2)
    async with serving(tmp_path, "poll") as served:
        (folder / "config.pbtxt").unlink()
        os.mkfifo(folder / "config.pbtxt")
        lines = await served.until(lambda lines: lines["double", "1"][1])
        assert "is not a file" in lines["double", "1"][1] and lines["double", "1"][0] == "READY"
        (folder / "config.pbtxt").unlink()
        (folder / "config.pbtxt").write_text("max_batch_size: -3")
        await served.until(lambda lines: "max_batch_size: must not be negative" in lines["double", "1"][1])
        (folder / "config.pbtxt").write_text(models.DOUBLE)
        await served.until(lambda lines: lines["double", "1"] == ("READY", ""))


async def test_repository_that_vanishes_changes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, 2)
    async with serving(root, "poll") as served:
        root.rename(tmp_path / "gone")
        await until(lambda: not all(served.unit.surface.control.repositories.up().values()))
        assert await served.answer() == 2
        assert (await served.client.get("/v2/health/ready")).status_code == 200


async def test_other_modes_refuse_load_and_unload(tmp_path: Path) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, "poll") as served:
        for what in ("load", "unload"):
            response = await served.client.post(f"/v2/repository/models/double/{what}", json={})
            assert response.status_code == 503 and response.json()["reason"] == "control_refused"
            assert "explicit model load / unload is not allowed if polling is enabled" in response.json()["error"]
        assert await served.answer() == 2


BAD_LOADS: list[tuple[dict[str, object], str]] = [
    ({"config": 5}, "must be a string"),
    ({"config": "{"}, "model configuration"),
    ({"file:1/model.onnx": "AAAA"}, "together with parameter 'config'"),
    ({"config": "{}", "file:1/model.onnx": "*"}, "base64"),
    ({"config": "{}", "file:../model.onnx": "AAAA"}, "Invalid file path"),
    ({"config": "{}", "file:1/../../x": "AAAA"}, "Invalid file path"),
    ({"config": "{}", "file:/etc/x": "AAAA"}, "Invalid file path"),
    ({"config": "{}", "file:1/*/x": "AAAA"}, "must have no asterisk"),
    ({"config": "{}", "file:1/model.onnx": "AAAA"}, "not a whole ONNX file"),
    ({"other": 1}, "is not known"),
]


async def test_bad_load_requests_are_refused_and_disturb_nothing(tmp_path: Path) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, "explicit", load_models=("*",)) as served:
        for parameters, text in BAD_LOADS:
            response = await served.client.post("/v2/repository/models/double/load", json={"parameters": parameters})
            assert response.status_code == 400 and text in response.json()["error"]
            assert await served.answer() == 2
        absent = await served.client.post("/v2/repository/models/absent/load", json={})
        assert absent.status_code == 404
        assert (await served.client.post("/v2/repository/R/index")).status_code == 501


def control(client: Any, name_of: Any) -> None:
    """What an operator does with an unmodified client."""
    index = client.get_model_repository_index()
    assert [name_of(line) for line in getattr(index, "models", index)] == ["double"]
    client.load_model("double")
    assert client.is_model_ready("double")
    # `{}`: everything is read from the file that comes along
    data = times(5).SerializeToString()
    client.load_model("double", config='{"max_batch_size": 4}', files={"file:7/model.onnx": data})
    assert client.is_model_ready("double", "7") and client.get_model_config("double")
    client.load_model("fresh", config="{}", files={"file:1/model.onnx": data})
    assert client.is_model_ready("fresh")
    with pytest.raises(InferenceServerException, match="failed to load"):
        client.load_model("double", config='{"max_batch_size": -1}')
    for name, config in (("double", '"no": {'), ("absent", None), ("   ", None)):
        reason = f"failed to load '{name}', failed to poll from model repository"
        with pytest.raises(InferenceServerException, match=reason):
            client.load_model(name, config=config)
    assert client.is_model_ready("double", "7")
    client.unload_model("double", unload_dependents=True)
    assert not client.is_model_ready("double")


def _grpc_name(line: Any) -> str:
    return str(line.name)


async def test_unmodified_clients_load_and_unload(tmp_path: Path) -> None:
    put(tmp_path, 2)

    def over_http(port: int) -> None:
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
            control(client, lambda line: line["name"])

    def over_grpc(port: int) -> None:
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
            control(client, _grpc_name)

    async with serving(tmp_path, "explicit") as served:
        await asyncio.to_thread(over_http, served.unit.http_port)
    async with serving(tmp_path, "explicit") as served:
        await asyncio.to_thread(over_grpc, served.unit.grpc_port)


@pytest.mark.parametrize(
    ("strict", "lacks", "serves", "ready"),
    [
        (True, "", True, True),
        (True, "double", True, False),
        (False, "double", False, True),
        ("any", "double", True, True),
        # In a rollout it would replace one that serves.
        ("any", "double", False, False),
        ("any", "", False, True),
    ],
)
def test_strict_readiness_is_about_the_models_of_the_start(strict: Any, lacks: str, serves: bool, ready: bool) -> None:
    catalog = SimpleNamespace(loading=False, unseen=[], missing=lambda: lacks, serves_any=lambda: serves)
    surface: Any = SimpleNamespace(stopping=False, strict_readiness=strict, catalog=catalog)
    assert Surface.readiness(surface) == (ready, "" if ready else "model 'double' is not ready")


WARM = """
model_warmup [ {{ name: "w" batch_size: 2 count: 2
  inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [ {dims} ] {kind} }} }} }} ]
"""


@pytest.mark.parametrize(
    ("dims", "kind", "reason"),
    [
        (4, "zero_data: true", ""),
        (4, "random_data: true", ""),
        (4, 'input_data_file: "row"', ""),  # it is repeated
        (4, 'input_data_file: "rows"', ""),  # its first row is
        (5, "zero_data: true", "does not fit [4]"),
        (4, 'input_data_file: "short"', "holds 4 bytes"),
        (4, 'input_data_file: "../config.pbtxt"', "must be relative"),
        (4, 'input_data_file: "absent"', "is missing"),
    ],
)
def test_warm_up(tmp_path: Path, dims: int, kind: str, reason: str) -> None:
    folder = put(tmp_path, 2, config=models.DOUBLE + WARM.format(dims=dims, kind=kind))
    (folder / "warmup").mkdir()
    (folder / "warmup/rows").write_bytes(np.ones((2, 4), np.float32).tobytes())
    (folder / "warmup/row").write_bytes(np.ones(4, np.float32).tobytes())
    (folder / "warmup/short").write_bytes(b"abcd")
    (found,) = load_model(
        Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1)
    ).values()
    if reason:
        assert isinstance(found, LoadFailed) and reason in found.reason
    else:
        assert isinstance(found, LoadedVersion)
        found.close()


def test_weights_beside_the_model_are_fine(tmp_path: Path) -> None:
    from oriel_inference.repository.onnx_files import check_model_file

    path = tmp_path / "model.onnx"
    model = models.lookup()
    save_model(model, str(path), save_as_external_data=True, location="weights.bin", size_threshold=0)
    check_model_file(path, "m")


async def test_reloads_cost_no_call_over_grpc_and_keep_no_locks(tmp_path: Path) -> None:
    put(tmp_path, 2)
    async with serving(tmp_path, "explicit", load_models=("double",)) as served:
        async with tritonclient.grpc.aio.InferenceServerClient(f"127.0.0.1:{served.unit.grpc_port}") as client:
            x = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
            x.set_data_from_numpy(np.ones((1, 4), np.float32))
            done, answered = asyncio.Event(), 0

            async def ask() -> None:
                nonlocal answered
                while not done.is_set():
                    await client.infer("double", [x])
                    answered += 1

            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(ask())
                for factor in range(3, 11):
                    put(tmp_path, factor)
                    assert (await served.client.post("/v2/repository/models/double/load", json={})).status_code == 200
                done.set()
            assert answered
            assert not await client.is_model_ready("nobody")
        for number in range(50):
            await served.client.post(f"/v2/repository/models/nobody{number}/unload", json={})
        assert len(served.unit.surface.control.rollout._locks) <= 1
        long = await served.client.post("/v2/repository/index", content=b" " * (65 << 10))
        deep = await served.client.post("/v2/repository/index", content=b'{"x":' + b"[" * 100_000)
        assert (long.status_code, deep.status_code) == (400, 400)
        assert "JSON nesting depth exceeds maximum allowed limit (100)" in deep.json()["error"]


FALLBACKS = {"": "2", "all {}": "12"}


@pytest.mark.parametrize("policy", FALLBACKS)
async def test_a_start_with_a_corrupt_newest_version_serves_the_one_before(
    tmp_path: Path, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = models.DOUBLE + (f"version_policy {{ {policy} }}" if policy else "")
    for version in (1, 2, 3):
        put(tmp_path, version, version, config)
    whole = (tmp_path / "double/3/model.onnx").read_bytes()
    (tmp_path / "double/3/model.onnx").write_bytes(whole[:-20])
    labels = {"model": "double", "version": "2", "newest": "3"}
    async with serving(tmp_path, "poll") as served:
        assert (await served.client.get("/v2/health/ready")).status_code == 200
        assert await served.answer() == 2
        lines = await served.lines()
        assert {version for (_, version), line in lines.items() if line[0] == "READY"} == set(FALLBACKS[policy])
        assert lines["double", "3"][0] == "UNAVAILABLE" and "not a whole ONNX file" in lines["double", "3"][1]
        instead = "serves in place of version 3, which is unavailable"
        assert lines["double", "2"] == ("READY", instead)
        assert f"model double version 2 {instead}" in caplog.text
        assert (await read(served.unit)).value("oriel_model_fallback", **labels) == 1
        (tmp_path / "double/3/model.onnx").write_bytes(whole)
        wanted = {("double", version): ("READY", "") for version in ("123" if policy else "3")}
        await served.until(lambda lines: lines == wanted)
        assert await served.answer() == 3
        assert not (await read(served.unit)).where("oriel_model_fallback")


@pytest.mark.parametrize("files", [(), ("model.pkl",), ("notes.txt",)])
def test_a_newest_folder_that_holds_no_model_takes_nothing_away(tmp_path: Path, files: tuple[str, ...]) -> None:
    put(tmp_path, 2, config=None)
    (tmp_path / "double/2").mkdir()
    for name in files:
        (tmp_path / "double/2" / name).write_bytes(b"x")
    found = load_model(Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1))
    newest, before = found[2], found[1]
    assert isinstance(newest, LoadFailed) and newest.reason == "double/2/model.onnx is missing"
    assert isinstance(before, LoadedVersion)
    before.close()


async def test_a_load_whose_newest_version_is_corrupt_says_so_and_serves(tmp_path: Path) -> None:
    put(tmp_path, 1)
    put(tmp_path, 2, 2)
    (tmp_path / "double/2/model.onnx").write_bytes(b"junk")
    async with serving(tmp_path, "explicit") as served:
        refused = await served.client.post("/v2/repository/models/double/load")
        assert refused.status_code == 400
        assert refused.json()["error"].endswith("version 1 serves in place of version 2, which is unavailable")
        assert await served.answer() == 1


async def test_a_model_of_which_nothing_could_be_loaded_is_a_metric_and_one_that_was_unloaded_is_not(
    tmp_path: Path,
) -> None:
    put(tmp_path, 1)
    whole = (tmp_path / "double/1/model.onnx").read_bytes()
    (tmp_path / "double/1/model.onnx").write_bytes(b"junk")
    async with serving(tmp_path, "explicit") as served:
        assert (await served.client.post("/v2/repository/models/double/load")).status_code == 400
        assert (await read(served.unit)).value("oriel_model_unavailable", model="double") == 1
        (tmp_path / "double/1/model.onnx").write_bytes(whole)
        assert (await served.client.post("/v2/repository/models/double/load")).status_code == 200
        assert not (await read(served.unit)).where("oriel_model_unavailable")
        assert (await served.client.post("/v2/repository/models/double/unload")).status_code == 200
        assert not (await read(served.unit)).where("oriel_model_unavailable")


PAGES = [
    {"host": "evil.example:8000"},
    {"host": "evil.example:8000", "origin": "http://evil.example:8000", "content-type": "text/plain"},
    {"origin": "https://evil.example", "content-type": "text/plain"},
    {"origin": "null"},
]


async def test_a_page_in_a_browser_of_this_machine_controls_nothing(tmp_path: Path) -> None:
    """A page could load a model that it sent along: text/plain needs no preflight."""
    put(tmp_path, 2)
    async with serving(tmp_path, "explicit") as served:
        for page in PAGES:
            for path in ("/v2/repository/models/double/load", "/v2/repository/index", "/v2/logging"):
                refused = await served.client.post(path, content=b"{}", headers=page)
                reason = "serves this machine only" if "host" in page else "serve pages of other sites"
                assert refused.status_code == 400 and reason in refused.text
        own = {"origin": str(served.client.base_url).rstrip("/"), "content-type": "text/plain"}
        loaded = await served.client.post("/v2/repository/models/double/load", content=b"{}", headers=own)
        assert loaded.status_code == 200 and await served.answer() == 2
