import os
from pathlib import Path

import numpy as np
import pytest
from fake_backend import FakeBackend

from oriel_inference.backends import Backend, find_backend
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import TensorInfo
from oriel_inference.repository.config import MAX_FALLBACKS, fallback_versions, parse, select_versions
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.repository.outline import read_outline
from oriel_inference.stores.local import LocalStore

from . import models

FILE = "double/config.pbtxt"


def load(root: Path, name: str = "double", *, cores: int = 2, count: int = 1) -> dict[int, LoadedVersion | LoadFailed]:
    return load_model(Loading(LocalStore(root), name, find_backend=find_backend, cores=cores, models=count))


def loaded(root: Path, name: str = "double", **options: int) -> LoadedVersion:
    (version,) = load(root, name, **options).values()
    assert isinstance(version, LoadedVersion), version
    return version


def refusal(root: Path, name: str = "double") -> str:
    try:
        (version,) = load(root, name).values()
    except LoadFailed as failure:
        version = failure
    assert isinstance(version, LoadFailed)
    assert str(root) not in version.reason and len(version.reason) <= 500
    return version.reason


# --- configuration ------------------------------------------------------------------------------------------------


def test_configured_model_loads_with_its_bounds(tmp_path: Path) -> None:
    config = models.DOUBLE + "dynamic_batching { preferred_batch_size: [ 4, 2 ] max_queue_delay_microseconds: 500 }"
    models.put(tmp_path, "double", models.double(), config)
    spec = loaded(tmp_path).spec
    assert spec.max_batch_size == 8
    assert spec.bounds is not None
    assert spec.bounds.preferred_rows == (2, 4) and spec.bounds.max_delay_s == pytest.approx(0.0005)


def test_batching_is_on_without_dynamic_batching_and_off_by_parameter(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    assert loaded(tmp_path).spec.bounds is not None
    off = models.DOUBLE + 'parameters { key: "oriel.batching" value { string_value: "off" } }'
    models.put(tmp_path, "double", config=off)
    assert loaded(tmp_path).spec.bounds is None


def test_spaces_around_the_value_of_a_parameter_say_nothing(tmp_path: Path) -> None:
    """Some parameters were read with them, and refused."""
    given = {"oriel.batching": " off ", "oriel.load": " demand", "intra_op_thread_count": "2 "}
    written = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in given.items()
    )
    models.put(tmp_path, "double", models.double(), models.DOUBLE + written)
    assert loaded(tmp_path).spec.bounds is None
    assert read_outline(LocalStore(tmp_path), "double").load == "demand"


def test_missing_configuration_is_completed_from_the_model_file(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double())
    version = loaded(tmp_path)
    assert version.spec.max_batch_size == 4 and version.spec.bounds is not None
    assert version.config.platform == "onnxruntime_onnx"
    assert [(t.name, t.datatype, t.dims) for t in version.spec.inputs] == [("x", "FP32", (4,))]


def test_model_without_variable_first_dimension_is_completed_unbatched(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(shape=(2, 4)))
    spec = loaded(tmp_path).spec
    assert spec.max_batch_size == 0 and spec.inputs[0].dims == (2, 4) and spec.bounds is None


def test_scalar_per_row_is_completed_with_a_reshape(tmp_path: Path) -> None:
    models.put(tmp_path, "lookup", models.lookup())
    (tensor,) = loaded(tmp_path, "lookup").spec.inputs
    assert tensor.dims == (1,) and tensor.engine_dims == ()


