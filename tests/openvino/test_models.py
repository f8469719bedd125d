"""OpenVINO as a back end. Its models are made here with the package itself: pip install
'oriel-serving[openvino-models]'.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

ov = pytest.importorskip("openvino")

import openvino.opset13 as op  # noqa: E402

from oriel_inference.backends import OutsideProfile, find_backend  # noqa: E402
from oriel_inference.errors import InvalidRequest, LoadFailed  # noqa: E402
from oriel_inference.repository.check import CheckPool  # noqa: E402
from oriel_inference.repository.load import LoadedVersion, Loading, load_model  # noqa: E402
from oriel_inference.stores.local import LocalStore  # noqa: E402

from ..inference import ensembles, models  # noqa: E402
from ..inference.conftest import settings_of  # noqa: E402
from ..inference.control_server import serving  # noqa: E402
from ..inference.sequence_models import CORRID, FLAGS, STATE, Client  # noqa: E402
from ..inference.sequence_models import TENSORS as OF_SEQUENCES  # noqa: E402
from ..inference.thread_unit import unit_in_thread  # noqa: E402

IR = 'backend: "openvino" '
BATCHED = IR + "max_batch_size: 8 "
TENSORS = """
    input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ] output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""
# feed x, relu, fetch y, in the form of PaddlePaddle's public framework.proto.
PADDLE = bytes.fromhex(
    "0ad201080010ffffffffffffffffff011a0c0a04666565641202080918011a0d0a0566657463681202080a18011a1c0a017812170807"
    "1a130a0f080510ffffffffffffffffff01100410001a1c0a0179121708071a130a0f080510ffffffffffffffffff011004100022260a"
    "090a015812046665656412080a034f75741201781a046665656422090a03636f6c1000180022180a060a015812017812080a034f7574"
    "1201791a0472656c7522280a060a0158120179120c0a034f7574120566657463681a05666574636822090a03636f6c10001800220408"
    "80897a"
)
WEIGHTS = np.arange(12, dtype=np.float32).reshape(4, 3)


def parameters(**given: str) -> str:
    return "".join(f'parameters {{ key: "{key}" value {{ string_value: "{each}" }} }} ' for key, each in given.items())


def named(node: Any, *names: str) -> Any:
    node.output(0).get_tensor().set_names(set(names))
    return node


def matmul(rows: int = -1, names: Sequence[str] = ("y",)) -> Any:
    """Return a model y = x @ WEIGHTS with the first dimension `rows`."""
    x = named(op.parameter([rows, 4], ov.Type.f32, name="x"), "x")
    y = named(op.matmul(x, op.constant(WEIGHTS), False, False), *names)
    return ov.Model([op.result(y)], [x], "matmul")


def put(root: Path, model: Any, config: str | None, file: str = "model.xml") -> None:
    folder = models.put(root, "net", None, config) / "1"
    ov.save_model(model, folder / file, compress_to_fp16=False)


def loaded(root: Path, *, cores: int = 1, check: CheckPool | None = None) -> LoadedVersion | LoadFailed:
    loading = Loading(LocalStore(root), "net", find_backend=find_backend, cores=cores, models=1, check=check)
    try:
        (found,) = load_model(loading).values()
    except LoadFailed as failure:
        return failure
    assert found is not None
    return found


def opened(root: Path, **more: Any) -> LoadedVersion:
    found = loaded(root, **more)
    assert isinstance(found, LoadedVersion), found
    return found


def refusal(root: Path) -> str:
    found = loaded(root)
    assert isinstance(found, LoadFailed), "it was loaded"
    assert str(root) not in found.reason
    return found.reason


