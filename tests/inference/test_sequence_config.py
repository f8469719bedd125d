"""`sequence_batching` of a configuration: what it means, and what is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oriel_inference.backends import find_backend
from oriel_inference.catalog import ServingModel
from oriel_inference.errors import InvalidRequest, LoadFailed
from oriel_inference.model import ControlKind, ModelSpec, SequenceControl, SequenceRules, TensorSpec
from oriel_inference.repository import instances
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.repository.sequences import with_sequences
from oriel_inference.sequences.controls import Controls, corrid, first_step
from oriel_inference.sequences.flags import Flags, read_flags
from oriel_inference.stores.local import LocalStore
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

from .sequence_bench import SequenceBench
from .sequence_models import STATE, put

START = 'control_input { name: "START" control { kind: CONTROL_SEQUENCE_START %s } }'
THREADS = 'parameters { key: "intra_op_thread_count" value { string_value: "3" } }'
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


def rules(root: Path, batching: str, **more: Any) -> tuple[LoadedVersion, SequenceRules]:
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


@pytest.mark.parametrize(("brief_s", "more", "threads"), [(9.0, "", 1), (0.0, "", 4), (9.0, THREADS, 3)])
def test_a_model_of_short_steps_runs_on_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, brief_s: float, more: str, threads: int
) -> None:
    monkeypatch.setattr(instances, "BRIEF_S", brief_s)
    found, _ = rules(tmp_path, "", more=more)
    assert found.units == threads


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
        ("oldest { max_candidate_sequences: -1 }", "oldest.max_candidate_sequences: must not be negative"),
        (
            f"oldest {{ max_candidate_sequences: 65537 }} {STATE % ''}",
            "asks for 65537 sequences on each of 1 instances, at most 65536",
        ),
        ("oldest { preferred_batch_size: 5 }", "5 does not lie between 1 and max_batch_size 4"),
        ("direct { minimum_slot_utilization: 1.5 }", "must lie between 0 and 1"),
        (START % "", "needs two values, for false and true"),
        (START % "int32_false_true: [ 0 ]", "needs two values, for false and true"),
        (START % "int32_false_true: [ 0, 1 ] bool_false_true: [ false, true ]", "needs two values"),
        (START.replace("START", "INPUT", 1) % "int32_false_true: [ 0, 1 ]", "'INPUT' is given twice"),
        ('control_input { name: "START" }', "has 0 entries: write exactly one"),
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


def test_controls_have_the_types_and_values_that_the_configuration_gives() -> None:
    config = parse_config_text("""
        name: "m" max_batch_size: 2
        sequence_batching {
          control_input { name: "s" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 0.5 ] } }
          control_input { name: "e" control { kind: CONTROL_SEQUENCE_END bool_false_true: [ true, false ] } }
          control_input { name: "c" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
          state { input_name: "in" output_name: "out" data_type: TYPE_STRING dims: [ -1, 2 ] }
        }""")
    plain = ModelSpec(
        name="m", version=1, platform="", backend="", max_batch_size=2, inputs=(), outputs=(), bounds=None
    )
    spec = with_sequences(plain, config, "m/config.pbtxt", read=lambda _: b"")
    assert spec.sequences is not None
    controls = Controls(spec.sequences, batched=True)
    found = {name: array.tolist() for name, array in controls.of(Flags("me", True, False)).items()}
    assert found == {"s": [[0.5]], "e": [[True]], "c": [[b"me"]]}
    assert {each.tensor.datatype for each in spec.sequences.controls} == {"FP32", "BOOL", "BYTES"}
    first = {name: array.tolist() for name, array in first_step(spec, 2).items()}
    assert first == {"s": [[0.5]] * 2, "e": [[True]] * 2, "c": [[b""]] * 2, "in": [[[b"", b""]]] * 2}
    with pytest.raises(InvalidRequest, match="must be text for this model"):
        controls.of(Flags(7, True, False))


@pytest.mark.parametrize("datatype", ["UINT64", "INT64"])
def test_a_negative_id_is_a_number_of_the_upper_half(datatype: str) -> None:
    tensor = TensorSpec(name="c", datatype=datatype, dims=(1,))
    false = np.array([0], np.int64)
    control = SequenceControl(tensor=tensor, kind=ControlKind.CORRID, false=false, true=false)
    flags = read_flags({"sequence_id": -5, "sequence_start": True}, "m")
    assert flags.id == 2**64 - 5 and corrid(flags.id, control).tolist() == [-5 if datatype == "INT64" else 2**64 - 5]


def test_a_warm_up_runs_the_first_step_of_a_sequence(tmp_path: Path) -> None:
    sample = 'inputs { key: "INPUT" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } }'
    put(tmp_path, "sum", STATE % "", more=f'model_warmup {{ name: "two" batch_size: 2 {sample} }}')
    found = load(tmp_path)
    assert isinstance(found, LoadedVersion) and found.tried and found.run_s is not None


def test_states_keep_a_model_in_memory() -> None:
    """It was taken out of memory for another model between two steps."""
    bench = SequenceBench()
    serving = ServingModel(bench.scheduler.spec, pb.ModelConfig(), bench.scheduler, (), 0.0)
    bench.send(1, start=True)
    bench.settle()
    assert serving.is_leased
    bench.send(1, end=True)
    bench.settle()
    assert not serving.is_leased
