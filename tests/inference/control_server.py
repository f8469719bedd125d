"""An inference server whose models a test loads and unloads, and its control endpoints."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from onnx import numpy_helper

from oriel_inference.app import Unit, open_unit
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from ..waiting import until
from . import models

ROW = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


def times(factor: float) -> Any:
    """Return a model y = x * factor, so that a test sees which version answered."""
    node = models.helper.make_node("Mul", ["x", "f"], ["y"])
    weight = numpy_helper.from_array(np.array(factor, dtype=np.float32), "f")
    shape = ["n", 4]
    return models.graph([node], [("x", models.FLOAT, shape)], [("y", models.FLOAT, shape)], [weight])


class Served:
    def __init__(self, unit: Unit, client: httpx.AsyncClient) -> None:
        self.unit, self.client = unit, client

    async def answer(self, name: str = "double") -> float:
        response = await self.client.post(f"/v2/models/{name}/infer", json=ROW)
        assert response.status_code == 200, response.text
        return float(response.json()["outputs"][0]["data"][0])

    async def lines(self, **body: object) -> dict[tuple[str, str], tuple[str, str]]:
        response = await self.client.post("/v2/repository/index", json=body)
        return {(e["name"], e.get("version", "")): (e.get("state", ""), e.get("reason", "")) for e in response.json()}

    async def until(self, predicate: Any) -> dict[tuple[str, str], tuple[str, str]]:
        """Wait until the index fulfils `predicate`; the model must be able to answer all the while."""
        lines: dict[tuple[str, str], tuple[str, str]] = {}

        async def holds() -> bool:
            nonlocal lines
            lines = await self.lines()
            if predicate(lines):
                return True
            await self.answer()
            return False

        await until(holds)
        return lines

    async def until_answer(self, value: float) -> None:
        """Wait until the version that answers with `value` serves."""

        async def answered() -> bool:
            return await self.answer() == value

        await until(answered)


@contextlib.asynccontextmanager
async def serving(root: Path | str, mode: str, **more: Any) -> AsyncIterator[Served]:
    more = {"repositories": (root,), "http_port": 0, "grpc_port": 0, "metrics_port": 0, "poll_s": 0.05, **more}
    settings = Settings(cores=2, drain_s=5.0, control_mode=mode, **more)
    async with open_unit(settings, sink=ListSink()) as unit:
        address = f"http://127.0.0.1:{unit.http_port}"
        async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as client:
            yield Served(unit, client)


def put(root: Path, factor: float, version: int = 1, config: str | None = models.DOUBLE) -> Path:
    return models.put(root, "double", times(factor), config, version)
