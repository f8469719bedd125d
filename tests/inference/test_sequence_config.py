"""`sequence_batching` of a configuration: what it means, and what is refused by name."""

from pathlib import Path

import numpy as np
import pytest

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.model import SequenceRules
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore

from .sequence_models import STATE, put

START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START %s } }'
INITIAL = "initial_state { data_type: TYPE_INT32 dims: [ 1 ] %s }"


def load(root: Path) -> LoadedVersion | LoadFailed:
    try:
        loading = Loading(LocalStore(root), "sum", find_backend=find_backend, cores=4, models=1)
        (found,) = load_model(loading).values()
    except LoadFailed as failure:
        return failure
    assert found is not None
    if isinstance(found, LoadedVersion):
        found.close()
    return found


def rules(root: Path, batching: str, **more: int) -> tuple[LoadedVersion, SequenceRules]:
    put(root, "sum", f"{batching} {STATE % ''}", **more)
    found = load(root)
    assert isinstance(found, LoadedVersion), found
    assert found.spec.sequences is not None
    return found, found.spec.sequences


def test_without_a_strategy_each_row_of_a_batch_is_a_slot(tmp_path: Path) -> None:
    found, made = rules(tmp_path, "")
    assert (made.slots, made.idle_s, made.padded, found.spec.instances) == (4, 1.0, False, 1)
    assert found.config.sequence_batching.HasField("direct")
    assert [each.tensor.name for each in made.states] == ["STATE_IN"] and made.states[0].initial.tolist() == [0]
    assert [each.name for each in found.spec.inputs + found.spec.outputs] == ["INPUT", "OUTPUT"]


def test_delays_and_preferred_sizes_bound_batches(tmp_path: Path) -> None:
    found, made = rules(
        tmp_path,
        "oldest { max_candidate_sequences: 9 preferred_batch_size: [ 3, 2 ] max_queue_delay_microseconds: 500 "
        "preserve_ordering: true }",
    )
    bounds = found.spec.bounds
    assert bounds is not None and (made.slots, bounds.preferred_rows, bounds.max_delay_s) == (9, (2, 3), 0.0005)
    assert found.spec.queue.preserve_ordering
    direct = "direct { max_queue_delay_microseconds: 500 minimum_slot_utilization: 0.6 }"
    bounds = rules(tmp_path, direct)[0].spec.bounds
    assert bounds is not None and (bounds.preferred_rows, bounds.max_delay_s) == ((3, 4), 0.0005)
    bounds = rules(tmp_path, "direct { max_queue_delay_microseconds: 500 }")[0].spec.bounds
    assert bounds is not None and (bounds.preferred_rows, bounds.max_delay_s) == ((), 0.0)


def test_a_first_state_comes_from_a_file(tmp_path: Path) -> None:
    put(tmp_path, "sum", STATE % (INITIAL % 'data_file: "ten"'))
    folder = tmp_path / "sum/initial_state"
    folder.mkdir()
    (folder / "ten").write_bytes(np.array([10], np.int32).tobytes())
    found = load(tmp_path)
    assert isinstance(found, LoadedVersion) and found.spec.sequences is not None
    assert found.spec.sequences.states[0].initial.tolist() == [10]
    (folder / "ten").write_bytes(b"123")
    refused = load(tmp_path)
    assert isinstance(refused, LoadFailed) and "holds 3 bytes, dims ask for 4" in refused.reason
    (tmp_path / "secret").write_bytes(b"1234")
    (folder / "ten").unlink()
    (folder / "ten").symlink_to("/etc/passwd")
    assert isinstance(load(tmp_path), LoadFailed)


@pytest.mark.parametrize(
    "batching, text",
    [
        ("oldest { max_candidate_sequences: -1 }", "oldest.max_candidate_sequences: must lie between 0 and"),
        ("oldest { preferred_batch_size: 5 }", "5 does not lie between 1 and max_batch_size 4"),
        ("direct { minimum_slot_utilization: 1.5 }", "must lie between 0 and 1"),
        (START % "", "needs two values, for false and true"),
        (START % "int32_false_true: [ 0 ]", "needs two values, for false and true"),
        (START % "int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]", "needs two values"),
        (START.replace("START", "INPUT", 1) % "int32_false_true: [ 0, 1 ]", "'INPUT' is given twice"),
        ('control_input { name: "START" }', "has 0 entries, each input carries one control"),
        (
            'control_input { name: "C" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }',
            "must be one of TYPE_UINT64, TYPE_INT64, TYPE_UINT32, TYPE_INT32, TYPE_STRING",
        ),
        (START % "int32_false_true: [ 0, 1 ]", "sequence_batching: 'START'.name: the model file has no input 'START'"),
        (STATE % "" + STATE % "", "'STATE_IN' is given twice"),
        (STATE % "initial_state { data_type: TYPE_FP32 dims: [ 1 ] zero_data: true }", "differs from the state's"),
        (STATE % "initial_state { data_type: TYPE_INT32 dims: [ 2 ] zero_data: true }", "does not fit the state's"),
        (STATE % "initial_state { data_type: TYPE_INT32 dims: [ 1 ] }", "needs zero_data or data_file"),
        (STATE % (INITIAL % 'data_file: "../config.pbtxt"'), "must be relative and stay inside the model's folder"),
        (STATE % (INITIAL % 'data_file: "gone"'), "sum/initial_state/gone is missing"),
        ((STATE % "").replace("INT32", "FP32"), "sequence_batching: 'STATE_IN'.data_type: the model file has"),
        ("", "the model file also needs input 'STATE_IN'"),
        (f"{STATE % ''} iterative_sequence: true", "iterative_sequence: is for Python models"),
    ],
)
def test_mistakes_are_refused_by_name(batching: str, text: str, tmp_path: Path) -> None:
    put(tmp_path, "sum", batching)
    refused = load(tmp_path)
    assert isinstance(refused, LoadFailed), "it was loaded"
    assert refused.reason.startswith("sum/") or refused.reason.startswith("file name")
    assert text in refused.reason


def test_a_compiler_does_not_go_with_sequences(tmp_path: Path) -> None:
    compiled = 'parameters { key: "oriel.compile" value { string_value: "onnxruntime-graph" } }'
    put(tmp_path, "sum", STATE % "", more=compiled)
    refused = load(tmp_path)
    assert isinstance(refused, LoadFailed)
    assert "sequence_batching: does not go with a compiler" in refused.reason
