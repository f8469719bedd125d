"""Configurations and answers of forests, with a stand-in for Treelite: files, parameters, and the shapes of outputs."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oriel_inference.backends.forests import ForestSession
from oriel_inference.errors import BackendFailed, ConfigInvalid, LoadFailed
from oriel_inference.repository.config import validate
from oriel_inference.repository.forests import with_forest
from oriel_inference.repository.instances import Place, placements
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

FILE = "trees/config.pbtxt"
FIL = 'backend: "fil" '
SCORES = np.array([[[0.2]], [[0.5]], [[0.75]]])
OF_THREE = np.array([[[0.1, 0.2, 0.7]], [[0.4, 0.4, 0.2]]], np.float32)


def parameters(**given: str) -> str:
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{each}" }} }} ' for key, each in given.items())


def placed(config: str, *files: str) -> tuple[pb.ModelConfig, list[Place]]:
    found = parse_config_text(config)
    validate(found, "trees", FILE, files)
    return found, with_forest(found, FILE, placements(found, FILE, threads=4, gpus=()))


def session(scores: np.ndarray[Any, Any], **given: str) -> ForestSession:
    """Return the session of a forest with five features that answers `scores`."""
    fields = {"num_class": [scores.shape[2]]}
    header = SimpleNamespace(get_field=fields.__getitem__)
    model = SimpleNamespace(get_header_accessor=lambda: header, num_feature=5)
    return ForestSession(model, lambda _: scores, given)


def answer(scores: np.ndarray[Any, Any], **given: str) -> np.ndarray[Any, Any]:
    (found,) = session(scores, **given).run({"input__0": np.zeros((len(scores), 5), np.float32)}, ["output__0"])
    assert found.dtype == np.float32
    return found


@pytest.mark.parametrize(
    ("config", "files", "file", "kind"),
    [
        ("", ["xgboost.json"], "xgboost.json", "xgboost_json"),
        ("", ["xgboost.ubj"], "xgboost.ubj", "xgboost_ubj"),
        ("", ["model.txt"], "model.txt", "lightgbm"),
        (FIL, ["checkpoint.tl"], "checkpoint.tl", "treelite_checkpoint"),
        (FIL + parameters(model_type="lightgbm"), [], "model.txt", "lightgbm"),
        (FIL + parameters(model_type="xgboost"), [], "xgboost.model", "xgboost"),
        (FIL + parameters(model_type="lightgbm") + 'default_model_filename: "a.b"', ["a.b"], "a.b", "lightgbm"),
        (FIL + 'default_model_filename: "risk.json"', ["risk.json"], "risk.json", "xgboost_json"),
    ],
)
def test_the_kind_of_a_forest_follows_from_parameter_or_file(
    config: str, files: list[str], file: str, kind: str
) -> None:
    found, (place,) = placed(config, *files)
    assert (found.backend, found.default_model_filename) == ("fil", file)
    assert place.options.session_entries["model_type"] == kind


def test_a_run_has_one_thread_and_batches_are_large_where_nothing_is_said() -> None:
    found, (place,) = placed("", "model.txt")
    assert (found.max_batch_size, found.HasField("dynamic_batching")) == (1024, True)
    assert place.options.intra_op_threads == 1
    found, (place,) = placed(FIL + "max_batch_size: 8 " + parameters(cpu_nthread="3"), "model.txt")
    assert (found.max_batch_size, place.options.intra_op_threads) == (8, 3)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (parameters(model_type="catboost"), "parameters['model_type']: must be one of xgboost_ubj, xgboost_json,"),
        (parameters(output_class="yes"), "parameters['output_class']: must be one of true, false"),
        (parameters(threshold="high"), "parameters['threshold']: must be a number"),
        (parameters(threshold="nan"), "parameters['threshold']: must be a number"),
        (parameters(cpu_nthread="0"), "parameters['cpu_nthread']: must be a number from 1 to 256"),
        ('default_model_filename: "trees"', "parameters['model_type']: is missing: it is one of xgboost_ubj"),
        ("instance_group { kind: KIND_GPU }", "forests run on the CPU here: set KIND_CPU or KIND_AUTO"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(config: str, reason: str) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        placed(FIL + config, "model.txt")
    assert reason in caught.value.reason


def test_parameters_that_tune_a_gpu_are_named() -> None:
    found = parse_config_text(FIL + parameters(algo="NAIVE", storage_type="SPARSE", output_class="true"))
    expected = ["parameters['algo'] has no effect here", "parameters['storage_type'] has no effect here"]
    assert validate(found, "trees", FILE, ["model.txt"]) == expected


def test_one_column_has_no_dimension_of_its_own() -> None:
    assert answer(SCORES).tolist() == [np.float32(0.2), 0.5, 0.75]
    assert session(SCORES).outputs[0].shape == (-1, 1) and session(SCORES).inputs[0].shape == (-1, 5)


def test_a_binary_class_is_a_score_above_the_threshold() -> None:
    assert answer(SCORES, output_class="true").tolist() == [0, 0, 1]
    assert answer(SCORES, output_class="true", threshold="0.1").tolist() == [1, 1, 1]


def test_a_binary_probability_has_one_or_two_columns() -> None:
    both = answer(SCORES, output_class="true", predict_proba="true")
    assert both.shape == (3, 2) and both[2].tolist() == [0.25, 0.75]
    assert answer(SCORES, output_class="true", predict_proba="true", columns="1").tolist() == answer(SCORES).tolist()
    assert session(SCORES, predict_proba="true", columns="1").outputs[0].shape == (-1, 1)


def test_of_several_classes_the_first_largest_wins_or_each_has_a_column() -> None:
    assert answer(OF_THREE, output_class="true").tolist() == [2, 0]
    for given in ({"predict_proba": "true"}, {}):
        assert answer(OF_THREE, **given).tolist() == OF_THREE[:, 0].tolist()


def test_a_forest_with_several_targets_is_refused() -> None:
    header = SimpleNamespace(get_field={"num_class": [1, 1]}.__getitem__)
    with pytest.raises(LoadFailed, match="several targets"):
        ForestSession(SimpleNamespace(get_header_accessor=lambda: header, num_feature=5), lambda rows: rows, {})


def test_a_failed_run_is_the_fault_of_the_server() -> None:
    one = session(SCORES)
    one._predict = lambda _: 1 / 0  # type: ignore[assignment,return-value]
    with pytest.raises(BackendFailed, match="the forest could not be executed"):
        one.run({"input__0": np.zeros((1, 5), np.float32)}, ["output__0"])
