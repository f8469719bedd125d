"""A logic server with an encoder or a language model behind it, and the official OpenAI client in front of it."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .language_double import LanguageDouble

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


TOKENIZER_TEXT = [
    "The weather is lovely today. It's so sunny outside! He drove to the stadium.",
    "system user assistant: a request carries one deadline and one tier from the first byte to the last.",
]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json` in a folder of its own: byte-level BPE, trained on two lines."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    made.train_from_iterator(
        TOKENIZER_TEXT,
        trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False),
    )
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


class Behind:
    """Plays the encoder of the inference server. batches: the shapes of its calls."""

    def __init__(self, inference: Any) -> None:
        self.batches: list[tuple[int, ...]] = []
        inference.models["encoder"] = {
            "inputs": [
                {"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in ("input_ids", "attention_mask")
            ],
            "outputs": [{"name": "hidden", "datatype": "FP32", "shape": [-1, -1, WIDTH]}],
        }
        inference.run = self.run

    def run(self, request: Any) -> dict[str, Any]:
        given = {each.name: each.array for each in request.inputs}
        self.batches.append(given["input_ids"].shape)
        return {"hidden": TABLE[given["input_ids"]]}


@pytest.fixture
def behind(inference: Any) -> Behind:
    return Behind(inference)


Maker = Callable[..., Awaitable[tuple[openai.AsyncOpenAI, Any]]]


@pytest.fixture
async def served(stack: Any, services: Any, tokenizer: Path, behind: Behind) -> AsyncIterator[Maker]:
    """`await served()` returns (official client, stack) of a server with `words`, and `tiny` of another kind."""
    clients: list[openai.AsyncOpenAI] = []

    async def start(words: str = ENCODER, **settings: Any) -> tuple[openai.AsyncOpenAI, Any]:
        folder = services(words=words)
        (folder / "tiny").symlink_to(tokenizer.parent)
        (folder / "tiny.py").write_text(
            'from oriel_logic.openai import LanguageModel\ntiny = LanguageModel(model="tiny")\n'
        )
        running = await stack(folder, **settings)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0)
        clients.append(client)
        return client, running

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
def double() -> LanguageDouble:
    return LanguageDouble()


@pytest.fixture
async def chat(stack: Any, services: Any, double: LanguageDouble) -> AsyncIterator[tuple[openai.AsyncOpenAI, Any]]:
    """Return (official client, stack) of a server with the language model `double` as `chat`."""
    source = 'from oriel_logic.openai import LanguageModel\nchat = LanguageModel(model="double", served_as="chat")\n'
    running = await stack(services(chat=source), models=double)
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0
    ) as client:
        yield client, running
