"""Python models that do what a request says."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

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


def starting(text: str) -> str:
    """Return the configuration of a `loader` that runs this text while it starts."""
    escaped = text.replace('"', r"\"")
    return BEHAVE + f'parameters {{ key: "start" value {{ string_value: "{escaped}" }} }}'


@asynccontextmanager
async def served(root: Path, *load: str, mode: str = "explicit") -> AsyncIterator[tuple[Unit, httpx.AsyncClient]]:
    """Serve a repository, with these models loaded at the start."""
    settings = Settings(
        repositories=(root,),
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        cores=2,
        control_mode=mode,  # type: ignore[arg-type]
        load_models=load,
    )
    async with (
        open_unit(settings, sink=ListSink()) as unit,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{unit.http_port}/v2", trust_env=False, timeout=60) as http,
    ):
        yield unit, http
