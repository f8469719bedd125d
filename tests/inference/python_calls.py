"""Python models that do what a request says."""

import shutil
from pathlib import Path
from typing import Any

import httpx

from . import models

HERE = Path(__file__).parent

SOURCES = HERE / "python_models"
HANGS = "import threading\nthreading.Event().wait()\n"  # the code of a model whose import never ends

BEHAVE = """
backend: "python" max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
# A process that goes on after its callers have left is killed soon: on a busy machine, also one that is about to end.
IMPATIENT = BEHAVE + 'parameters { key: "oriel.kill_after_s" value: { string_value: "0.3" } }'


def put(root: Path, name: str, source: str, config: str | None, version: int = 1) -> Path:
    """Put a Python model of tests/inference/python_models into a repository."""
    folder = models.put(root, name, None, config, version)
    shutil.copy(SOURCES / f"{source}.py", folder / str(version) / "model.py")
    return folder


def body(text: str, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}], **more}


async def ask(
    http: httpx.AsyncClient, text: str, headers: dict[str, str] | None = None, model: str = "behave", **more: Any
) -> httpx.Response:
    return await http.post(f"/models/{model}/infer", json=body(text, **more), headers=headers)


async def say(http: httpx.AsyncClient, text: str, model: str = "behave", **more: Any) -> str:
    answer = await ask(http, text, model=model, **more)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["outputs"][0]["data"][0])