@pytest.mark.parametrize("config", [None, BATCHED, BATCHED + TENSORS])
async def test_an_ir_file_is_checked_completed_and_served(tmp_path: Path, config: str | None) -> None:
    put(tmp_path, matmul(), config)
    async with serving(tmp_path, "none") as one:
        assert (await one.lines())["net", "1"] == ("READY", "")
        shown = (await one.client.get("/v2/models/net/config")).json()
        assert (shown["backend"], shown["default_model_filename"]) == ("openvino", "model.xml")
        assert shown["max_batch_size"] == (8 if config else 4)
        body = {"inputs": [{"name": "x", "shape": [2, 4], "datatype": "FP32", "data": [1, 0, 0, 0, 0, 0, 0, 1]}]}
        answer = (await one.client.post("/v2/models/net/infer", json=body)).json()
    (output,) = answer["outputs"]
    assert (output["name"], output["shape"], output["data"]) == ("y", [2, 3], [0, 1, 2, 9, 10, 11])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TENSORS.replace('"y"', '"z"'), "output[0].name: the model file has no output 'z', only y"),
        (TENSORS.replace("FP32", "INT32"), "input[0].data_type: the model file has TYPE_FP32"),
        (TENSORS.replace("[ 3 ]", "[ 4 ]"), "output[0].dims: [4] does not fit the model file's [3]"),
        ("instance_group { kind: KIND_GPU }", "OpenVINO models run on the CPU here: set KIND_CPU or KIND_AUTO"),
        ('parameters { key: "oriel.compile" value { string_value: "openvino" } }', "for models of backend"),
    ],
)
def test_a_configuration_that_the_model_contradicts_is_refused(tmp_path: Path, config: str, reason: str) -> None:
    put(tmp_path, matmul(), BATCHED + config)
    assert reason in refusal(tmp_path)


@pytest.mark.parametrize("name", ["y", "other"])
def test_a_tensor_with_several_names_may_be_called_by_any_of_them(tmp_path: Path, name: str) -> None:
    put(tmp_path, matmul(names=("y", "other")), BATCHED + TENSORS.replace('"y"', f'"{name}"'))
    (session,) = opened(tmp_path).sessions
    (found,) = session.run({"x": np.ones((1, 4), np.float32)}, [name])
    assert found.tolist() == [[18, 22, 26]]


def test_a_fixed_first_dimension_is_made_variable_for_a_batched_model(tmp_path: Path) -> None:
    put(tmp_path, matmul(rows=1), BATCHED + TENSORS)
    (session,) = opened(tmp_path).sessions
    (found,) = session.run({"x": np.ones((5, 4), np.float32)}, ["y"])
    assert found.shape == (5, 3)


SKIP = parameters(SKIP_OV_DYNAMIC_BATCHSIZE="YES")


def test_a_fixed_batch_is_filled_up_if_the_configuration_says_so(tmp_path: Path) -> None:
    put(tmp_path, matmul(rows=8), BATCHED + TENSORS + SKIP + parameters(ENABLE_BATCH_PADDING="yes"))
    (session,) = opened(tmp_path).sessions
    x = np.arange(20, dtype=np.float32).reshape(5, 4)
    (found,) = session.run({"x": x}, ["y"])
    assert found.tolist() == (x @ WEIGHTS).tolist()


def test_a_fixed_batch_that_is_not_filled_up_refuses_others(tmp_path: Path) -> None:
    put(tmp_path, matmul(rows=8), BATCHED + TENSORS + SKIP)
    (session,) = opened(tmp_path).sessions
    assert session.run({"x": np.ones((8, 4), np.float32)}, ["y"])[0].shape == (8, 3)
    with pytest.raises(InvalidRequest, match="takes batches of 8 rows only, and this one has 5"):
        session.run({"x": np.ones((5, 4), np.float32)}, ["y"])


def test_more_rows_than_a_fixed_batch_are_refused(tmp_path: Path) -> None:
    put(tmp_path, matmul(rows=4), BATCHED + TENSORS + SKIP)
    assert "max_batch_size: 8 is more than the 4 rows" in refusal(tmp_path)
    put(tmp_path / "free", matmul(), BATCHED + TENSORS + SKIP)
    assert "needs one fixed first dimension" in refusal(tmp_path / "free")


