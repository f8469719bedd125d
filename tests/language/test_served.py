"""A tiny model in a process of its own, from a GGUF file and from the folder of an OpenVINO export."""

import asyncio
import json
from pathlib import Path

import pytest

genai = pytest.importorskip("openvino_genai")

from oriel_inference.errors import LoadFailed  # noqa: E402
from oriel_inference.language.backend import Language, LanguageSession  # noqa: E402
from oriel_inference.language.engine import Sampling  # noqa: E402
from oriel_inference.repository.load import LoadedVersion, Loading, load_model  # noqa: E402
from oriel_inference.stores.local import LocalStore  # noqa: E402

from ..inference.language_process import Watched  # noqa: E402
from .tiny_gguf import write_tiny  # noqa: E402

GREEDY = Sampling(max_tokens=16, temperature=0.0)


async def load(root: Path) -> LoadedVersion | LoadFailed | None:
    language = Language(asyncio.get_running_loop())
    loading = Loading(LocalStore(root), "tiny", find_backend=lambda _: language, cores=2, models=1)
    return (await asyncio.to_thread(load_model, loading))[1]


def export(folder: Path) -> None:
    """Write what an OpenVINO export consists of."""
    write_tiny(folder / "model.gguf")
    genai.ContinuousBatchingPipeline(
        folder / "model.gguf", genai.SchedulerConfig(), "CPU", {"enable_save_ov_model": True}
    )
    genai.Tokenizer(folder / "model.gguf", enable_save_ov_model=True)
    (folder / "model.gguf").unlink()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 256}))


@pytest.mark.parametrize("file", ["model.gguf", "openvino_model.xml"])
async def test_a_folder_without_configuration_generates(tmp_path: Path, file: str) -> None:
    (tmp_path / "tiny/1").mkdir(parents=True)
    if file == "model.gguf":
        write_tiny(tmp_path / "tiny/1/model.gguf")
    else:
        export(tmp_path / "tiny/1")
    loaded = await load(tmp_path)
    assert isinstance(loaded, LoadedVersion)
    assert loaded.config.default_model_filename == file
    assert loaded.config.parameters["oriel.context"].string_value == "256"
    (session,) = loaded.sessions
    assert isinstance(session, LanguageSession) and session.provider == "openvino-genai"
    model = Watched(session.decoder)
    whole = await model.answer(1, "<|user|>the the<|assistant|>", GREEDY)
    assert whole.prompt_tokens == len(whole.prompt) and len(whole.ids) == 16
    session.decoder.add(2, whole.prompt, GREEDY)
    session.decoder.add(3, "y" * 5000, GREEDY)
    assert (await model.finished(3)).refused.startswith("the prompt has 5000 characters")
    assert (await model.finished(2)).ids == whole.ids
    await session.decoder.close()


@pytest.mark.parametrize("size", [0, 100, 5000, 200_000, -1])
async def test_a_file_that_is_cut_off_fails_its_own_load(tmp_path: Path, size: int) -> None:
    (tmp_path / "tiny/1").mkdir(parents=True)
    file = tmp_path / "tiny/1/model.gguf"
    write_tiny(file)
    file.write_bytes(file.read_bytes()[:size])
    failure = await load(tmp_path)
    assert isinstance(failure, LoadFailed) and str(tmp_path) not in failure.reason


async def test_a_file_that_crashes_its_reader_fails_its_own_load(tmp_path: Path) -> None:
    (tmp_path / "tiny/1").mkdir(parents=True)
    file = tmp_path / "tiny/1/model.gguf"
    write_tiny(file)
    damaged = bytearray(file.read_bytes())
    key = b"llama.attention.head_count"
    at = damaged.index(key) + len(key) + 4
    damaged[at : at + 4] = bytes(4)
    file.write_bytes(damaged)
    failure = await load(tmp_path)
    assert isinstance(failure, LoadFailed) and failure.reason.startswith("the model's process died (signal")
