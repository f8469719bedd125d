"""The committed digit model, its pictures and the service that reads them."""

import importlib.util
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from oriel_logic import images as pictures
from oriel_logic.deploy.samples import with_shown_sample
from oriel_logic.loading.handlers import load
from oriel_logic.loading.listing import Source
from oriel_logic.loading.sources import handler_files
from oriel_logic.server.openapi import document
from oriel_logic.testing import Client, FakeModels
from oriel_logic.testing.client import loaded_file

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODEL = EXAMPLES / "models" / "digits" / "1" / "model.onnx"
STATED = 0.9911


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def digits() -> Iterator[Any]:
    """The service's class, loaded as a logic server loads it."""
    path, modules = list(sys.path), set(sys.modules)
    found = load(handler_files([EXAMPLES / "services"]))
    (definition,) = [each.definition for each in found if each.name == "digits"]
    assert definition is not None
    yield definition.target
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("oriel_services."):
            del sys.modules[name]


@pytest.fixture(scope="module")
def session() -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    return onnxruntime.InferenceSession(MODEL, providers=["CPUExecutionProvider"])


def test_the_model_is_small_and_as_its_configuration_says(session: Any) -> None:
    assert MODEL.stat().st_size <= 60_000
    assert [(each.name, each.type, each.shape[1:]) for each in session.get_inputs()] == [
        ("image", "tensor(float)", [64])
    ]
    assert [(each.name, each.type, each.shape[1:]) for each in session.get_outputs()] == [
        ("label", "tensor(int64)", [1]),
        ("probabilities", "tensor(float)", [10]),
    ]


@pytest.mark.long
def test_held_out_accuracy_is_what_the_readme_states() -> None:
    trainer = example("train_digits")
    accuracy = trainer.held_out_accuracy(MODEL.read_bytes())
    assert accuracy == pytest.approx(STATED, abs=0.00005)
    assert f"{STATED:.4f}" in (EXAMPLES / "README.md").read_text()


def test_training_never_sees_what_is_held_out() -> None:
    train_x, _, held_x, _ = example("train_digits").split()
    assert len(held_x) == 450
    assert not {row.tobytes() for row in train_x} & {row.tobytes() for row in held_x}


@pytest.mark.parametrize("digit", range(10))
def test_every_picture_is_read_right_in_both_polarities(digits: Any, session: Any, digit: int) -> None:
    picture = (EXAMPLES / "digits" / f"{digit}.png").read_bytes()
    inputs = digits().pre(pictures.read(picture))
    label, probabilities = session.run(None, inputs)
    assert label.tolist() == [[digit]] and probabilities[0, digit] > 0.5
    module = sys.modules["oriel_services.digits"]
    grey = np.asarray(Image.open(EXAMPLES / "digits" / f"{digit}.png"), np.float32) / 255
    assert session.run(["label"], {"image": module.prepare(1 - grey)})[0].tolist() == [[digit]]


def test_pictures_come_from_the_held_out_part() -> None:
    *_, images, labels = example("train_digits").split()
    for digit in range(10):
        ink = images[int(np.argmax(labels == digit))].reshape(8, 8)
        paper = Image.fromarray(np.uint8(255 - np.round(ink * 255))).resize((64, 64), Image.Resampling.BICUBIC)
        assert np.array_equal(np.asarray(Image.open(EXAMPLES / "digits" / f"{digit}.png")), np.asarray(paper))


@pytest.mark.parametrize(("size", "margin"), [(28, 0), (64, 40), (300, 0)])
def test_preparing_costs_little_accuracy_whatever_the_scan(digits: Any, session: Any, size: int, margin: int) -> None:
    """The whole held-out part, as pictures of another size, light on dark, with paper around."""
    prepare = sys.modules["oriel_services.digits"].prepare
    *_, images, labels = example("train_digits").split()

    def scanned(ink: np.ndarray) -> np.ndarray:
        picture = Image.fromarray(np.uint8(np.round(ink.reshape(8, 8) * 255)))
        grown = np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC), np.float32) / 255
        return np.pad(grown, margin)

    batch = np.concatenate([prepare(scanned(ink)) for ink in images])
    predicted = session.run(["label"], {"image": batch})[0][:, 0]
    assert (predicted == labels).mean() >= 0.97


def test_a_blank_picture_is_refused(digits: Any) -> None:
    from oriel_logic.errors import Refused

    with pytest.raises(Refused, match="blank"):
        sys.modules["oriel_services.digits"].prepare(np.ones((20, 20), np.float32))


def test_the_checked_digit_is_described_and_its_sample_is_answered() -> None:
    path = EXAMPLES / "services" / "checked_digit.py"
    (loaded,) = loaded_file(path)
    assert loaded.definition is not None
    source = Source(file=loaded.file, homes=(path.parent,))
    made = document([with_shown_sample(source, loaded.definition)])
    takes = made["paths"]["/v1/services/checked_digit"]["post"]["requestBody"]["content"]
    models = FakeModels({"digits": {"label": [[3]], "probabilities": [[0.0, 0.1, 0.1, 0.8]]}})
    client = Client(path, models=models)
    sample = b64decode(takes["image/png"]["x-oriel-sample"])
    answer = client.post(content=sample, headers={"content-type": "image/png"}).json()
    assert answer == {"label": 3, "confidence": 0.8}
    assert client.post(json={"image": b64encode(sample).decode()}).json() == answer