def test_inputs_get_the_shapes_of_the_configuration(tmp_path: Path) -> None:
    x = named(op.parameter([1, 3, 8, 8], ov.Type.f32, name="x"), "x")
    relu = ov.Model([op.result(named(op.relu(x), "y"))], [x], "relu")
    tensors = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ -1, 3, -1, -1 ] } ] '
    tensors += 'output [ { name: "y" data_type: TYPE_FP32 dims: [ -1, 3, -1, -1 ] } ]'
    put(tmp_path, relu, IR + tensors)
    assert "input[0].dims: [-1, 3, -1, -1] does not fit the model file's [1, 3, 8, 8]" in refusal(tmp_path)
    put(tmp_path / "reshaped", relu, IR + tensors + parameters(RESHAPE_IO_LAYERS="yes"))
    (session,) = opened(tmp_path / "reshaped").sessions
    assert session.run({"x": np.ones((2, 3, 5, 7), np.float32)}, ["y"])[0].shape == (2, 3, 5, 7)


def test_the_instances_of_a_model_share_what_is_compiled(tmp_path: Path) -> None:
    put(tmp_path, matmul(), BATCHED + "instance_group { count: 2 kind: KIND_CPU }")
    first, second = opened(tmp_path, cores=2).sessions
    assert first is not second and first._compiled is second._compiled  # type: ignore[attr-defined]
    assert first._compiled.get_property("NUM_STREAMS") == 2  # type: ignore[attr-defined]


def test_an_operator_that_openvino_lacks_is_refused_by_name(tmp_path: Path) -> None:
    put(tmp_path, matmul(), BATCHED)
    path = tmp_path / "net/1/model.xml"
    path.write_text(path.read_text().replace('type="MatMul" version="opset1"', 'type="Fancy" version="extension"'))
    reason = refusal(tmp_path)
    assert "OpenVINO does not have the operator Fancy: export the model to ONNX" in reason
    assert "docs/convert-to-onnx.md" in reason


def test_half_an_upload_is_refused_in_the_checking_process(tmp_path: Path) -> None:
    put(tmp_path, matmul(), BATCHED)
    path = tmp_path / "net/1/model.xml"
    path.write_text(path.read_text()[:200])
    pool = CheckPool(30)
    try:
        found = loaded(tmp_path, check=pool)
    finally:
        pool.close()
    assert isinstance(found, LoadFailed) and "OpenVINO cannot load model.xml" in found.reason
    assert str(tmp_path) not in found.reason


def test_numbers_beyond_32_bits_are_refused(tmp_path: Path) -> None:
    x = named(op.parameter([-1, 2], ov.Type.i64, name="x"), "x")
    put(tmp_path, ov.Model([op.result(named(op.add(x, x), "y"))], [x], "doubled"), None)
    (session,) = opened(tmp_path).sessions
    assert session.run({"x": np.array([[1, -2]])}, ["y"])[0].tolist() == [[2, -4]]
    with pytest.raises(OutsideProfile, match="beyond 32 bits"):
        session.run({"x": np.array([[1, 1 << 31]])}, ["y"])


def test_a_paddle_program_is_served(tmp_path: Path) -> None:
    (models.put(tmp_path, "net", None, None) / "1/model.pdmodel").write_bytes(PADDLE)
    (session,) = opened(tmp_path).sessions
    assert session.run({"x": np.array([[-1, 2, -3, 4]], np.float32)}, ["y"])[0].tolist() == [[0, 2, 0, 4]]


