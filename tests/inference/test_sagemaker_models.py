"""SageMaker's contract for endpoints with many models: what `/models` loads, lists, calls and unloads."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from oriel_inference.app import open_unit
from oriel_inference.servers import sagemaker
from oriel_inference.servers.restrictions import restriction_flag
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from . import ensembles, models
from .clients import client_of
from .control_server import ROW, times


@pytest.fixture
def archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAGEMAKER_MULTI_MODEL", "true")
    monkeypatch.setattr(sagemaker, "MODELS", root := tmp_path / "ml")
    models.put(root / "h1", "model", times(3), models.DOUBLE)  # its configuration has another name
    for number in (2, 5):
        inside = root / f"h{number}/model"
        ensembles.part(inside, "a", number)
        ensembles.part(inside, "b", 3)
        ensembles.put(inside, "whole", ensembles.config(ensembles.CHAIN))
    return root


@asynccontextmanager
async def served(tmp_path: Path, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    (tmp_path / "none").mkdir()
    more = {"http_port": None, "grpc_port": None, "metrics_port": None, "cores": 2, "drain_s": 5.0} | more
    settings = Settings(repositories=(tmp_path / "none",), control_mode="explicit", sagemaker_port=0, **more)
    async with open_unit(settings, sink=ListSink()) as unit, client_of(unit.cloud_ports["SageMaker"]) as client:
        yield client
        if "http_restrictions" not in more:
            for each in (await client.get("/models")).json()["models"]:
                assert (await client.delete(f"/models/{each['modelName']}")).status_code == 200
        assert unit.catalog.names() == [], "nothing stays behind"


async def load(client: httpx.AsyncClient, name: str, url: object, target: str = "") -> httpx.Response:
    headers = {"x-amzn-sagemaker-target-model": target} if target else {}
    return await client.post("/models", json={"model_name": name, "url": str(url)}, headers=headers)


async def value(client: httpx.AsyncClient, name: str, row: Mapping[str, Any]) -> float:
    answer = await client.post(f"/models/{name}/invoke", json=row)
    assert answer.status_code == 200, answer.text
    return float(answer.json()["outputs"][0]["data"][0])


async def test_a_model_is_loaded_called_and_unloaded(archives: Path, tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        assert (await load(client, "hash", archives / "h1/model", "team/m.tar.gz")).status_code == 200
        assert (await load(client, "hash", archives / "h1/model")).status_code == 409
        assert (await load(client, "other", archives / "h1/model", "team/m.tar.gz")).status_code == 409
        line = {"modelName": "hash", "modelUrl": str(archives / "h1")}
        assert (await client.get("/models")).json() == {"models": [line]}
        assert (await client.get("/models/hash")).json() == line
        answer = await client.post("/models/hash/invoke", json=ROW)
        assert (answer.json()["model_name"], answer.json()["outputs"][0]["data"][0]) == ("team_m.tar.gz", 3.0)
        assert (await client.delete("/models/hash")).status_code == 200
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/invoke")):
            assert (await client.request(method, f"/models/hash{path}")).status_code == 404
        assert (await client.put("/models", json={})).status_code == 405
        assert (await load(client, "hash", archives / "h1/model")).status_code == 200, "again"
        assert await value(client, "hash", ROW) == 3.0


async def test_ensembles_with_parts_of_the_same_names_stay_apart(archives: Path, tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        for name in ("h2", "h5"):
            assert (await load(client, name, archives / name / "model")).status_code == 200
        assert (await value(client, "h2", ensembles.ROW), await value(client, "h5", ensembles.ROW)) == (6.0, 15.0)
        assert (await client.delete("/models/h2")).status_code == 200
        assert await value(client, "h5", ensembles.ROW) == 15.0


async def test_only_archives_of_sagemaker_are_opened(archives: Path, tmp_path: Path) -> None:
    models.put(tmp_path / "away", "model", times(3), None)
    (archives / "link").symlink_to(tmp_path / "away")
    (archives / "file").mkdir()
    (archives / "file/model").symlink_to(tmp_path / "away/model")
    for name in ("one", "two"):
        models.put(archives / "many", name, times(3), None)
    async with served(tmp_path) as client:
        for url, why in {
            tmp_path / "away/model": "below",
            archives / "h1/../../away/model": "below",
            archives / "link/model": "below",
            archives: "below",
            "model\0": "below",
            archives / "file": "leads out",
            archives / "gone": "not a folder",
            archives / "many": "['one', 'two']",
        }.items():
            refused = await load(client, "name", url)
            assert refused.status_code == 400 and why in refused.json()["error"], refused.text
        for name in ("", "../h1", "a" * 200, ".."):
            assert (await load(client, name, archives / "h1/model")).status_code == 400
        assert (await load(client, "a", archives / "h2/model")).status_code == 400, "a step has that name"


async def test_no_memory_is_507(archives: Path, tmp_path: Path) -> None:
    async with served(tmp_path, model_memory_bytes=1) as client:
        assert (await load(client, "hash", archives / "h1/model")).status_code == 507
        assert (await client.get("/models/hash")).status_code == 404


async def test_the_models_are_restricted_as_a_repository(archives: Path, tmp_path: Path) -> None:
    secret = restriction_flag("api", "")("model-repository:key=secret")
    async with served(tmp_path, http_restrictions=(secret,)) as client:
        assert (await client.get("/models")).status_code == 403
        assert (await client.get("/models", headers={"key": "secret"})).status_code == 200
