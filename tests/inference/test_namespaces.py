"""Two repositories with models of the same name: --model-namespacing."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from oriel_inference.model import is_served_name

from ..waiting import until
from .control_server import Served, serving
from .ensembles import CHAIN, ROW, config, infer, part, put

AMBIGUOUS = "There are 2 identifiers of model 'a' in global map, model namespace must be provided to resolve ambiguity."


@pytest.fixture
def roots(tmp_path: Path) -> dict[str, Any]:
    """`a` in both, `b` in the first only, and an ensemble on both of them in each: 2 * 3 and 5 * 3."""
    first, second = tmp_path / "first", tmp_path / "second"
    part(first, "a", 2)
    part(first, "b", 3)
    part(second, "a", 5)
    put(first, "e", config(CHAIN, outputs=["out"]))
    put(second, "f", config(CHAIN, outputs=["out"]))
    return {"repositories": (first, second), "namespacing": True}


async def double(served: Served, name: str) -> tuple[int, Any]:
    response = await served.client.post(
        f"/v2/models/{name}/infer", json=ROW | {"inputs": [ROW["inputs"][0] | {"name": "x"}]}
    )
    body = response.json()
    return response.status_code, body["outputs"][0]["data"][0] if response.status_code == 200 else body["error"]


async def test_each_ensemble_runs_on_the_models_of_its_repository(tmp_path: Path, roots: dict[str, Any]) -> None:
    async with serving(tmp_path, "none", **roots) as served:
        assert await infer(served, "e") == (200, 6.0) and await infer(served, "f") == (200, 15.0)
        status, error = await double(served, "a")
        assert status == 400 and error == f"{AMBIGUOUS} They are a@1, a@2"
        assert await double(served, "a@1") == (200, 2.0) and await double(served, "a@2") == (200, 5.0)
        assert await double(served, "b") == (200, 3.0)
        assert {name for name, _ in await served.lines()} == {"a@1", "a@2", "b", "e", "f"}
        assert (await served.client.get("/v2/models/a/ready")).status_code == 400
        assert (await served.client.get("/v2/health/ready")).status_code == 200
        assert (await served.client.get("/v2/models/a@3/ready")).status_code == 404


async def test_a_name_that_is_there_once_again_needs_no_number(tmp_path: Path, roots: dict[str, Any]) -> None:
    first = roots["repositories"][0]

    async def answers(**wanted: float | int) -> None:
        async def answered() -> bool:
            found = {"e": await infer(served, "e"), "f": await infer(served, "f"), "a": await double(served, "a")}
            return all(value in found[name] for name, value in wanted.items())

        await until(answered)

    async with serving(tmp_path, "poll", **roots) as served:
        await answers(e=6.0, f=15.0, a=400)
        (first / "a").rename(tmp_path / "away")
        await answers(e=15.0, f=15.0, a=5.0)
        shutil.move(tmp_path / "away", first / "a")
        await answers(e=6.0, f=15.0, a=400)


async def test_a_load_of_an_ambiguous_name_loads_all_of_them(tmp_path: Path, roots: dict[str, Any]) -> None:
    async with serving(tmp_path, "explicit", **roots) as served:
        assert (await served.client.post("/v2/repository/models/a/load")).status_code == 200
        assert await double(served, "a@1") == (200, 2.0) and await double(served, "a@2") == (200, 5.0)
        assert (await served.client.post("/v2/repository/models/a@2/unload")).status_code == 200
        assert (await served.client.post("/v2/repository/models/f/load")).status_code == 200
        assert await infer(served, "f") == (200, 15.0)


@pytest.mark.parametrize(
    ("name", "served"), [("a@12", True), ("a@", False), ("a@\u0661", False), ("a@" + "1" * 99, False)]
)
def test_the_number_of_a_repository_is_short_and_in_ascii(name: str, served: bool) -> None:
    assert is_served_name(name) is served
