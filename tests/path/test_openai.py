"""The official OpenAI client, unmodified, through the real gateway, logic server and inference server."""

import json
import re
from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from stacks import EXAMPLES, Stack, started
from tokenizers import Tokenizer, models, pre_tokenizers

WIDTH = 24
ENCODER = """
from oriel_logic.openai import Embeddings

words = Embeddings(
    model="encoder",
    tokenizer="tiny/tokenizer.json",
    served_as="words",
    inputs=["input_ids", "attention_mask"],
    max_rows=8,
)
"""
CONFIG = """
name: "encoder"
backend: "onnxruntime"
max_batch_size: 8
input [
  { name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }
]
output [ { name: "hidden" data_type: TYPE_FP32 dims: [ -1, 24 ] } ]
dynamic_batching { }
"""


CHAT = """
from oriel_logic.openai import LanguageModel

chat = LanguageModel(model="double", served_as="chat")
"""
# The strict double of the engine: it repeats what the user said, a byte at a time.
DOUBLE_CONFIG = """
backend: "language"
parameters [ { key: "oriel.engine" value { string_value: "double" } } ]
"""


def encoder() -> bytes:
    """A model that returns for each token its row of a table, times the mask."""
    from onnx import TensorProto, helper, numpy_helper

    table = np.random.default_rng(3).standard_normal((400, WIDTH)).astype(np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["real", "last"], ["column"]),
        helper.make_node("Mul", ["rows", "column"], ["hidden"]),
    ]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "tokens"])
        for name in ("input_ids", "attention_mask")
    ]
    output = helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["n", "tokens", WIDTH])
    constants = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(np.array([2]), "last")]
    graph = helper.make_graph(nodes, "encoder", inputs, [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("openai")
    services, model = folder / "services", folder / "models" / "double"
    (services / "tiny").mkdir(parents=True)
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "one": 2, "deadline": 3, "sunny": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(services / "tiny" / "tokenizer.json"))
    (services / "chat.py").write_text(CHAT)
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.gguf").write_text("the double reads no weights")
    (model / "config.pbtxt").write_text(DOUBLE_CONFIG)
    (folder / "services" / "words.py").write_text(ENCODER)
    (folder / "models" / "encoder" / "1").mkdir(parents=True)
    (folder / "models" / "encoder" / "1" / "model.onnx").write_bytes(encoder())
    (folder / "models" / "encoder" / "config.pbtxt").write_text(CONFIG)
    policies = folder / "policies"
    policies.mkdir()
    for file in (EXAMPLES.parent / "policies" / "examples").glob("*.toml"):
        text = file.read_text()
        if file.name == "tenants.toml":
            digest = sha256(b"one-model").hexdigest()
            text += f'\n[tenants.one]\ntier = "gold"\nkeys = [{{ sha256 = "{digest}" }}]\n'
            text += 'models = ["words"]\nservices = ["*"]\n'
        (policies / file.name).write_text(text)
    flags = ["--policies", policies, "--services", folder / "services", "--model-repository", folder / "models"]
    with started(folder / "state", [str(flag) for flag in flags]) as stack:
        yield stack


def client_of(running: Stack, key: str = "oriel-demo-gold") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.base}/v1", api_key=key, max_retries=0)