def test_texts_pass_through_a_model(tmp_path: Path) -> None:
    x = named(op.parameter([-1, 2], ov.Type.string, name="x"), "x")
    first = named(op.gather(x, op.constant(np.array([0])), op.constant(np.int64(1))), "y")
    put(tmp_path, ov.Model([op.result(first)], [x], "first"), None)
    version = opened(tmp_path)
    assert [each.datatype for each in (*version.spec.inputs, *version.spec.outputs)] == ["BYTES", "BYTES"]
    texts = np.array([[b"b\xc3\xa4r", b"x"], [b"", b"y"]], object)
    (found,) = version.sessions[0].run({"x": texts}, ["y"])
    assert found.tolist() == [[b"b\xc3\xa4r"], [b""]]
    long = np.array([[b"x" * (1 << 20), b""]] * 64, object)
    with pytest.raises(InvalidRequest, match="128 texts of up to 1048576 bytes, more than 67108864"):
        version.sessions[0].run({"x": long}, ["y"])


def test_a_model_without_dimensions_is_shown_as_one_element(tmp_path: Path) -> None:
    x = named(op.parameter([], ov.Type.f32, name="x"), "x")
    put(tmp_path, ov.Model([op.result(named(op.add(x, x), "y"))], [x], "scalar"), None)
    version = opened(tmp_path)
    assert [(each.dims, each.engine_dims) for each in version.spec.inputs] == [((1,), ())]
    assert version.sessions[0].run({"x": np.array(3, np.float32)}, ["y"])[0].shape == ()


def test_an_onnx_file_may_be_named_as_the_model_file(tmp_path: Path) -> None:
    config = IR + 'default_model_filename: "model.onnx"'
    models.put(tmp_path, "net", models.double(), config)
    (session,) = opened(tmp_path).sessions
    assert session.provider == "OpenVINO"
    assert session.run({"x": np.ones((1, 4), np.float32)}, ["y"])[0].tolist() == [[2, 2, 2, 2]]


def test_an_input_that_is_left_out_is_not_that_of_the_caller_before(tmp_path: Path) -> None:
    x, bias = (named(op.parameter([-1, 4], ov.Type.f32, name=name), name) for name in ("x", "bias"))
    config = BATCHED + TENSORS.replace("[ 3 ]", "[ 4 ]")
    config += 'input [ { name: "bias" optional: true data_type: TYPE_FP32 dims: [ 4 ] } ]'
    put(tmp_path, ov.Model([op.result(named(op.add(x, bias), "y"))], [x, bias], "sum"), config)
    (session,) = opened(tmp_path).sessions
    ones = np.ones((1, 4), np.float32)
    assert session.run({"x": ones, "bias": 76 * ones}, ["y"])[0].tolist() == [[77] * 4]
    with pytest.raises(InvalidRequest, match="input 'bias' is missing"):
        session.run({"x": ones}, ["y"])


@pytest.mark.parametrize("operator", ["GatherND", "ScatterElementsUpdate"])
def test_no_index_reaches_out_of_its_tensor(tmp_path: Path, operator: str) -> None:
    at = named(op.parameter([-1, 1], ov.Type.i32, name="at"), "at")
    table = op.constant(np.arange(8, dtype=np.float32))
    if operator == "GatherND":
        found, expected = op.gather_nd(table, at), [0, 7, 7, 0, 7]
    else:
        new, axis = op.constant(np.full(5, 9, np.float32)), op.constant(np.int64(0))
        found = op.scatter_elements_update(table, op.reshape(at, [-1], False), new, axis)
        expected = [9, 1, 2, 3, 4, 5, 6, 9]
    put(tmp_path, ov.Model([op.result(named(found, "y"))], [at], "at"), None)
    (session,) = opened(tmp_path).sessions
    for far in (8, 1 << 30):  # eight numbers further, or in memory that nobody has
        indices = np.array([[0], [far], [-1], [-far - 1], [7]], np.int32)
        assert session.run({"at": indices}, ["y"])[0].tolist() == expected


