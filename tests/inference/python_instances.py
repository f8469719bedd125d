"""Instances of Python models that are opened in this process."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oriel_inference.backends import CodeModel, Request
from oriel_inference.backends.python.backend import PythonBackend
from oriel_inference.backends.python.launch import PythonLimits
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.errors import InferenceError
from oriel_inference.model import EngineOptions
from oriel_wire.v2.metadata import parse_config_text

from .python_calls import BEHAVE, put


class ModelCall:
    """An execution of one request, or of several. result: of the last of them."""

    def __init__(self, *texts: str) -> None:
        arrays = [np.array([[text.encode()]], dtype=object) for text in texts]
        ends = time.monotonic() + 240
        self.requests = [Request(inputs={"text": each}, outputs=["said"], deadline=ends, ends=ends) for each in arrays]
        self.result: Any = None
        self.back = asyncio.Event()

    def computing(self, began_s: float, ended_s: float) -> None:
        pass

    def answer(self, index: int, result: Any) -> None:
        self.result = result

    def respond(self, index: int, outputs: Any, consumed: Any) -> None:
        raise AssertionError

    def returned(self) -> None:
        self.back.set()

    async def said(self) -> Any:
        await self.back.wait()
        if isinstance(self.result, InferenceError):
            return self.result
        return self.result[0][0, 0].decode()


async def opened(
    tmp_path: Path, config: str = BEHAVE, environment: Sequence[str] = ("SEEN",), **limits: Any
) -> PythonSession:
    path = put(tmp_path, "behave", "behave", config) / "1/model.py"
    backend = PythonBackend(lambda *asked: None, PythonLimits(**limits), environment=tuple(environment))
    (session,) = await asyncio.to_thread(backend.open_all, one_instance(path, config))
    return session


def one_instance(path: Path, config: str) -> CodeModel:
    """A model of one instance, whose configuration is taken as it is."""
    parsed = parse_config_text('name: "behave" ' + config)
    return CodeModel(path=path, config=parsed, options=EngineOptions(), version=1, judge=lambda config: 1)


async def execute(session: PythonSession, text: str) -> Any:
    asked = ModelCall(text)
    session.execute(asked)
    return await asked.said()
