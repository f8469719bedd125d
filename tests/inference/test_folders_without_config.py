"""Model folders that have no `config.pbtxt`, or one that names no backend."""

from pathlib import Path

import pytest

from oriel_inference.backends import Session, find_backend
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.repository.outline import read_outline
from oriel_inference.stores.local import LocalStore

from . import models
from .config_rows import OUTPUT


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model.pt", "double/1/model.pt is not a file of torch.jit.save or torch.export.save"),
        ("model.pt2", "double/1/model.pt2 is not a file of torch.jit.save or torch.export.save"),
        ("resnet.pth", "double/1/model.pt is missing"),
        ("model.savedmodel/saved_model.pb", "pip install 'oriel-serving[openvino-models]'"),
        ("model.graphdef", "pip install 'oriel-serving[openvino-models]'"),
        ("model.tflite", "pip install 'oriel-serving[openvino-models]'"),
        ("model.pdmodel", "pip install 'oriel-serving[openvino-models]'"),
        ("model.plan", "TensorRT plans need TensorRT, which is not installed"),
        ("model.xml", "OpenVINO models need the package openvino, which is not installed"),
        ("xgboost.json", "forests need the package treelite, which is not installed"),
        ("checkpoint.tl", "pip install 'oriel-serving[forests]'"),
        ("notes.txt", "names no backend and holds no model.onnx"),
        ("config.pbtxt", "move config.pbtxt out of the version's folder"),
    ],
)
@pytest.mark.usefixtures("without_engines")
@pytest.mark.parametrize("config", [None, "max_batch_size: 4"])
def test_folder_of_another_framework_is_recognised(tmp_path: Path, file: str, text: str, config: str | None) -> None:
    path = models.put(tmp_path, "double", None, config) / "1" / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x")
    try:
        loaded = load_model(Loading(LocalStore(tmp_path), "double", find_backend=find_backend, cores=1, models=1))[1]
    except LoadFailed as failure:
        loaded = failure
    assert isinstance(loaded, LoadFailed) and text in loaded.reason and "double" in loaded.reason


def opened(repository: Path, model: bytes) -> Session:
    """Load a model of inputs x [n, 4] and b [4], the second of which may be left out, and output y [n, 4]."""
    config = f"""
        max_batch_size: 0 {OUTPUT.replace("[ 4 ]", "[ -1, 4 ]")}
        input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }},
                {{ name: "b" data_type: TYPE_FP32 dims: [ 4 ] optional: true }} ]
    """
    models.put(repository, "double", model, config)
    (version,) = load_model(
        Loading(LocalStore(repository), "double", find_backend=find_backend, cores=1, models=1)
    ).values()
    assert isinstance(version, LoadedVersion), version
    (session,) = version.sessions
    return session


def test_optional_input_with_a_default_in_the_file_may_be_left_out(tmp_path: Path) -> None:
    bias = models.numpy_helper.from_array(models.np.full(4, 2, dtype=models.np.float32), "b")
    ends = [("x", models.FLOAT, ["n", 4]), ("b", models.FLOAT, [4])]
    model = models.graph(
        [models.helper.make_node("Add", ["x", "b"], ["y"])], ends, [("y", models.FLOAT, ["n", 4])], [bias]
    )
    x = models.np.ones((2, 4), dtype=models.np.float32)
    session = opened(tmp_path, model)
    assert session.run({"x": x}, ["y"])[0].tolist() == (x + 2).tolist()
    assert session.run({"x": x, "b": x[0]}, ["y"])[0].tolist() == (x + 1).tolist()


def test_an_input_that_only_the_file_needs_is_named_if_it_is_missing(tmp_path: Path) -> None:
    """Callers read that the model could not be executed, and not why."""
    ends = [("x", models.FLOAT, ["n", 4]), ("b", models.FLOAT, [4])]
    model = models.graph([models.helper.make_node("Add", ["x", "b"], ["y"])], ends, [("y", models.FLOAT, ["n", 4])])
    x = models.np.ones((2, 4), dtype=models.np.float32)
    session = opened(tmp_path, model)
    assert session.run({"x": x, "b": x[0]}, ["y"])[0].tolist() == (x + 1).tolist()
    with pytest.raises(BackendFailed, match=r"Required inputs \(\['b'\]\) are missing"):
        session.run({"x": x}, ["y"])


@pytest.mark.parametrize(("name", "batch"), [("", 8), ("big", 64), ("other", 8)])
def test_a_named_configuration_takes_the_place_of_the_usual_one(tmp_path: Path, name: str, batch: int) -> None:
    folder, defaults = models.put(tmp_path, "double", models.double(), models.DOUBLE), LoadDefaults(config_name=name)
    (folder / "configs").mkdir()
    (folder / "configs/big.pbtxt").write_text(models.DOUBLE.replace("max_batch_size: 8", "max_batch_size: 64"))
    store = LocalStore(tmp_path)
    loading = Loading(store, "double", find_backend=find_backend, cores=1, models=1, defaults=defaults)
    outline = read_outline(store, "double", config_name=name)
    assert (
        outline.config is not None and outline.config.max_batch_size == batch == loading.configuration().max_batch_size
    )