def looked_up(operator: str, at: Any) -> tuple[Any, list[float]]:
    """Return an operator that finds numbers in a table, and what it finds at 9, -(1 << 20), and 2."""
    table = op.constant(np.arange(4, dtype=np.float32))
    column = op.constant(np.arange(4, dtype=np.float32).reshape(4, 1))
    if operator == "GatherElements":
        return op.gather_elements(table, at, 0), [3, 0, 2]
    if operator == "EmbeddingBagOffsets":
        start = op.constant(np.arange(3, dtype=np.int32))
        return op.reshape(op.embedding_bag_offsets_sum(column, at, start), [-1], False), [3, 0, 2]
    if operator == "EmbeddingBagPacked":
        packed = op.embedding_bag_packed_sum(column, op.reshape(at, [3, 1], False))
        return op.reshape(packed, [-1], False), [3, 0, 2]
    if operator == "EmbeddingSegmentsSum":
        segments = op.constant(np.arange(3, dtype=np.int32))
        found = op.embedding_segments_sum(column, at, segments, op.constant(np.int32(3)))
        return op.reshape(found, [-1], False), [3, 0, 2]
    if operator == "ROIAlign":
        images = op.reshape(table, [4, 1, 1, 1], False)
        places = op.constant(np.tile(np.array([0, 0, 1, 1], np.float32), (3, 1)))
        return op.reshape(op.roi_align(images, places, at, 1, 1, 1, 1.0, "avg"), [-1], False), [3, 0, 2]
    inner, name = op.parameter([-1], ov.Type.i32), ov.Type.i32
    found = op.gather_elements(table, inner, 0)
    if operator == "If":
        branch = op.if_op(op.greater(op.reduce_max(at, op.constant([0]), False), op.constant(np.int32(-5))))
        other = op.parameter([-1], name)
        then = ov.Model([op.result(found)], [inner], "then")
        otherwise = ov.Model([op.result(op.gather_elements(op.negative(table), other, 0))], [other], "else")
        branch.set_then_body(then)
        branch.set_else_body(otherwise)
        branch.set_input(at.output(0), inner, other)
        made = branch.set_output(then.results[0], otherwise.results[0])
    else:
        go_on = op.result(op.constant(np.array(True)))
        body = ov.Model([op.result(found), go_on], [op.parameter([], name), inner], "body")
        loop = op.loop(op.constant(np.int32(1)), op.constant(np.array(True)))
        loop.set_function(body)
        loop.set_special_body_ports([0, 1])
        loop.set_invariant_input(inner, at.output(0))
        made = loop.get_iter_value(body.results[0].output(0), -1)
    return op.add(made, op.constant(np.float32(0))), [3, 0, 2]


@pytest.mark.parametrize(
    "operator",
    [
        "GatherElements",
        "EmbeddingBagOffsets",
        "EmbeddingBagPacked",
        "EmbeddingSegmentsSum",
        "ROIAlign",
        "If",
        "Loop",
    ],
)
def test_index_outside_of_a_table_does_not_find_the_caller_before(tmp_path: Path, operator: str) -> None:
    at = named(op.parameter([-1], ov.Type.i32, name="at"), "at")
    found, expected = looked_up(operator, at)
    put(tmp_path, ov.Model([op.result(named(found, "y"))], [at], "at"), None)
    (session,) = opened(tmp_path).sessions
    session.run({"at": np.array([0, 1, 1], np.int32)}, ["y"])
    assert session.run({"at": np.array([9, -(1 << 20), 2], np.int32)}, ["y"])[0].tolist() == expected


def test_bags_whose_lengths_come_from_clients_are_refused(tmp_path: Path) -> None:
    at, start = (named(op.parameter([-1], ov.Type.i32, name=name), name) for name in ("at", "start"))
    found = op.embedding_bag_offsets_sum(op.constant(np.ones((4, 1), np.float32)), at, start)
    put(tmp_path, ov.Model([op.result(named(found, "y"))], [at, start], "bag"), None)
    assert "leaves a bag without entries as the caller before had it" in refusal(tmp_path)


