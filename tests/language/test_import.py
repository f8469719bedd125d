"""`oriel models import` of language models, with the engine itself. A folder of Hugging Face is converted in the
environment whose Python ORIEL_TEST_OPTIMUM names: it has PyTorch and `optimum-intel[openvino]`.
"""

import os
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("openvino_genai")

from oriel_cli.main import main

from .tiny_gguf import write_tiny

PYTHON = os.environ.get("ORIEL_TEST_OPTIMUM", "")
TRAINED = """
import sys, torch, transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
text = "a the model answers a longer text than the others, so that rows are padded good "
torch.manual_seed(0)
torch.set_num_threads(1)
cut, splitter = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
cut.pre_tokenizer, cut.decoder = splitter, decoders.ByteLevel()
trainer = trainers.BpeTrainer(vocab_size=280, special_tokens=["<s>", "</s>"], initial_alphabet=splitter.alphabet())
cut.train_from_iterator([text], trainer)
cut = transformers.PreTrainedTokenizerFast(tokenizer_object=cut, bos_token="<s>", eos_token="</s>")
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(cut), bos_token_id=0, **sizes))
rows = torch.tensor([cut(text * 6)["input_ids"][at : at + 48] for at in range(16)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
for _ in range(40):  # so that it is sure of what it says
    optimizer.zero_grad()
    model(input_ids=rows, labels=rows).loss.backward()
    optimizer.step()
model.save_pretrained(sys.argv[1]), cut.save_pretrained(sys.argv[1])
"""


def test_gguf_file_becomes_a_folder_that_serves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    assert main(["models", "import", str(tmp_path / "tiny.gguf"), "--repository", str(tmp_path / "models")]) == 0
    assert "runs on openvino-genai" in capsys.readouterr().out
    assert (tmp_path / "models/tiny/1/model.gguf").exists()


@pytest.mark.skipif(not PYTHON, reason="ORIEL_TEST_OPTIMUM names no Python")
def test_hugging_face_folder_goes_on_as_the_original(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run([PYTHON, "-c", TRAINED, str(tmp_path / "tiny")], check=True)
    words = ("--repository", str(tmp_path / "models"), "--python", PYTHON)
    assert main(["models", "import", str(tmp_path / "tiny"), *words]) == 0
    assert "tokens         [4, 8]" in capsys.readouterr().out
    assert main(["models", "check", str(tmp_path / "models")]) == 0
