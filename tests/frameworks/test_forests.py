"""Forests with Treelite itself: files that XGBoost and LightGBM wrote, and models that they train here."""

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

treelite = pytest.importorskip("treelite")

from oriel_inference.backends import find_backend  # noqa: E402
from oriel_inference.errors import BackendFailed, LoadFailed  # noqa: E402
from oriel_inference.repository.check import CheckPool  # noqa: E402
from oriel_inference.repository.load import LoadedVersion, Loading, load_model  # noqa: E402
from oriel_inference.stores.local import LocalStore  # noqa: E402

from ..inference.control_server import serving  # noqa: E402

FILES = Path(__file__).parent / "files"
NAN = float("nan")
# Rows, and what the libraries themselves answered for them: LightGBM's two classes, XGBoost's three.
ROWS = np.array(
    [
        [2.71, NAN, -2.26, 0.37, 0.82],
        [-1.56, -1.13, 0.27, -0.8, 2.76],
        [1.06, -2.83, -0.14, -1.09, 0.03],
        [1.15, -0.11, -0.58, -0.52, 3.25],
        [2.32, NAN, 0.72, -0.47, -0.0],
    ],
    np.float32,
)
OF_TWO = np.array([0.712172, 0.776181, 0.776181, 0.712172, 0.712172])
OF_THREE = np.array(
    [
        [0.321131, 0.396185, 0.282684],
        [0.189624, 0.198473, 0.611902],
        [0.221969, 0.347604, 0.430428],
        [0.280698, 0.472211, 0.247091],
        [0.198767, 0.475816, 0.325417],
    ]
)


def config(features: int, columns: int, **given: str) -> str:
    text = f"""
        backend: "fil" max_batch_size: 32768 dynamic_batching {{ }} instance_group [ {{ kind: KIND_AUTO }} ]
        input [ {{ name: "input__0" data_type: TYPE_FP32 dims: [ {features} ] }} ]
        output [ {{ name: "output__0" data_type: TYPE_FP32 dims: [ {columns} ] }} ]
    """
    return text + "".join(f'parameters {{ key: "{k}" value {{ string_value: "{v}" }} }} ' for k, v in given.items())


def folder(root: Path, text: str | None) -> Path:
    made = root / "trees/1"
    made.mkdir(parents=True)
    if text is not None:
        (root / "trees/config.pbtxt").write_text(text)
    return made


def loaded(root: Path, *, check: CheckPool | None = None, cores: int = 2) -> LoadedVersion:
    loading = Loading(LocalStore(root), "trees", find_backend=find_backend, cores=cores, models=1, check=check)
    (found,) = load_model(loading).values()
    if isinstance(found, LoadFailed):
        raise found
    assert found is not None
    return found


def answers(root: Path, rows: np.ndarray[Any, Any] = ROWS) -> np.ndarray[Any, Any]:
    version = loaded(root)
    (found,) = version.sessions[0].run({"input__0": np.ascontiguousarray(rows, np.float32)}, ["output__0"])
    version.close()
    return found


async def test_a_bare_file_is_checked_completed_and_served(tmp_path: Path) -> None:
    shutil.copy(FILES / "model.txt", folder(tmp_path, None))
    async with serving(tmp_path, "none") as one:
        assert (await one.lines())["trees", "1"] == ("READY", "")
        shown = (await one.client.get("/v2/models/trees/config")).json()
        assert (shown["backend"], shown["max_batch_size"]) == ("fil", 1024)
        row = {"name": "input__0", "shape": [2, 5], "datatype": "FP32", "data": [*ROWS[1].tolist(), *ROWS[2].tolist()]}
        (output,) = (await one.client.post("/v2/models/trees/infer", json={"inputs": [row]})).json()["outputs"]
    assert (output["name"], output["shape"]) == ("output__0", [2])
    np.testing.assert_allclose(output["data"], OF_TWO[1:3], atol=1e-6)