def test_largest_of_too_few_numbers_are_not_those_of_the_caller_before(tmp_path: Path) -> None:
    x = named(op.parameter([-1, -1], ov.Type.f32, name="x"), "x")
    most = op.topk(x, op.constant(2), -1, "max", "value")
    named(most, "y")
    put(tmp_path, ov.Model([op.result(most.output(0))], [x], "topk"), None)
    (session,) = opened(tmp_path).sessions
    assert session.run({"x": np.array([[76, 77, 78]], np.float32)}, ["y"])[0].tolist() == [[78, 77]]
    assert session.run({"x": np.array([[1]], np.float32)}, ["y"])[0].tolist() == [[1]]


def test_an_empty_input_is_refused_for_it_would_get_the_answer_before(tmp_path: Path) -> None:
    x = named(op.parameter([-1, 1, -1], ov.Type.f32, name="x"), "x")
    y = op.convolution(x, op.constant(np.ones((1, 1, 1), np.float32)), [1], [1], [1], [1])
    put(tmp_path, ov.Model([op.result(named(y, "y"))], [x], "conv"), None)
    (session,) = opened(tmp_path).sessions
    session.run({"x": np.full((1, 1, 4), 7, np.float32)}, ["y"])
    with pytest.raises(OutsideProfile, match="input 'x' is empty"):
        session.run({"x": np.empty((1, 1, 0), np.float32)}, ["y"])


def test_weights_are_read_and_not_mapped(tmp_path: Path) -> None:
    put(tmp_path, matmul(), None)
    store = LocalStore(tmp_path, max_copy_bytes=0)  # as large models are opened
    (found,) = load_model(Loading(store, "net", find_backend=find_backend, cores=1, models=1)).values()
    assert isinstance(found, LoadedVersion)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(encoding="utf-8")


def test_sequences_have_their_states_and_controls_also_in_an_ensemble(tmp_path: Path) -> None:
    names = ("INPUT", "STATE_IN", "START", "READY", "END")
    types = {**dict.fromkeys(names, ov.Type.i32), "CORRID": ov.Type.i64}
    given = [named(op.parameter([-1, 1], kind, name=name), name) for name, kind in types.items()]
    total = named(op.add(given[0], given[1]), "STATE_OUT")
    seen = named(op.concat([total, *given[2:5], op.convert(given[5], "i32")], 1), "OUTPUT")
    one = '"OUTPUT" data_type: TYPE_INT32 dims: [ 1 ]'
    tensors = OF_SEQUENCES.replace(one, one.replace("[ 1 ]", "[ 5 ]"))
    state = STATE % 'initial_state { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true name: "zero" }'
    batching = f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {FLAGS} {CORRID} {state} }}"
    put(tmp_path, ov.Model([op.result(seen), op.result(total)], given, "sum"), BATCHED + tensors + batching)
    step = ensembles.scheduled([("net", {"INPUT": "INPUT"}, {"OUTPUT": "OUTPUT"})])
    ensembles.put(
        tmp_path, "steps", f'platform: "ensemble" max_batch_size: 8 {tensors} ensemble_scheduling {{ {step} }}'
    )
    with unit_in_thread(settings_of(tmp_path)) as unit:
        for name in ("net", "steps"):
            with Client(tritonclient.http, f"127.0.0.1:{unit.http_port}", name) as client:
                assert [client.row(7, 1, start=True), client.row(8, 10, start=True)] == [
                    [1, 1, 1, 0, 7],
                    [10, 1, 1, 0, 8],
                ]
                assert [client.row(7, 2), client.row(8, 20)] == [[3, 0, 1, 0, 7], [30, 0, 1, 0, 8]]
                assert client.row(7, 3, end=True) == [6, 0, 1, 1, 7]
                with pytest.raises(InferenceServerException, match="must specify the START flag"):
                    client.row(7, 4)
