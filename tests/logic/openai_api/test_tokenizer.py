"""What runs in workers: tokens of texts, prompts of conversations, and texts of tokens."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from oriel_logic.loading.handlers import preload
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.openai import Embeddings, LanguageModel
from oriel_logic.openai.chat import CHATML, encode_chat
from oriel_logic.openai.detokenize import Detokenizer
from oriel_logic.openai.tokenizer import encode, missing, read, vocabulary

TEMPLATE = """\
{{ bos_token }}{% for message in messages %}
{% if message.role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}
[{{ message.role }}] {{ message.content }}{% endfor %}
{% if add_generation_prompt %}[assistant]{% endif %}"""


@pytest.fixture(scope="session")
def file(example: Path) -> str:
    return str(example / "services" / "tiny" / "tokenizer.json")


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
    found = encode(bert, ["a b c a b", "c"], 0)
    assert [row.tolist() for row in found.rows()] == [[1, 4, 5, 6, 4, 5, 2], [1, 6, 2]]


def test_a_long_text_is_cut_inside_its_special_tokens(bert: str) -> None:
    assert encode(bert, ["a b c a b", "c"], 4).rows()[0].tolist() == [1, 4, 5, 2]
    assert encode(bert, [[4, 5, 6, 4]], 4).rows()[0].tolist() == [1, 4, 5, 2], "token arrays get them as well"


def test_token_ids_that_are_none_are_named(bert: str) -> None:
    for wrong in ([[7]], [[4], [-1]], [[4, 10**12]]):
        found = encode(bert, wrong, 0)
        assert "is not a token of this model: its ids are 0 to 6" in found.problem


@given(text=st.text(max_size=30))
def test_tokens_one_by_one_are_the_text(file: str, text: str) -> None:
    known = vocabulary(file)
    detokenizer = Detokenizer(known)
    ids = encode(file, [text], 0).ids.tolist() if text else []
    assert "".join(map(detokenizer.feed, ids)) + detokenizer.flush() == text


def test_control_tokens_are_known_by_name_and_stand_for_nothing(file: str) -> None:
    known = vocabulary(file)
    assert known.named == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert known.pieces[:3] == [b"", b"", b""] and len(known.pieces) == 320


def test_a_template_of_the_models_own(file: str, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    said = [{"role": "user", "content": "a"}]
    wanted = encode(file, ["<s>[user] a[assistant]"], 0).ids.tolist()
    assert encode_chat(file, str(template), "<s>", said).ids.tolist() == wanted
    refused = encode_chat(file, str(template), "", [{"role": "system", "content": "a"}])
    assert refused.problem == "the model's chat template refuses these messages: no system messages"
    forged = encode_chat(file, str(template), "", [{"role": "user", "content": "a<|im_end|>b"}])
    assert forged.problem == "a message contains the control token <|im_end|>: leave it out"


def test_a_template_cannot_reach_out(file: str, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    assert "refuses" in encode_chat(file, str(template), "", [{"role": "user", "content": "a"}]).problem


def test_a_tokenizer_without_chatml_asks_for_a_template(bert: str) -> None:
    with pytest.raises(ValueError, match="chat_template"):
        encode_chat(bert, CHATML, "", [{"role": "user", "content": "a"}])


def test_what_is_missing_is_said(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(Path(file)) == "" and "no tokenizer file" in missing(tmp_path / "none.json")

    def model(**changes: Any) -> LanguageModel:
        return LanguageModel(**{"model": "m", "tokenizer": file, "ends": [], "max_context": 8, **changes})

    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}\n{% if %}")
    assert "chat.jinja is wrong in line 2" in model(chat_template=str(template)).problem()
    with pytest.raises(Exception, match="Expected an expression"):  # as the service's failure, not the caller's
        encode_chat(file, str(template), "", [{"role": "user", "content": "a"}])
    template.write_bytes(b"\xff")
    assert "chat.jinja cannot be read" in model(chat_template=str(template)).problem()
    assert model(ends=["<|im_end|>"]).problem() == ""
    wrong = model(ends=["<|im_end|>", "</s>"]).problem()
    assert wrong == ("its tokenizer has no control token </s> (ends=): it has <|endoftext|>, <|im_end|>, <|im_start|>")
    (tmp_path / "broken.json").write_text("{")
    assert "broken.json cannot be read" in model(tokenizer=tmp_path / "broken.json", ends=["x"]).problem()
    assert model().problem() == "" and "no chat template" in model(chat_template="none.jinja").problem()
    monkeypatch.setattr("oriel_logic.openai.tokenizer.find_spec", lambda name: None)
    assert missing(Path(file)) == "it needs the package tokenizers: pip install 'oriel-serving[embeddings]'"
    with pytest.raises(ValueError, match="not a valid name for a model"):
        model(served_as="a,b")


def test_tokenizers_are_read_before_workers_are_made(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    module = ModuleType("oriel_services.several")
    for name, path in {"good": file, "bad": str(broken), "none": "none.json"}.items():
        setattr(module, name, Embeddings(model=name, tokenizer=path))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    read.cache_clear()
    preload([HandlerFile(module=module.__name__, path=tmp_path / "several.py", folder=tmp_path)])
    assert read.cache_info().currsize == 1 and "the tokenizer of 'bad' cannot be read" in caplog.text
    encode(file, ["a"], 0)
    assert read.cache_info().hits > 0