@pytest.mark.parametrize(
    ("config", "field", "reason"),
    [
        ('platform: "tensorrt_plan"', "backend", "TensorRT plans need TensorRT, which is not installed"),
        ('backend: "mlflow"', "backend", "'mlflow' is not supported, use one of onnxruntime, tensorrt, "),
        ("input [ { data_type: TYPE_FP32 dims: [ 4 ] } ]", "input[0].name", "missing"),
        ('input [ { name: "x" dims: [ 4 ] } ]', "input[0].data_type", "not a datatype"),
        ('input [ { name: "x" data_type: TYPE_FP32 } ]', "input[0].dims", "missing"),
        ('input [ { name: "x" data_type: TYPE_FP32 dims: [ 0 ] } ]', "input[0].dims", "positive"),
        ('input [ { name: "z" data_type: TYPE_FP32 dims: [ 4 ] } ]', "input[0].name", "has no input 'z'"),
        ('max_batch_size: 8 input [ { name: "x" data_type: TYPE_INT8 dims: [ 4 ] } ]', "input[0].data_type", "FP32"),
        ('max_batch_size: 8 input [ { name: "x" data_type: TYPE_FP32 dims: [ 5 ] } ]', "input[0].dims", "does not fit"),
        ('input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]', "input[0].dims", "does not fit"),
        ("max_batch_size: 4 dynamic_batching { preferred_batch_size: 8 }", "preferred_batch_size[0]", "between 1 and"),
        ("instance_group [ { count: 1000 } ]", "instance_group", "at most"),
        ('parameters { key: "oriel.batching" value { string_value: "maybe" } }', "oriel.batching", "on"),
    ],
)
def test_wrong_configuration_names_file_field_and_reason(tmp_path: Path, config: str, field: str, reason: str) -> None:
    models.put(tmp_path, "double", models.double(), config)
    text = refusal(tmp_path)
    assert text.startswith(FILE) or "backend" in text
    assert field in text and reason in text


@pytest.mark.parametrize(
    ("policy", "versions"),
    [
        ("", [12]),
        ("version_policy { latest { num_versions: 2 } }", [3, 12]),
        ("version_policy { all { } }", [1, 3, 12]),
        ("version_policy { specific { versions: [ 3, 1 ] } }", [1, 3]),
    ],
)
def test_version_policies(policy: str, versions: list[int]) -> None:
    assert select_versions(parse(policy, FILE), [1, 3, 12], FILE) == (versions, [])


