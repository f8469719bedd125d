"""TensorFlow's files on OpenVINO: models made here by TensorFlow, with the answers that it gives itself."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("openvino")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
tf = pytest.importorskip("tensorflow")

from oriel_inference.backends import find_backend  # noqa: E402
from oriel_inference.errors import LoadFailed  # noqa: E402
from oriel_inference.repository.check import CheckPool  # noqa: E402
from oriel_inference.repository.load import LoadedVersion, Loading, load_model  # noqa: E402
from oriel_inference.stores.local import LocalStore  # noqa: E402

from ..inference.control_server import serving  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # TensorFlow's own
ROWS = tf.TensorSpec([None, 4], tf.float32, name="x")
X = np.random.default_rng(5).standard_normal((6, 4)).astype(np.float32)
SAVED = 'platform: "tensorflow_savedmodel" max_batch_size: 8 '


class Dense(tf.Module):  # type: ignore[misc]
    """Two outputs from one input."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = tf.Variable(np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32))

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def both(self, x: Any) -> Any:
        return {"y": tf.nn.softmax(x @ self.weights), "total": tf.reduce_sum(x, axis=1)}

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def twice(self, x: Any) -> Any:
        return {"z": x * 2}


class Beta(tf.Module):  # type: ignore[misc]
    """An operator that OpenVINO does not have."""

    @tf.function(input_signature=[ROWS])  # type: ignore[untyped-decorator]
    def beta(self, x: Any) -> Any:
        return {"y": tf.raw_ops.Betainc(a=x, b=x, x=x)}


class Table(tf.Module):  # type: ignore[misc]
    """A table of texts, which needs TensorFlow's own runtime."""

    def __init__(self) -> None:
        super().__init__()
        entries = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        self.table = tf.lookup.StaticHashTable(entries, -1)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="t")])  # type: ignore[untyped-decorator]
    def find(self, t: Any) -> Any:
        return {"id": self.table.lookup(t)}


def folder(root: Path, config: str | None = None) -> Path:
    made = root / "net/1"
    made.mkdir(parents=True)
    if config is not None:
        (root / "net/config.pbtxt").write_text(config)
    return made


def loaded(root: Path) -> LoadedVersion:
    pool = CheckPool(60)
    try:
        loading = Loading(LocalStore(root), "net", find_backend=find_backend, cores=1, models=1, check=pool)
        (found,) = load_model(loading).values()
    finally:
        pool.close()
    if isinstance(found, LoadFailed):
        raise found
    assert found is not None
    return found


def answers(root: Path, given: str, *names: str) -> dict[str, Any]:
    version = loaded(root)
    found = version.sessions[0].run({given: X}, names)
    version.close()
    return dict(zip(names, found, strict=True))


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("config", [None, SAVED, 'backend: "tensorflow"', 'backend: "openvino"'])
def test_a_saved_model_answers_as_tensorflow(tmp_path: Path, config: str | None) -> None:
    model = Dense()
    tf.saved_model.save(model, str(folder(tmp_path, config) / "model.savedmodel"), signatures=model.both)
    same(answers(tmp_path, "x", "y", "total"), model.both(X))


async def test_a_saved_model_is_served_and_the_index_names_its_engine(tmp_path: Path) -> None:
    model = Dense()
    tf.saved_model.save(model, str(folder(tmp_path) / "model.savedmodel"), signatures=model.both)
    async with serving(tmp_path, "none") as one:
        assert (await one.lines())["net", "1"] == ("READY", "model.savedmodel is executed by OpenVINO")
        body = {"inputs": [{"name": "x", "shape": [6, 4], "datatype": "FP32", "data": X.ravel().tolist()}]}
        config = (await one.client.get("/v2/models/net/config")).json()
        assert (config["max_batch_size"], config["default_model_filename"]) == (4, "model.savedmodel")
        assert (await one.client.post("/v2/models/net/infer", json=body)).status_code == 400, "six rows, four are taken"
        body["inputs"][0] |= {"shape": [2, 4], "data": X[:2].ravel().tolist()}
        outputs = (await one.client.post("/v2/models/net/infer", json=body)).json()["outputs"]
    # A tensor without a dimension beside the batch is shown with one element.
    assert {each["name"]: each["shape"] for each in outputs} == {"y": [2, 3], "total": [2, 1]}
    expected = model.both(X[:2])
    same(
        {n: np.array(each["data"], np.float32).reshape(expected[n].shape) for each in outputs if (n := each["name"])},
        expected,
    )


