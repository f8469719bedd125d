"""Model repositories as strangers have them: what Triton serves is served, and the rest gets a sentence that helps."""

import logging
from pathlib import Path

import pytest
from memory_store import MemoryStore

from oriel_inference.errors import LoadFailed
from oriel_inference.repository.config import validate
from oriel_inference.repository.engines import _REFUSED, needs
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.metadata import parse_config_text

from . import models
from .control_server import serving
from .hostile_models import refusal

PAGES = Path(__file__).resolve().parents[2]
TWICE = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'


async def test_version_0_is_a_version(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE, version=0)
    async with serving(tmp_path, "none") as served:
        assert (await served.lines())["double", "0"] == ("READY", "")
        assert (await served.client.get("/v2/models/double")).json()["versions"] == ["0"]
        assert (await served.client.get("/v2/models/double/versions/0/ready")).status_code == 200


@pytest.mark.parametrize("name", ["00", "-1", "01", "0x1"])
def test_other_numbers_are_no_versions(tmp_path: Path, name: str) -> None:
    (tmp_path / "m" / name).mkdir(parents=True)
    assert LocalStore(tmp_path).versions("m") == []


def test_comments_may_have_any_encoding(tmp_path: Path) -> None:
    latin = 'backend: "onnxruntime" # gr\u00f6\u00dfe\nmax_batch_size: 4 # \u00fc'.encode("latin-1")
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.pbtxt").write_bytes(b"\xef\xbb\xbf" + latin)
    memory = MemoryStore()
    memory.put("m/config.pbtxt", latin)
    for store in (LocalStore(tmp_path), memory):
        assert parse_config_text(store.text("m", "config.pbtxt") or "").max_batch_size == 4
    (tmp_path / "m/config.pbtxt").write_bytes('name: "gr\u00f6\u00dfe"'.encode("latin-1"))
    with pytest.raises(LoadFailed, match=r"m/config\.pbtxt is not UTF-8 text"):
        LocalStore(tmp_path).text("m", "config.pbtxt")


def test_folders_that_no_model_can_be_called_get_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("fine", "na\u00efve (1)", ".git", "lost+found"):
        (tmp_path / name).mkdir()
    (tmp_path / "read me.md").touch()
    store = LocalStore(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert list(store.models()) == list(store.models()) == ["fine"]
    assert caplog.messages == [
        f"the model repository {tmp_path.name} has folders that no model can be called, they are not served: "
        "'na\\xefve (1)'"
    ]


@pytest.mark.parametrize("file", ["config.pbtxt", "1/model.onnx", "1/model.py"])
def test_a_path_to_a_model_instead_of_its_repository_gets_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    (tmp_path / "resnet/1").mkdir(parents=True)
    (tmp_path / "resnet" / file).touch()
    with caplog.at_level(logging.WARNING):
        LocalStore(tmp_path / "resnet").models()
    (line,) = caplog.messages
    assert line.startswith("the model repository resnet looks like a model's folder") and str(tmp_path) in line


def test_an_output_that_is_given_twice_is_there_once() -> None:
    config = parse_config_text(models.DOUBLE + TWICE)
    assert "an output is given twice" in validate(config, "double", "double/config.pbtxt")
    assert [output.name for output in config.output] == ["y"]
    other = parse_config_text(models.DOUBLE + TWICE.replace("4", "5"))
    with pytest.raises(LoadFailed, match=r"output\[1\].name: 'y' is given twice"):
        validate(other, "double", "double/config.pbtxt")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.pkl", "pickled models"),
        ("clf.joblib", "pickled models"),
        ("model.keras", "Keras files"),
        ("model.safetensors", "`oriel models import` takes the folder of a Hugging Face model"),
        ("pytorch_model.bin", "`oriel models import` takes the folder of a Hugging Face model"),
        ("model.bin", "its engine is unknown: name the file as docs/model-repository.md says"),
    ],
)
def test_files_of_other_frameworks_are_refused_with_a_page(tmp_path: Path, name: str, says: str) -> None:
    folder = models.put(tmp_path, "double", None, None)
    (folder / "1" / name).write_bytes(b"weights")
    found = refusal(tmp_path)
    assert says in found and "docs/" in found


@pytest.mark.parametrize("reason", [*_REFUSED.values(), *map(needs, ("cuda", "fil", "openvino", "tensorrt"))])
def test_every_refusal_names_pages_that_exist(reason: str) -> None:
    named = [word.strip(",.:;()") for word in reason.split() if word.strip("(").startswith("docs/")]
    assert named and all((PAGES / each).is_file() for each in named)
