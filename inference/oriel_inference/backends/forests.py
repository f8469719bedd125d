"""The backend `fil`: trees of XGBoost, LightGBM and others, executed by Treelite on the CPU.

Names, files and parameters are those of Triton's backend of that name.
"""

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_uint64, c_void_p
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from oriel_inference.backends import Backend, Session, without_folders
from oriel_inference.errors import BackendFailed, LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_wire.v2.messages import Array

MISSING = "forests need the package treelite, which is not installed: pip install 'oriel-serving[forests]'"
INPUT, OUTPUT = "input__0", "output__0"
THRESHOLD = 0.5
# Fields of a tree: lists of several nodes, and those with one element for each node.
_LISTS = ("leaf_vector", "category_list")
_OF_NODES = (
    *("cright", "node_type", "split_index", "default_left", "leaf_value", "threshold", "cmp"),
    *("category_list_right_child", *(f"{name}_{edge}" for name in _LISTS for edge in ("begin", "end"))),
)


class Forests(Backend):
    """Opens files of forests. One object per load: the sessions of a file share its trees.

    Making one raises LoadFailed if Treelite is missing.
    """

    name = "fil"

    def __init__(self) -> None:
        try:
            self._treelite = import_module("treelite")
            self._core, self._config = import_module("treelite.core"), import_module("treelite.gtil.gtil").GTILConfig
        except ImportError as error:
            raise LoadFailed(MISSING) from error
        self._models: dict[Path, Any] = {}

    def open(self, path: Path, options: EngineOptions) -> "ForestSession":
        given = options.session_entries
        if path not in self._models:
            try:
                self._models[path] = self._load(path, given)
            except self._treelite.TreeliteError as error:
                raise LoadFailed(f"Treelite cannot load {path.name}: {_plain(error)}") from error
            _check_trees(self._models[path])
        model = self._models[path]
        config = self._config(nthread=options.intra_op_threads, predict_type="default")
        return ForestSession(model, _predictor(model, self._core, config), given)

    def _load(self, path: Path, given: Mapping[str, str]) -> Any:
        frontend, unknown = self._treelite.frontend, given.get("xgboost_allow_unknown_field") == "true"
        match given["model_type"]:
            case "lightgbm":
                return frontend.load_lightgbm_model(path)
            case "treelite_checkpoint":
                return self._treelite.Model.deserialize(path)
            case "xgboost":
                return frontend.load_xgboost_model_legacy_binary(path)
            case kind:
                form = "json" if kind == "xgboost_json" else "ubjson"
                return frontend.load_xgboost_model(path, format_choice=form, allow_unknown_field=unknown)


class ForestSession(Session):
    """One forest; a run keeps the interpreter's lock only while it prepares.

    predict: rows -> scores.
    given: Triton's parameters.
    """

    provider = "Treelite"

    def __init__(self, model: Any, predict: Callable[[Array], Array], given: Mapping[str, str]) -> None:
        header = model.get_header_accessor()
        classes = [int(count) for count in header.get_field("num_class")]
        if len(classes) != 1:
            raise LoadFailed("the forest has several targets: train and load one forest for each")
        self._model = model
        self._predict = predict
        self._classes = classes[0]
        self._probabilities = given.get("predict_proba") == "true"
        self._class = given.get("output_class") == "true" and not self._probabilities
        self._threshold = float(given.get("threshold", THRESHOLD))
        # A binary forest has one score; Triton's clients ask for it as one probability or as two.
        self._both = self._probabilities and self._classes == 1 and given.get("columns", "2") == "2"
        columns = 1 if self._class else 2 if self._both else self._classes
        self._shape = (-1, columns) if columns > 1 else (-1,)
        self.inputs = (TensorInfo(name=INPUT, datatype="FP32", shape=(-1, int(model.num_feature))),)
        self.outputs = (TensorInfo(name=OUTPUT, datatype="FP32", shape=(-1, columns)),)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; NaN is a missing value. A single column has no dimension of its own, as in Triton."""
        try:
            scores = self._predict(inputs[INPUT])
        except Exception as error:
            raise BackendFailed("the forest could not be executed", _plain(error)) from error
        scores = scores.reshape(-1, self._classes)
        if self._class:
            scores = np.argmax(scores, axis=1) if self._classes > 1 else scores > self._threshold
        elif self._both:
            scores = np.concatenate([1 - scores, scores], axis=1)
        return [scores.astype(np.float32, copy=False).reshape(self._shape)] * len(outputs)

    def close(self) -> None:
        self._model = None


def _predictor(model: Any, core: Any, config: Any) -> Callable[[Array], Array]:
    """Return a function that executes a model without Treelite's own `predict`, which takes half of the time of a
    single row to make the settings and to look at the types each time.
    """
    given, answered = np.dtype(model.input_type), np.dtype(model.output_type)
    form, classes = model.input_type.encode(), int(model.get_header_accessor().get_field("num_class").max())

    width = int(model.num_feature)

    def predict(rows: Array) -> Array:
        if rows.shape[1:] != (width,):  # the library does not know the size of its rows
            raise ValueError(f"rows of {width} features are needed")
        rows = np.ascontiguousarray(rows, given)
        scores: Array = np.zeros((len(rows), 1, classes), answered)
        source, into = (c_void_p(array.ctypes.data) for array in (rows, scores))
        run = core._LIB.TreeliteGTILPredict
        core._check_call(run(model.handle, source, form, c_uint64(len(rows)), into, config.handle))
        return scores

    return predict


def _check_trees(model: Any) -> None:
    """Raise LoadFailed for trees that lead out of their row or of themselves, or into a circle, on ways that zeros do
    not take: Treelite checks none of that.
    """
    header = model.get_header_accessor().get_field
    vector = np.prod(header("leaf_vector_shape"))
    sound = _within(header("class_id"), -1, header("num_class").max()) and _within(header("target_id"), -1, 1)
    for number in range(model.num_tree):
        field = model.get_tree_accessor(number).get_field
        left, right = field("cleft"), field("cright")
        inner = left != -1
        below = np.concatenate([left[inner], right[inner]])
        sound = (
            sound
            and all(field(name).size == left.size for name in _OF_NODES)
            and _within(below, 1, left.size)
            and np.unique(below).size == below.size  # no node is below two, nor below itself
            and _within(field("split_index")[inner], 0, model.num_feature)
            and set((field("leaf_vector_end") - field("leaf_vector_begin")).tolist()) <= {0, vector}
            and all(_within(field(f"{name}_end"), 0, field(name).size + 1) for name in _LISTS)
            and all((field(f"{name}_begin") <= field(f"{name}_end")).all() for name in _LISTS)
        )
    if not sound:
        raise LoadFailed("the trees of the file are damaged: copy the file again, or write it anew")


def _within(values: Array, least: int, end: int) -> bool:
    return values.size == 0 or bool(least <= values.min() and values.max() < end)


def _plain(error: Exception) -> str:
    """Return Treelite's error text as one line, without the place in its own source."""
    line = (str(error).splitlines() or [""])[0]
    return without_folders(line.partition(": ")[2] or line)[:300]