def test_a_keras_model_is_served_as_it_is_exported(tmp_path: Path) -> None:
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]
    )
    model.export(str(folder(tmp_path, SAVED) / "model.savedmodel"), verbose=False)
    version = loaded(tmp_path)
    (given,) = version.spec.inputs
    x = np.random.default_rng(2).standard_normal((2, 8, 8, 1)).astype(np.float32)
    (found,) = version.sessions[0].run({given.name: x}, [version.spec.outputs[0].name])
    np.testing.assert_allclose(found, model(x).numpy(), rtol=1e-4, atol=1e-5)


def test_a_lite_file_answers_as_tensorflow(tmp_path: Path) -> None:
    model = Dense()
    concrete = model.both.get_concrete_function()
    converted = tf.lite.TFLiteConverter.from_concrete_functions([concrete], model).convert()
    (folder(tmp_path) / "model.tflite").write_bytes(converted)
    version = loaded(tmp_path)
    names = {each.dims: each.name for each in version.spec.outputs}
    found = version.sessions[0].run({version.spec.inputs[0].name: X}, [names[3,], names[1,]])
    same(dict(zip(("y", "total"), found, strict=True)), model.both(X))


def test_a_frozen_graph_has_the_names_of_its_nodes(tmp_path: Path) -> None:
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    model = Dense()
    frozen = convert_variables_to_constants_v2(model.both.get_concrete_function())
    names = [each.name.removesuffix(":0") for each in frozen.outputs]
    config = """
        platform: "tensorflow_graphdef" max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
    """
    (folder(tmp_path, config) / "model.graphdef").write_bytes(frozen.graph.as_graph_def().SerializeToString())
    found = answers(tmp_path, "x", *names)
    expected = {tuple(each.shape): each for each in model.both(X).values()}
    same(found, {name: expected[found[name].shape] for name in names})


@pytest.mark.parametrize(("given", "served"), [("", True), ("both", False), ("serving_default", True)])
def test_of_several_signatures_the_default_one_is_served(tmp_path: Path, given: str, served: bool) -> None:
    model = Dense()
    named = f'parameters {{ key: "TF_SIGNATURE_DEF" value {{ string_value: "{given}" }} }}'
    path = folder(tmp_path, SAVED + (named if given else "")) / "model.savedmodel"
    tf.saved_model.save(model, str(path), signatures={"serving_default": model.twice, "both": model.both})
    if served:
        same(answers(tmp_path, "x", "z"), model.twice(X))
        return
    with pytest.raises(LoadFailed, match="OpenVINO runs the only signature or 'serving_default'"):
        loaded(tmp_path)


def test_several_signatures_without_a_default_one_are_refused_by_their_names(tmp_path: Path) -> None:
    model = Dense()
    path = folder(tmp_path, SAVED) / "model.savedmodel"
    tf.saved_model.save(model, str(path), signatures={"both": model.both, "twice": model.twice})
    with pytest.raises(LoadFailed, match="the SavedModel has both, twice: save it anew with signatures="):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("made", "operators"),
    [(lambda: Beta(), "operator Betainc"), (lambda: Table(), "operators HashTableV2, LookupTableFindV2")],
)
def test_operators_that_openvino_lacks_are_named(tmp_path: Path, made: Any, operators: str) -> None:
    model = made()
    tf.saved_model.save(
        model, str(folder(tmp_path) / "model.savedmodel"), signatures=getattr(model, "beta", None) or model.find
    )
    with pytest.raises(LoadFailed) as caught:
        loaded(tmp_path)
    assert f"OpenVINO does not have the {operators}: export the model to ONNX" in caught.value.reason


def test_half_a_saved_model_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path) / "model.savedmodel"
    model = Dense()
    tf.saved_model.save(model, str(path), signatures=model.both)
    whole = (path / "saved_model.pb").read_bytes()
    (path / "saved_model.pb").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(LoadFailed, match=r"saved_model\.pb is not a SavedModel, or not a whole one"):
        loaded(tmp_path)