def test_versions_that_the_policy_names_and_nobody_wrote(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The others serve, as in Triton; none at all is refused, naming them."""
    policy = "version_policy { specific { versions: [ 1, 2, 7 ] } }"
    models.put(tmp_path, "double", models.double(), models.DOUBLE + policy)
    assert list(load(tmp_path)) == [1]
    assert f"{FILE}: version_policy.specific: versions 2, 7 have no folder" in caplog.text
    with pytest.raises(ConfigInvalid, match="versions 1, 2, 7 have no folder"):
        select_versions(parse(policy, FILE), [3], FILE)
    with pytest.raises(ConfigInvalid, match="version 7 has no folder"):
        select_versions(parse("version_policy { specific { versions: 7 } }", FILE), [1], FILE)
    named = " ".join(f"versions: {number}" for number in range(1, 1000))
    many = parse(f"version_policy {{ specific {{ {named} }} }}", FILE)
    with pytest.raises(ConfigInvalid, match="7, 8 and 991 more have no folder"):
        select_versions(many, [1000], FILE)


# --- loading ------------------------------------------------------------------------------------------------------


def test_broken_file_is_refused_without_its_place_on_disk(tmp_path: Path) -> None:
    models.put(tmp_path, "double", config=models.DOUBLE)
    (tmp_path / "double/1/model.onnx").write_bytes(b"not a model")
    assert "model.onnx" in refusal(tmp_path)


def test_missing_file_and_missing_versions_are_told_apart(tmp_path: Path) -> None:
    models.put(tmp_path, "double", config=models.DOUBLE)
    assert refusal(tmp_path) == "double/1/model.onnx is missing"
    os.rmdir(tmp_path / "double/1")
    assert "has no version folder (1, 2, ...): make a folder 1 there with its model files" in refusal(tmp_path)


def test_one_broken_version_leaves_the_others(tmp_path: Path) -> None:
    config = models.DOUBLE + "version_policy { all { } }"
    models.put(tmp_path, "double", models.double(), config)
    models.put(tmp_path, "double", version=2)
    versions = load(tmp_path)
    assert isinstance(versions[1], LoadedVersion) and isinstance(versions[2], LoadFailed)


def test_execution_provider_that_is_not_there_fails_the_load_by_name(tmp_path: Path) -> None:
    config = models.DOUBLE + 'parameters { key: "oriel.execution_provider" value { string_value: "MoonProvider" } }'
    models.put(tmp_path, "double", models.double(), config)
    assert refusal(tmp_path) == (
        "double/config.pbtxt: parameters['oriel.execution_provider']: "
        "execution provider 'MoonProvider' is not available, only CPUExecutionProvider"
    )


def test_provider_in_use_is_what_the_runtime_says(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    assert [session.provider for session in loaded(tmp_path).sessions] == ["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("group", "cores", "count", "units"),
    [("", 8, 1, 8), ("", 8, 3, 4), ("", 1, 3, 1), ("instance_group [ { count: 4 } ]", 8, 1, 2)],
)
def test_default_threads_let_all_instances_run_within_the_cores(
    tmp_path: Path, group: str, cores: int, count: int, units: int
) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE + group)
    version = loaded(tmp_path, cores=cores, count=count)
    assert version.units == units
    assert version.units * version.spec.instances <= max(cores, version.spec.instances)


def test_versions_that_serve_at_once_share_the_cores(tmp_path: Path) -> None:
    """100 versions of one model once had a thread pool of all cores each."""
    models.put(tmp_path, "double", models.double(), models.DOUBLE + "version_policy { all { } }")
    models.put(tmp_path, "double", models.double(), version=2)
    found = load(tmp_path, cores=8).values()
    assert [version.units for version in found if isinstance(version, LoadedVersion)] == [4, 4]


def test_threads_of_the_configuration_win(tmp_path: Path) -> None:
    config = models.DOUBLE + 'parameters { key: "intra_op_thread_count" value { string_value: "3" } }'
    models.put(tmp_path, "double", models.double(), config)
    assert loaded(tmp_path, cores=8).units == 3


def test_sessions_are_closed_when_a_later_check_fails(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), 'input [ { name: "other" data_type: TYPE_FP32 dims: [ 1 ] } ]')
    info = TensorInfo(name="x", datatype="FP32", shape=(-1, 4))
    backend = FakeBackend((info,), (info,))

    def fake(_: str) -> Backend:
        return backend

    versions = load_model(Loading(LocalStore(tmp_path), "double", find_backend=fake, cores=2, models=1))
    assert isinstance(versions[1], LoadFailed)
    assert all(session.closed for session in backend.sessions)


# --- nothing outside the root -------------------------------------------------------------------------------------


def test_links_that_leave_the_repository_are_refused(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    models.put(outside, "double", models.double(), models.DOUBLE)
    (root / "double").symlink_to(outside / "double")
    assert refusal(root).startswith("double/config.pbtxt leads out of the model repository: links must stay inside it")


@pytest.mark.parametrize("what", ["1", "1/model.onnx", "config.pbtxt"])
def test_links_below_a_model_are_refused_too(tmp_path: Path, what: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    models.put(root, "double", models.double(), models.DOUBLE)
    outside.mkdir()
    (root / "double" / what).rename(outside / "moved")
    (root / "double" / what).symlink_to(outside / "moved")
    assert "leads out of the model repository" in refusal(root)


def test_weights_linked_from_outside_are_refused_before_the_runtime_opens_them(tmp_path: Path) -> None:
    root, secret = tmp_path / "root", tmp_path / "secret"
    secret.write_bytes(b"x")
    models.put(root, "double", models.double(), models.DOUBLE)
    (root / "double/1/weights.bin").symlink_to(secret)
    assert "weights.bin leads out" in refusal(root)


def test_links_inside_the_repository_are_fine(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    (tmp_path / "double/1").rename(tmp_path / "double/..data")
    (tmp_path / "double/1").symlink_to("..data")
    assert loaded(tmp_path)


@pytest.mark.parametrize("filename", ["../secret.onnx", "/etc/passwd", "a/../../b", "a\\0b"])
def test_file_names_of_a_configuration_cannot_climb(tmp_path: Path, filename: str) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE + f'default_model_filename: "{filename}"')
    assert "stay inside the model's folder" in refusal(tmp_path) or "backend" in refusal(tmp_path)


def test_folders_whose_names_no_model_may_have_are_left_out(tmp_path: Path) -> None:
    for name in (".hidden", "with space", "ok", "x" * 129):
        (tmp_path / name).mkdir()
    assert LocalStore(tmp_path).models() == ["ok"]


def test_huge_configuration_is_not_read(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), "#" * (1 << 20) + "\n")
    assert "larger than" in refusal(tmp_path)


def test_a_model_may_be_a_folder_of_files(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    file = tmp_path / "double/1/model.onnx"
    data = file.read_bytes()
    file.unlink()
    file.mkdir()
    (file / "model.onnx").write_bytes(data)
    version = loaded(tmp_path)
    (y,) = version.sessions[0].run({"x": np.ones((1, 4), np.float32)}, ["y"])
    assert y.tolist() == [[2.0] * 4]


def test_configurations_say_what_tools_look_up(tmp_path: Path) -> None:
    models.put(tmp_path, "double", models.double(), models.DOUBLE)
    config = loaded(tmp_path).config
    (group,) = config.instance_group
    assert (group.name, group.count) == ("double_0", 1)
    assert config.version_policy.latest.num_versions == 1
    assert config.HasField("optimization")
    assert config.default_model_filename == "model.onnx"


@pytest.mark.parametrize(
    ("policy", "broken", "served"),
    [
        ("", {3}, {2}),
        ("", {2, 3}, {1}),
        ("", {1, 2, 3}, set()),
        ("latest { num_versions: 2 }", {3}, {1, 2}),
        ("latest { num_versions: 2 }", {2}, {1, 3}),
        ("latest { num_versions: 2 }", {1, 3}, {2}),
        ("specific { versions: [ 3 ] }", {3}, set()),
        ("specific { versions: [ 1, 3 ] }", {3}, {1}),
        ("all { }", {2}, {1, 3}),
    ],
)
def test_as_many_versions_work_as_were_asked_for_if_there_are_enough(
    tmp_path: Path, policy: str, broken: set[int], served: set[int]
) -> None:
    config = models.DOUBLE + (f"version_policy {{ {policy} }}" if policy else "")
    for version in (1, 2, 3):
        models.put(tmp_path, "double", models.double(), config, version)
    for version in broken:
        (tmp_path / f"double/{version}/model.onnx").write_bytes(b"junk")
    found = load(tmp_path)
    assert {version for version, each in found.items() if isinstance(each, LoadedVersion)} == served


def test_a_version_that_serves_needs_no_other_in_its_place(tmp_path: Path) -> None:
    """Its newer files are refused, and older versions are not tried: what serves goes on."""
    for version in (1, 2):
        models.put(tmp_path, "double", models.double(), models.DOUBLE, version)
    (tmp_path / "double/2/model.onnx").write_bytes(b"junk")
    store = LocalStore(tmp_path)
    found = load_model(Loading(store, "double", find_backend=find_backend, cores=2, models=1, have={2: "older files"}))
    assert list(found) == [2]


def test_how_many_older_versions_are_tried_has_a_bound() -> None:
    available = list(range(1, MAX_FALLBACKS + 10))
    tried = fallback_versions(parse("", FILE), available, available[-1:])
    assert tried == list(reversed(available))[1 : MAX_FALLBACKS + 1]
