"""A logic server with an encoder and a decoder model behind it, and the official OpenAI client in front of it."""

import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import openai
import pytest

ROOT = Path(__file__).resolve().parents[3]
WIDTH = 48
TABLE = np.random.default_rng(5).standard_normal((400, WIDTH)).astype(np.float32)
ENCODER = """
    from oriel_logic.openai import Embeddings

    words = Embeddings(
        model="encoder",
        tokenizer="tiny/tokenizer.json",
        served_as="words",
        inputs=("input_ids", "attention_mask"),
        max_tokens=24,
        max_rows=4,
    )
"""


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def language() -> ModuleType:
    """The module examples/language/make.py."""
    return loaded(ROOT / "examples" / "language" / "make.py")


@pytest.fixture(scope="session")
def example(language: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that this module writes, with `models` and `services`."""
    folder: Path = tmp_path_factory.mktemp("language")
    language.write_all(folder)
    return folder


@pytest.fixture(scope="session")
def decoder(example: Path) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(example / "models" / "tiny" / "1" / "model.onnx")


class Behind:
    """Plays the inference server's models. steps: how many tokens each call of the decoder was for."""

    def __init__(self, inference: Any, decoder: Any) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.steps: list[int] = []
        self.on_step: Callable[[int], None] | None = None
        self._decoder = decoder
        kinds = {"tensor(int64)": "INT64", "tensor(float)": "FP32"}

        def told(tensors: Any) -> list[dict[str, Any]]:
            return [
                {
                    "name": each.name,
                    "datatype": kinds[each.type],
                    "shape": [each if isinstance(each, int) else -1 for each in each.shape],
                }
                for each in tensors
            ]

        inference.models["tiny"] = {"inputs": told(decoder.get_inputs()), "outputs": told(decoder.get_outputs())}
        inference.models["encoder"] = {
            "inputs": [
                {"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("input_ids", "attention_mask")
            ],
            "outputs": [{"name": "hidden", "datatype": "FP32", "shape": [-1, -1, WIDTH]}],
        }
        inference.run = self.run

    def run(self, request: Any) -> dict[str, Any]:
        given = {each.name: each.array for each in request.inputs}
        if request.model_name == "encoder":
            self.batches.append(given["input_ids"].shape)
            return {"hidden": TABLE[given["input_ids"]]}
        names = [each.name for each in self._decoder.get_outputs()]
        self.steps.append(given["input_ids"].shape[1])
        if self.on_step is not None:
            self.on_step(len(self.steps))
        return dict(zip(names, self._decoder.run(None, given), strict=True))


@pytest.fixture
def behind(inference: Any, decoder: Any) -> Behind:
    return Behind(inference, decoder)


Maker = Callable[..., Awaitable[tuple[openai.AsyncOpenAI, Any]]]


@pytest.fixture
async def served(stack: Any, services: Any, example: Path, behind: Behind) -> AsyncIterator[Maker]:
    """`await served()` returns (official client, stack) of a server with the models `words` and `tiny`."""
    clients: list[openai.AsyncOpenAI] = []

    async def start(words: str = ENCODER, **settings: Any) -> tuple[openai.AsyncOpenAI, Any]:
        folder = services(words=words)
        (folder / "tiny").symlink_to(example / "services" / "tiny")
        (folder / "tiny.py").write_text((example / "services" / "tiny.py").read_text())
        running = await stack(folder, **settings)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        clients.append(client)
        return client, running

    yield start
    for client in clients:
        await client.close()
