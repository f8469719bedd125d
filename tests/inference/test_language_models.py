"""Folders of language models: how they are recognised and completed, and which configurations are refused."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from oriel_inference.errors import LoadFailed
from oriel_inference.language.backend import Language, LanguageSession
from oriel_inference.language.double import TEMPLATE
from oriel_inference.language.engine import Sampling
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore

from .language_process import Watched

DOUBLE = 'parameters { key: "oriel.engine" value { string_value: "double" } }\n'


def put(root: Path, config: str | None, *files: str) -> None:
    (root / "chat/1").mkdir(parents=True)
    for name in files:
        (root / "chat/1" / name).write_bytes(b"weights")
    if config is not None:
        (root / "chat/config.pbtxt").write_text(config)


@pytest.fixture
async def backend() -> AsyncIterator[Language]:
    language = Language(asyncio.get_running_loop())
    yield language
    await language.close()


async def load(root: Path, backend: Language, *, runs_code: bool = True) -> LoadedVersion:
    store = LocalStore(root, runs_code=runs_code)
    found = (
        await asyncio.to_thread(load_model, Loading(store, "chat", find_backend=lambda _: backend, cores=2, models=1))
    )[1]
    if isinstance(found, LoadFailed):
        raise found
    assert isinstance(found, LoadedVersion)
    return found


@pytest.mark.parametrize("name", ["model.gguf", "smollm2-135m-q4_1.gguf"])
async def test_a_gguf_file_makes_a_language_model(tmp_path: Path, backend: Language, name: str) -> None:
    put(tmp_path, DOUBLE, name)
    loaded = await load(tmp_path, backend)
    config, spec = loaded.config, loaded.spec
    assert (config.backend, config.default_model_filename, spec.decoupled, spec.instances) == (
        "language",
        name,
        True,
        1,
    )
    assert [each.name for each in spec.inputs][:3] == ["text_input", "sampling_parameters", "input_ids"]
    assert all(each.optional for each in spec.inputs)
    shown = {key: value.string_value for key, value in config.parameters.items()}
    assert (shown["oriel.chat_template"], shown["oriel.context"]) == (TEMPLATE, "8192")
    assert (shown["oriel.bos_token"], shown["oriel.eos_token"]) == ("<|begin|>", "<|end|>")
    assert "<|answer|>" in json.loads(shown["oriel.control_tokens"])
    (session,) = loaded.sessions
    assert isinstance(session, LanguageSession) and session.provider == "double" and session.memory_bytes() > 0
    answer = await Watched(session.decoder).answer(1, "<|user|>hi<|answer|>", Sampling())
    assert bytes(answer.ids[:-1]) == b"hi"
    await asyncio.to_thread(session.close)
    assert session.decoder.pid is None


async def test_an_openvino_export_needs_its_tokenizer(tmp_path: Path, backend: Language) -> None:
    put(tmp_path, DOUBLE, "openvino_model.xml")
    with pytest.raises(LoadFailed, match=r"openvino_tokenizer.xml beside it, as `optimum-cli export openvino`"):
        await load(tmp_path, backend)
    (tmp_path / "chat/1/openvino_tokenizer.xml").write_bytes(b"x")
    assert (await load(tmp_path, backend)).config.default_model_filename == "openvino_model.xml"


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("max_batch_size: 4", "max_batch_size: must be 0"),
        ("instance_group { count: 2 }", "instance_group: must have one instance"),
        ("instance_group { kind: KIND_GPU }", "instance_group: must have KIND_CPU"),
        ('input { name: "prompt" data_type: TYPE_STRING dims: 1 }', "input: 'prompt' is none of a language model's"),
        ('output { name: "text_output" data_type: TYPE_FP32 dims: 1 }', "output: 'text_output' is none"),
        ('parameters { key: "oriel.max_running" value { string_value: "many" } }', "oriel.max_running"),
        ('parameters { key: "oriel.start_timeout_s" value { string_value: "-1" } }', "oriel.start_timeout_s"),
    ],
)
async def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, backend: Language, config: str, problem: str
) -> None:
    put(tmp_path, DOUBLE + config, "model.gguf")
    with pytest.raises(LoadFailed, match=problem):
        await load(tmp_path, backend)


async def test_a_store_that_others_write_starts_no_process(tmp_path: Path, backend: Language) -> None:
    put(tmp_path, DOUBLE, "model.gguf")
    with pytest.raises(LoadFailed, match="language models run only from a folder of this machine"):
        await load(tmp_path, backend, runs_code=False)


async def test_a_file_that_crashes_its_reader_fails_its_own_load(tmp_path: Path, backend: Language) -> None:
    put(tmp_path, DOUBLE, "model.gguf")
    (tmp_path / "chat/1/model.gguf").write_bytes(b"bad!")
    with pytest.raises(LoadFailed, match="the file is damaged: copy it again"):
        await load(tmp_path, backend)


async def test_a_load_that_the_server_no_longer_waits_for_ends(tmp_path: Path, backend: Language) -> None:
    backend.stop()
    put(tmp_path, DOUBLE, "model.gguf")
    with pytest.raises(LoadFailed, match="the server is stopping"):
        await load(tmp_path, backend)
