"""PyTorch programs as far as they are judged without PyTorch: forms of files, names, parameters, refusals."""

import os
import random
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from oriel_inference.backends import Backend, Session, find_backend
from oriel_inference.backends.pytorch import process
from oriel_inference.backends.pytorch.form import Form, form_of
from oriel_inference.backends.pytorch.lane import ALIGN, Block, arrange
from oriel_inference.backends.pytorch.names import Unfit, positions
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import EngineOptions, Gpu
from oriel_inference.repository.load import Loading, load_model
from oriel_inference.stores.local import LocalStore

from . import pytorch_files as files


@pytest.mark.parametrize(
    ("names", "form"),
    [(files.SCRIPT, Form.TORCHSCRIPT), (files.EXPORTED, Form.EXPORTED), (files.COMPILED, Form.COMPILED)],
)
def test_form_follows_from_the_contents(tmp_path: Path, names: tuple[str, ...], form: Form) -> None:
    assert form_of(files.archive(tmp_path / "net/1/model.pt", names)) is form


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (files.STATE_DICT, "net/1/model.pt is a pickle of torch.save, which is code and never loaded"),
        (files.OLD_EXPORT, "net/1/model.pt holds its weights as a pickle, as torch before 2.8 wrote them"),
        ((*files.EXPORTED, "m/data/constants/opaque_obj_0"), "net/1/model.pt holds pickled Python objects"),
        (("readme.txt",), "net/1/model.pt is a zip, but not of torch.jit.save or torch.export.save"),
    ],
)
def test_archive_that_is_no_program_is_refused(tmp_path: Path, names: tuple[str, ...], text: str) -> None:
    with pytest.raises(LoadFailed, match=text):
        form_of(files.archive(tmp_path / "net/1/model.pt", names))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (files.OLD_PICKLE, "net/1/model.pt is a pickle, which is code and never loaded"),
        (b"", "net/1/model.pt is not a file of torch.jit.save"),
        (b"\x7fELF", "net/1/model.pt is not a file of torch.jit.save"),
        (b"PK\x03\x04", "net/1/model.pt is cut off or damaged"),
    ],
)
def test_file_that_is_no_archive_is_refused(tmp_path: Path, data: bytes, text: str) -> None:
    path = files.archive(tmp_path / "net/1/model.pt", ())
    path.write_bytes(data)
    with pytest.raises(LoadFailed, match=text):
        form_of(path)


def test_archive_that_is_much_larger_in_memory_is_refused(tmp_path: Path) -> None:
    path = files.archive(tmp_path / "net/1/model.pt", files.SCRIPT)
    assert form_of(path) is Form.TORCHSCRIPT
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("net/constants/1", bytes(1 << 20))
    with pytest.raises(LoadFailed, match=r"net/1/model.pt takes 10\d{5} bytes of memory, PyTorch does not compress"):
        form_of(path)


def test_archive_with_a_very_long_directory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = files.archive(tmp_path / "net/1/model.pt", files.SCRIPT)
    with zipfile.ZipFile(path, "a") as archive:
        for number in range(200):
            archive.writestr(f"net/{number:060000}", b"")
    with pytest.raises(LoadFailed, match="net/1/model.pt has a directory of more than 8388608 bytes"):
        form_of(path)