async def test_a_forest_is_a_step_of_an_ensemble(tmp_path: Path) -> None:
    shutil.copy(FILES / "model.txt", folder(tmp_path, config(5, 1, model_type="lightgbm")))
    (tmp_path / "all/1").mkdir(parents=True)
    (tmp_path / "all/config.pbtxt").write_text("""
        platform: "ensemble" max_batch_size: 64
        input [ { name: "rows" data_type: TYPE_FP32 dims: [ 5 ] } ]
        output [ { name: "risk" data_type: TYPE_FP32 dims: [ 1 ] } ]
        ensemble_scheduling { step [ { model_name: "trees" model_version: -1
            input_map { key: "input__0" value: "rows" } output_map { key: "output__0" value: "risk" } } ] }
    """)
    async with serving(tmp_path, "none") as one:
        row = {"name": "rows", "shape": [2, 5], "datatype": "FP32", "data": [*ROWS[1].tolist(), *ROWS[2].tolist()]}
        response = await one.client.post("/v2/models/all/infer", json={"inputs": [row]})
    assert response.status_code == 200, response.text
    (output,) = response.json()["outputs"]
    assert (output["name"], output["shape"]) == ("risk", [2])


def test_files_of_both_libraries_answer_as_the_libraries_did(tmp_path: Path) -> None:
    shutil.copy(FILES / "model.txt", folder(tmp_path / "two", config(5, 1, model_type="lightgbm")))
    np.testing.assert_allclose(answers(tmp_path / "two"), OF_TWO, atol=1e-6)
    given = {"model_type": "xgboost_json", "output_class": "true"}
    shutil.copy(FILES / "xgboost.json", folder(tmp_path / "three", config(5, 3, predict_proba="true", **given)))
    np.testing.assert_allclose(answers(tmp_path / "three"), OF_THREE, atol=1e-6)
    shutil.copy(FILES / "xgboost.json", folder(tmp_path / "class", config(5, 1, **given)))
    assert answers(tmp_path / "class").tolist() == OF_THREE.argmax(axis=1).tolist()


def test_a_checkpoint_of_treelite_is_read(tmp_path: Path) -> None:
    path = folder(tmp_path, config(5, 2, predict_proba="true")) / "checkpoint.tl"
    treelite.frontend.load_lightgbm_model(FILES / "model.txt").serialize(path)
    np.testing.assert_allclose(answers(tmp_path), np.stack([1 - OF_TWO, OF_TWO], axis=1), atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "features", "reason"),
    [
        (2, 5, "output[0].dims: [2] does not fit the model file's [1]"),
        (1, 6, "input[0].dims: [6] does not fit the model file's [5]"),
    ],
)
def test_dims_that_the_forest_contradicts_are_refused(tmp_path: Path, columns: int, features: int, reason: str) -> None:
    shutil.copy(FILES / "model.txt", folder(tmp_path, config(features, columns)))
    with pytest.raises(LoadFailed) as caught:
        loaded(tmp_path)
    assert reason in caught.value.reason


@pytest.mark.parametrize("name", ["model.txt", "xgboost.json", "xgboost.ubj", "checkpoint.tl"])
def test_a_file_that_is_no_forest_is_refused_in_the_checking_process(tmp_path: Path, name: str) -> None:
    (folder(tmp_path, None) / name).write_bytes(b"\x80\x04nothing of the kind" * 20)
    pool = CheckPool(30)
    try:
        with pytest.raises(LoadFailed) as caught:
            loaded(tmp_path, check=pool)
    finally:
        pool.close()
    assert name in caught.value.reason and str(tmp_path) not in caught.value.reason


@pytest.mark.parametrize(
    ("field", "value"),
    [("split_index", 2_000_000_000), ("split_index", -1), ("cleft", 1), ("cright", 1 << 20), ("leaf_vector_end", 9)],
)
def test_a_tree_that_leads_astray_on_a_way_that_zeros_do_not_take_is_refused(
    tmp_path: Path, field: str, value: int
) -> None:
    model = treelite.frontend.load_xgboost_model(FILES / "xgboost.json", format_choice="json")
    tree = model.get_tree_accessor(0)
    left, values = tree.get_field("cleft"), tree.get_field(field).copy()
    values[np.flatnonzero(left != -1)[-1]] = value
    tree.set_field(field, values)
    model.serialize(folder(tmp_path, None) / "checkpoint.tl")
    with pytest.raises(LoadFailed, match="the trees of the file are damaged"):
        loaded(tmp_path)


def test_rows_of_another_width_are_an_error(tmp_path: Path) -> None:
    shutil.copy(FILES / "model.txt", folder(tmp_path, config(5, 1)))
    (session,) = loaded(tmp_path, cores=1).sessions
    for shape in ((2, 4), (0, 4), (2,)):
        with pytest.raises(BackendFailed):
            session.run({"input__0": np.zeros(shape, np.float32)}, ["output__0"])
    assert session.run({"input__0": np.zeros((0, 5), np.float32)}, ["output__0"])[0].shape == (0,)


