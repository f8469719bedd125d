"""Python models that load and unload other models."""

from pathlib import Path

import pytest

from . import ensembles, models
from .python_calls import BEHAVE, put, say, served, starting

AROUND = """
platform: "ensemble" max_batch_size: 4
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "said" data_type: TYPE_STRING dims: [ 1 ] }
ensemble_scheduling { step { model_name: "INNER" model_version: -1
  input_map { key: "text" value: "text" } output_map { key: "said" value: "said" } } }
"""


async def test_a_model_loads_and_unloads_others_in_execute(tmp_path: Path) -> None:
    put(tmp_path, "loader", "loader", BEHAVE)
    put(tmp_path, "code", "behave", BEHAVE)
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    file = (tmp_path / "double/1/model.onnx").read_bytes()
    async with served(tmp_path, "loader") as (unit, http):

        async def run(text: str) -> str:
            return await say(http, text, model="loader")

        assert await run("is_model_ready('double'), is_model_ready('nowhere')") == "(False, False)"
        assert await run("load_model('double')") == "None"
        assert await run("is_model_ready('double'), is_model_ready('double', '1')") == "(True, True)"
        assert await run("is_model_ready(model_name=b'double', model_version='7')") == "False"
        assert await run("load_model('double', config=DOUBLE)") == "None"
        assert unit.catalog.get("double").spec.max_batch_size == 3
        files = f"{{'file:2/model.onnx': bytes.fromhex('{file.hex()}')}}"
        assert await run(f"load_model(model_name='double', config=DOUBLE, files={files})") == "None"
        assert await run("is_model_ready('double', '2'), is_model_ready('double', '1')") == "(True, False)"
        assert await run("unload_model('double', unload_dependents=True)") == "None"
        assert await run("is_model_ready('double')") == "False"
        assert await run("load_model('loader')") == "None", "a model that is loaded may load itself again"
        code = "{'file:1/model.py': b'print()'}"
        for text, error in {
            "load_model('nowhere')": "no model repository has it",
            "unload_model('nowhere')": "is not loaded",
            "load_model('../double')": "not a valid name",
            "load_model('double', config='{no')": "failed to load 'double'",
            f"load_model('double', files={files})": "only be given together with parameter 'config'",
            "load_model('double', config=DOUBLE, files={'model.onnx': b''})": "use config and file:<version>/<path>",
            "load_model('double', files=[1])": "must be a dictionary",
            "load_model('double', files={'file:1/model.onnx': 1.5})": "cannot be sent",
            "is_model_ready('double', 'x')": "not the number of a version",
            f"load_model('code', config='{{\"backend\": \"python\"}}', files={code})": "run only from a folder",
        }.items():
            found = await run(text)
            assert found.startswith("refused: ") and error in found, (text, found)


async def test_models_load_others_while_they_start(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    put(tmp_path, "self", "loader", starting("load_model('self')"))
    put(tmp_path, "inner", "loader", starting("load_model('double')"))
    put(tmp_path, "outer", "loader", starting("load_model('inner'), is_model_ready('inner')"))
    put(tmp_path, "there", "loader", starting("load_model('back')"))
    put(tmp_path, "back", "loader", starting("load_model('there')"))
    put(tmp_path, "step", "loader", starting("load_model('around')"))
    for name, inner in {"around": "within", "within": "step"}.items():
        ensembles.put(tmp_path, name, AROUND.replace("INNER", inner))
    async with served(tmp_path, "outer", "self", "there", "step") as (unit, http):
        assert await say(http, "told", model="outer") == "(None, True)"
        assert await say(http, "told", model="inner") == "None" and unit.catalog.is_ready("double")
        for name in ("self", "step"):
            assert "it would wait for itself" in await say(http, "told", model=name)
        assert await say(http, "told", model="there") == "None"
        assert "it would wait for itself" in await say(http, "told", model="back")


async def test_models_that_load_others_leave_slots_for_those(tmp_path: Path) -> None:
    """More models load others at their start than the server loads at once."""
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    names = [f"loader{number}" for number in range(5)]
    for name in names:
        put(tmp_path, name, "loader", starting("load_model('double')"))
    async with served(tmp_path, *names) as (_, http):
        told = [await say(http, "told", model=name) for name in names]
        assert told == ["None"] * len(names)


@pytest.mark.parametrize("mode", ["none", "poll"])
async def test_the_control_mode_holds_for_models_too(tmp_path: Path, mode: str) -> None:
    put(tmp_path, "loader", "loader", starting("load_model('loader')"))
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    async with served(tmp_path, mode=mode) as (_, http):
        for action in ("load", "unload"):
            assert "not allowed if polling is enabled" in await say(http, f"{action}_model('double')", model="loader")
        assert await say(http, "is_model_ready('double')", model="loader") == "True"