def test_embeddings_as_floats_and_as_base64(running: Stack) -> None:
    with client_of(running) as client:
        texts = ["one deadline", "one deadline", "sunny outside today", *(f"text {index}" for index in range(20))]
        found = {
            encoding: client.embeddings.create(model="words", input=texts, **asked)
            for encoding, asked in {"base64": {}, "float": {"encoding_format": "float"}}.items()
        }
        vectors = [np.array([each.embedding for each in answer.data]) for answer in found.values()]
    assert vectors[0].shape == (23, WIDTH) and np.allclose(*vectors, atol=1e-7)
    assert np.allclose(np.linalg.norm(vectors[0], axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[0][0], vectors[0][1], atol=1e-6) and vectors[0][0] @ vectors[0][2] < 0.99
    assert found["base64"].usage.prompt_tokens == found["float"].usage.prompt_tokens > 23


def test_completion_chat_and_response_whole_and_streamed(running: Stack) -> None:
    with client_of(running) as client:
        said, messages = "it is sunny outside", [{"role": "user", "content": "it is sunny outside"}]
        asked: dict[str, Any] = {"model": "chat", "messages": messages}
        chat = client.chat.completions.create(**asked, logprobs=True)
        assert chat.choices[0].message.content == said and chat.choices[0].finish_reason == "stop"
        assert chat.choices[0].logprobs is not None and len(chat.choices[0].logprobs.content or ()) >= len(said)
        assert chat.usage is not None and chat.usage.prompt_tokens > len(said) <= chat.usage.completion_tokens
        chunks = list(client.chat.completions.create(**asked, stream=True))
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert "".join(pieces) == said and len(pieces) > 5
        completion = client.completions.create(model="chat", prompt=said, max_tokens=2)
        assert len(completion.choices[0].text) == 2 and completion.choices[0].finish_reason == "length"
        with pytest.raises(openai.BadRequestError, match="8192") as long:
            client.completions.create(model="chat", prompt=said * 1000)
        assert long.value.code == "context_length_exceeded"
        events = list(client.responses.create(model="chat", input=said, stream=True))
        assert events[-1].type == "response.completed" and events[-1].response.output_text.strip() == said


@pytest.mark.parametrize(("asked", "served"), [("flex", "bronze"), ("auto", "gold"), (None, "silver")])
def test_service_tier_and_the_header_lower_the_tier(running: Stack, asked: Any, served: str) -> None:
    """The demo's tiers are gold, silver and bronze; the answer is the same, and decisions say who served it how."""
    more: dict[str, Any] = {"service_tier": asked} if asked else {"extra_headers": {"x-request-tier": served}}
    with client_of(running) as client:
        messages: list[Any] = [{"role": "user", "content": "sunny?"}]
        raw = client.chat.completions.with_raw_response.create(model="chat", messages=messages, max_tokens=2, **more)
        assert raw.parse().choices[0].finish_reason
    admin = running.address("gateway", "admin")
    found = httpx.get(f"http://{admin}/decisions/{raw.headers['x-request-id']}", trust_env=False).json()
    assert [each["tier"] for each in found["decisions"]] == [served]


def test_a_model_of_others_looks_like_one_that_is_not_there(running: Stack) -> None:
    def told(client: openai.OpenAI, model: str) -> str:
        with pytest.raises(openai.NotFoundError) as error:
            client.completions.create(model=model, prompt="a", extra_headers={"x-request-id": "same"})
        assert error.value.code == "model_not_found" and isinstance(error.value.body, dict)
        return json.dumps(error.value.body).replace(model, "X")

    with client_of(running, "one-model") as one, client_of(running) as all_of_them:
        assert told(one, "chat") == told(one, "nothing") and all_of_them.completions.create(model="chat", prompt="a")
        assert [each.id for each in one.models.list()] == ["words"]
        assert sorted(each.id for each in all_of_them.models.list()) == ["chat", "words"]
        assert one.embeddings.create(model="words", input="a").data


def test_without_the_service_there_is_nothing(running: Stack) -> None:
    with client_of(running, "oriel-demo-bronze") as client, pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="words", input="a")
    with client_of(running, "wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_the_lines_of_the_page_work_as_written(running: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    page = (EXAMPLES.parent / "README.md").read_text()
    (lines,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "from openai" in block)
    scope: dict[str, Any] = {}
    exec(lines.replace("http://127.0.0.1:8080", running.base).replace("smollm2", "chat"), scope)
    scope["client"].close()
    assert "Why is the sky" in capsys.readouterr().out
