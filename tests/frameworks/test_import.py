"""`oriel models import`: models made here by their frameworks answer as folders of a repository what they answered."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from oriel_cli.main import main

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
pytestmark = pytest.mark.filterwarnings("ignore")  # the frameworks' own
WORDS = ["[PAD]", "[UNK]", "the", "model", "answers", "a", "longer", "text"]


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(source: Path, *words: str) -> dict[str, Any]:
        code = main(["models", "import", str(source), "--repository", str(tmp_path / "models"), "--json", *words])
        said = capsys.readouterr()
        assert code == 0, said.err
        found = json.loads(said.out)
        assert main(["models", "check", str(tmp_path / "models")]) == 0
        errors = {each["error"]["name"]: each["error"]["outside"] for each in found["outputs"]}
        assert errors == dict.fromkeys(errors, 0)
        return dict(found)

    return run


@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_keras_file_becomes_a_savedmodel(suffix: str, imported: Any, tmp_path: Path) -> None:
    keras = pytest.importorskip("keras")
    rows, steps = keras.Input((4,), name="rows"), keras.Input((3, 2), name="steps")
    joined = keras.layers.Concatenate()([rows, keras.layers.LSTM(5)(steps)])
    heads = [keras.layers.Dense(3, activation="softmax")(joined), keras.layers.Dense(1)(rows)]
    keras.Model([rows, steps], heads).save(tmp_path / f"two.{suffix}")
    found = imported(tmp_path / f"two.{suffix}")
    assert (tmp_path / "models/two/1/model.savedmodel/saved_model.pb").exists()
    assert [each["shape"] for each in found["outputs"]] == [[8, 3], [8, 1]] and found["runs_on"] == "OpenVINO"


def test_hugging_face_folder_becomes_an_onnx_file_with_its_tokenizer(imported: Any, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    cutter = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    cutter.pre_tokenizer = pre_tokenizers.Whitespace()
    config = transformers.BertConfig(vocab_size=len(WORDS), hidden_size=24, num_hidden_layers=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    transformers.PreTrainedTokenizerFast(tokenizer_object=cutter, pad_token="[PAD]").save_pretrained(tmp_path / "bert")
    found = imported(tmp_path / "bert")
    (version,) = (tmp_path / "models/bert").iterdir()
    assert {"model.onnx", "tokenizer.json"} <= {path.name for path in version.iterdir()}
    assert [each["error"]["name"] for each in found["outputs"]] == ["logits"] and found["runs_on"] == "CPU"
