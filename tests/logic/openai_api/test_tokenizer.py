"""Tokens of texts, as workers make them."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from oriel_logic.errors import ParameterWrong
from oriel_logic.loading.handlers import preload
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.openai import Embeddings, LanguageModel
from oriel_logic.openai.templates import compiled
from oriel_logic.openai.tokenizer import encode, missing, read


@pytest.fixture(scope="session")
def file(tokenizer: Path) -> str:
    return str(tokenizer)


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words of one letter, [CLS] and [SEP] around, and padding to 8 and a cut at 4 in the file itself."""
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "a", "b", "c"]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(words[:4])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    made.enable_padding(length=8)
    made.enable_truncation(4)
    path = tmp_path_factory.mktemp("bert") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def test_the_files_own_padding_and_cut_do_not_count(bert: str) -> None:
    ids, lengths = encode(bert, ["a b c a b", "c"], 0)
    assert (ids.tolist(), lengths.tolist()) == ([1, 4, 5, 6, 4, 5, 2, 1, 6, 2], [7, 3])


def test_a_long_text_is_cut_inside_its_special_tokens(bert: str) -> None:
    assert encode(bert, ["a b c a b", "c"], 4)[0].tolist()[:4] == [1, 4, 5, 2]
    assert encode(bert, [[4, 5, 6, 4]], 4)[0].tolist() == [1, 4, 5, 2], "token arrays get them as well"


def test_token_ids_that_are_none_are_named(bert: str) -> None:
    for wrong in ([[7]], [[4], [-1]], [[4, 10**12]]):
        with pytest.raises(ParameterWrong, match="is not a token of this model: its ids are 0 to 6"):
            encode(bert, wrong, 0)


def test_what_is_missing_is_said(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(Path(file)) == "" and "no tokenizer file" in missing(tmp_path / "none.json")

    monkeypatch.setattr("oriel_logic.openai.tokenizer.find_spec", lambda name: None)
    assert missing(Path(file)) == "it needs the package tokenizers: pip install 'oriel-serving[embeddings]'"
    with pytest.raises(ValueError, match="not a valid name for a model"):
        LanguageModel(model="m", served_as="a,b")


def test_tokenizers_and_templates_are_read_before_workers_are_made(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    module = ModuleType("oriel_services.several")
    for name, path in {"good": file, "bad": str(broken), "none": "none.json"}.items():
        setattr(module, name, Embeddings(model=name, tokenizer=path))
    module.chat = LanguageModel(model="chat")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    read.cache_clear()
    compiled.cache_clear()
    preload([HandlerFile(module=module.__name__, path=tmp_path / "several.py", folder=tmp_path)])
    assert compiled.cache_info().currsize == 1, "jinja2 is imported"
    assert read.cache_info().currsize == 1 and "the tokenizer of 'bad' cannot be read" in caplog.text
    encode(file, ["a"], 0)
    assert read.cache_info().hits > 0