def test_damaged_archive_is_refused_or_read_and_never_anything_else(tmp_path: Path) -> None:
    path = files.archive(tmp_path / "net/1/model.pt", files.SCRIPT)
    whole, chance = path.read_bytes(), random.Random(5)
    for _ in range(500):
        data = bytearray(whole[: chance.randrange(len(whole) + 1)] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(8)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            assert form_of(path) in Form
        except LoadFailed as failure:
            assert failure.reason.startswith("net/1/model.pt")


def test_module_with_pickled_weights_beside_it_is_refused(tmp_path: Path) -> None:
    path = files.archive(tmp_path / "net/1/model.pt", files.STATE_DICT).with_name("model.py")
    path.write_text("import os\nos._exit(3)\n")
    with pytest.raises(LoadFailed, match="net/1/model.pt beside model.py would hold weights as a pickle"):
        form_of(path)
    path.with_suffix(".pt").unlink()
    assert form_of(path) is Form.MODULE


@pytest.mark.parametrize(
    ("names", "own", "found"),
    [
        (("INPUT__0", "INPUT__1"), (), [0, 1]),
        (("b__1", "a__0"), (), [1, 0]),
        (("y", "x"), ("x", "y"), [1, 0]),
        (("left", "right"), ("x", "y"), [0, 1]),
        (("left__0", "right"), ("x", "y"), [0, 1]),
        (("ARGS[1]", "ARGS[0]"), ("ARGS[0]", "ARGS[1]"), [1, 0]),
        (("x__0__1", "x__0"), (), [0, 1]),
    ],
)
def test_positions_follow_names_as_in_triton(names: tuple[str, ...], own: tuple[str, ...], found: list[int]) -> None:
    assert positions(names, own, "input") == found


def test_positions_that_clash_or_are_left_out_are_refused() -> None:
    with pytest.raises(Unfit, match="input 'a__1' has the index of another input: number them"):
        positions(("a__1", "b__1"), (), "input")
    with pytest.raises(Unfit, match="no input has the position 0"):
        positions(("a__1", "b__2"), (), "input")
    assert positions(("a__1", "b__2"), (), "output") == [1, 2]


def test_tensors_of_a_batch_begin_at_aligned_positions() -> None:
    found, size = arrange([((3,), 3), ((), 0), ((2, 8), 64)])
    assert found == [((3,), 0), ((), ALIGN), ((2, 8), ALIGN)] and size == 2 * ALIGN


def test_block_keeps_what_it_holds_when_it_grows_and_never_shrinks() -> None:
    block = Block()
    block.memory(10)[:3] = b"abc"
    there = block.memory(10_000)
    assert there[:3] == b"abc" and len(there) >= 10_000
    with pytest.raises(PermissionError):
        os.ftruncate(block.descriptor, 0)


class _Recorded(Backend):
    """Records how it is called, and opens nothing."""

    name = "pytorch"
    apart = True

    def __init__(self, gpus: int = 0) -> None:
        self.calls: list[tuple[Path, EngineOptions]] = []
        self._gpus = [Gpu(number=number, capability="9.0") for number in range(gpus)]

    def gpus(self) -> Sequence[Gpu]:
        return self._gpus

    def open(self, path: Path, options: EngineOptions) -> Session:
        self.calls.append((path, options))
        raise LoadFailed("recorded")


def options_of(root: Path, gpus: int = 0) -> EngineOptions:
    recorded = _Recorded(gpus)
    failure = load_model(Loading(LocalStore(root), "net", find_backend=lambda _: recorded, cores=4, models=1))[1]
    assert isinstance(failure, LoadFailed) and failure.reason == "recorded", failure
    return recorded.calls[0][1]


def reason_of(root: Path, *, trusted: bool = True) -> str:
    store = LocalStore(root, runs_code=trusted)
    failure = load_model(Loading(store, "net", find_backend=find_backend, cores=1, models=1))[1]
    assert isinstance(failure, LoadFailed)
    return failure.reason


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'


def test_parameters_of_triton_reach_the_process(tmp_path: Path) -> None:
    text = 'platform: "pytorch_libtorch" max_batch_size: 8' + files.TENSORS
    text += parameter("INFERENCE_MODE", "false") + parameter("DISABLE_OPTIMIZED_EXECUTION", "true")
    text += parameter("INTRA_OP_THREAD_COUNT", "3") + parameter("INTER_OP_THREAD_COUNT", "2")
    found = options_of(files.folder(tmp_path, text))
    assert (found.intra_op_threads, found.inter_op_threads) == (3, 2)
    assert (
        found.session_entries["INFERENCE_MODE"] == "0" and found.session_entries["DISABLE_OPTIMIZED_EXECUTION"] == "1"
    )
    assert [(each.name, each.datatype, each.shape) for each in (*found.inputs, *found.outputs)] == [
        ("INPUT__0", "FP32", (-1, 4)),
        ("OUTPUT__0", "FP32", (-1, 2)),
    ]


@pytest.mark.parametrize(
    ("config", "names", "file"),
    [
        ('platform: "pytorch_libtorch"', files.SCRIPT, "model.pt"),
        ('platform: "libtorch"', files.SCRIPT, "model.pt"),
        ('backend: "pytorch"', files.SCRIPT, "model.pt"),
        ("", files.SCRIPT, "model.pt"),
        ('platform: "torch_aoti"', files.COMPILED, "model.pt2"),
        ('backend: "pytorch" platform: "torch_aoti"', files.COMPILED, "model.pt2"),
        ('backend: "pytorch"', files.EXPORTED, "model.pt2"),
        ('backend: "pytorch" default_model_filename: "net.pt"', files.SCRIPT, "net.pt"),
        ('backend: "pytorch" runtime: "model.py"', (), "model.py"),
        ('backend: "pytorch" runtime: "model.py"', files.SCRIPT, "model.pt"),
    ],
)
def test_folder_of_each_form_is_found(tmp_path: Path, config: str, names: tuple[str, ...], file: str) -> None:
    files.folder(tmp_path, config + files.TENSORS, names, file)
    recorded = _Recorded()
    load_model(Loading(LocalStore(tmp_path), "net", find_backend=lambda _: recorded, cores=4, models=1))
    assert [path.name for path, _ in recorded.calls] == [file]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("", "input: is missing: a PyTorch file does not describe its tensors, name them in config.pbtxt"),
        (
            files.TENSORS.replace("TYPE_FP32 dims: [ 4 ]", "TYPE_STRING dims: [ 4 ]"),
            "input[0].data_type: is TYPE_STRING",
        ),
        (files.TENSORS + parameter("INFERENCE_MODE", "perhaps"), "parameters['INFERENCE_MODE']: must be 0 or 1"),
        (files.TENSORS + parameter("INTRA_OP_THREAD_COUNT", "-1"), "parameters['INTRA_OP_THREAD_COUNT']"),
        (files.TENSORS + parameter("MODEL_INIT_LIBRARY", "/x.so"), "would load a library"),
        (files.TENSORS + "instance_group { kind: KIND_GPU }", "PyTorch finds no GPU here"),
    ],
)
def test_configuration_that_cannot_serve_is_refused(tmp_path: Path, config: str, text: str) -> None:
    root = files.folder(tmp_path, 'backend: "pytorch"' + config)
    try:
        reason = reason_of(root)
    except ConfigInvalid as failure:
        reason = failure.reason
    assert text in reason


def test_instance_on_a_gpu_is_given_its_number(tmp_path: Path) -> None:
    text = 'backend: "pytorch"' + files.TENSORS + "instance_group { kind: KIND_GPU gpus: [ 1 ] }"
    ((provider, given),) = options_of(files.folder(tmp_path, text), gpus=2).providers
    assert provider == "CUDAExecutionProvider" and given == {"device_id": "1"}


def test_program_of_a_store_that_others_write_to_is_refused(tmp_path: Path) -> None:
    root = files.folder(tmp_path, 'backend: "pytorch"' + files.TENSORS)
    assert "PyTorch programs run only from a folder of this machine" in reason_of(root, trusted=False)


def test_parameters_without_effect_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = 'backend: "pytorch"' + files.TENSORS + parameter("ENABLE_NVFUSER", "true")
    options_of(files.folder(tmp_path, text))
    assert "parameters['ENABLE_NVFUSER'] has no effect here" in caplog.text


def test_missing_pytorch_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    root = files.folder(tmp_path, 'backend: "pytorch"' + files.TENSORS)
    assert reason_of(root) == "PyTorch is not installed: pip install 'oriel-serving[torch]'"