def test_instances_share_the_trees_and_run_at_once(tmp_path: Path) -> None:
    text = config(5, 1).replace("KIND_AUTO", "KIND_CPU count: 2")
    shutil.copy(FILES / "model.txt", folder(tmp_path, text))
    first, second = loaded(tmp_path).sessions
    assert first._model is second._model  # type: ignore[attr-defined]
    rows = {"input__0": np.tile(ROWS, (200, 1))}
    wrong: list[float] = []

    def run(session: Any) -> None:
        found = [session.run(rows, ["output__0"])[0] for _ in range(20)]
        wrong.extend(float(np.abs(each - np.tile(OF_TWO, 200)).max()) for each in found)

    threads = [threading.Thread(target=run, args=(each,)) for each in (first, second, first)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 60 and max(wrong) < 1e-6


def data(classes: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return rows with missing values, and a class for each."""
    values = np.random.default_rng(classes)
    rows = values.standard_normal((300, 8)).astype(np.float32)
    targets = np.digitize(rows[:, 0] + rows[:, 1] * rows[:, 2], np.linspace(-1, 1, classes + 1)[1:-1])
    rows[values.random(rows.shape) < 0.05] = NAN
    return rows, targets


@pytest.mark.parametrize("suffix", ["json", "ubj"])
@pytest.mark.parametrize("classes", [2, 4])
def test_classifiers_of_xgboost(tmp_path: Path, classes: int, suffix: str) -> None:
    xgboost = pytest.importorskip("xgboost")
    rows, targets = data(classes)
    objective = (
        {"objective": "multi:softprob", "num_class": classes} if classes > 2 else {"objective": "binary:logistic"}
    )
    model = xgboost.train({**objective, "max_depth": 4}, xgboost.DMatrix(rows, targets), 20)
    expected = model.predict(xgboost.DMatrix(rows))
    expected = expected if classes > 2 else np.stack([1 - expected, expected], axis=1)
    text = config(8, classes, model_type=f"xgboost_{suffix}", output_class="true", predict_proba="true")
    model.save_model(folder(tmp_path, text) / f"xgboost.{suffix}")
    np.testing.assert_allclose(answers(tmp_path, rows), expected, atol=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_classifiers_of_lightgbm(tmp_path: Path, classes: int) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    rows, targets = data(classes)
    objective = {"objective": "multiclass", "num_class": classes} if classes > 2 else {"objective": "binary"}
    model = lightgbm.train({**objective, "num_leaves": 8, "verbose": -1}, lightgbm.Dataset(rows, targets), 20)
    expected = model.predict(rows)
    expected = expected if classes > 2 else np.stack([1 - expected, expected], axis=1)
    text = config(8, classes, model_type="lightgbm", output_class="true", predict_proba="true")
    model.save_model(folder(tmp_path, text) / "model.txt")
    np.testing.assert_allclose(answers(tmp_path, rows), expected, atol=1e-6)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_regressors(tmp_path: Path, library: str) -> None:
    package = pytest.importorskip(library)
    rows, _ = data(2)
    targets = np.nan_to_num(rows).sum(axis=1)
    if library == "xgboost":
        model = package.train({"max_depth": 4}, package.DMatrix(rows, targets), 20)
        expected, file, kind = model.predict(package.DMatrix(rows)), "xgboost.json", "xgboost_json"
    else:
        model = package.train({"verbose": -1}, package.Dataset(rows, targets), 20)
        expected, file, kind = model.predict(rows), "model.txt", "lightgbm"
    model.save_model(folder(tmp_path, config(8, 1, model_type=kind, output_class="false")) / file)
    np.testing.assert_allclose(answers(tmp_path, rows), expected, atol=1e-4)


def test_forests_of_scikit_learn_by_a_checkpoint(tmp_path: Path) -> None:
    ensemble = pytest.importorskip("sklearn.ensemble")
    rows, targets = data(3)
    rows = np.nan_to_num(rows)
    model = ensemble.RandomForestClassifier(10, max_depth=5, random_state=1).fit(rows, targets)
    path = folder(tmp_path, config(8, 3, output_class="true", predict_proba="true")) / "checkpoint.tl"
    treelite.sklearn.import_model(model).serialize(path)
    np.testing.assert_allclose(answers(tmp_path, rows), model.predict_proba(rows), atol=1e-6)
