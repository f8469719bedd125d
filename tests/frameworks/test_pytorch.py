"""PyTorch programs for real: `make test SUITE=frameworks`, in an environment of its own. Skipped without PyTorch."""

import asyncio
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from oriel_inference.app import open_unit
from oriel_inference.backends import find_backend
from oriel_inference.backends.pytorch.process import PyTorchSession, _spares, _usable_gpus
from oriel_inference.errors import BackendFailed, LoadFailed, ModelNotReady
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.settings import Settings
from oriel_inference.stores.local import LocalStore
from oriel_wire.observe.trace import ListSink

from .programs import (
    FOUR,
    ONE,
    TWO,
    Dictionary,
    Everything,
    Optional,
    Pair,
    Raising,
    Wide,
    exported,
    folder,
    quiet,
    script,
    tensors,
    torch,
)

BY_POSITION = tensors({"INPUT__0": FOUR, "INPUT__1": FOUR}, {"OUTPUT__0": TWO, "OUTPUT__1": ONE})
SINGLE = tensors({"x": FOUR}, {"y": FOUR})


@pytest.fixture(scope="module", autouse=True)
def spare() -> Iterator[None]:
    yield
    for started in _spares:
        started.stop()
    _spares.clear()


class Loads:
    """Loads models of a repository, and closes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._loaded: list[LoadedVersion] = []

    def __call__(self, name: str, cores: int = 2) -> LoadedVersion:
        loading = Loading(LocalStore(self.root), name, find_backend=find_backend, cores=cores, models=1)
        loaded = load_model(loading)[1]
        if isinstance(loaded, LoadFailed):
            raise loaded
        assert loaded is not None
        self._loaded.append(loaded)
        return loaded

    def reason(self, name: str) -> str:
        """Return why a model is refused."""
        with pytest.raises(LoadFailed) as caught:
            self(name)
        return caught.value.reason

    def close(self) -> None:
        for loaded in self._loaded:
            loaded.close()


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Loads]:
    loads = Loads(tmp_path)
    yield loads
    loads.close()


def numbers(rows: int, seed: int = 1, size: int = 4) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, size)).astype(np.float32)


def run(loaded: LoadedVersion, *arrays: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Run a batch whose inputs and outputs are in the order of the configuration."""
    inputs = {spec.name: array for spec, array in zip(loaded.spec.inputs, arrays, strict=True)}
    return loaded.sessions[0].run(inputs, [spec.name for spec in loaded.spec.outputs])


def session_of(loaded: LoadedVersion) -> PyTorchSession:
    session = loaded.sessions[0]
    assert isinstance(session, PyTorchSession)
    return session


def check_pair(loaded: LoadedVersion, *, swapped: bool = False) -> None:
    """Compare the answers for several sizes of batch with those of the module in this process."""
    module = Pair().eval()
    for rows in (1, 3, 64):
        x, y = numbers(rows), numbers(rows, 2)
        with torch.no_grad():
            expected = module(torch.from_numpy(x), torch.from_numpy(y))
        found = run(loaded, y, x) if swapped else run(loaded, x, y)
        for array, tensor in zip(found, expected, strict=True):
            assert array.dtype == np.float32 and array.flags.aligned
            np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-5, atol=1e-6)


def test_scripted_module_answers_as_in_one_process(load: Loads) -> None:
    script(load.root, "net", Pair(), BY_POSITION)
    loaded = load("net")
    check_pair(loaded)
    assert loaded.run_s is not None and loaded.spec.platform == "pytorch_libtorch" and loaded.spec.backend == "pytorch"
    assert loaded.spec.bounds is not None and loaded.units == 2


def test_traced_module_answers_as_in_one_process(load: Loads) -> None:
    path = folder(load.root, "net", f'backend: "pytorch" {BY_POSITION}')
    with quiet():
        torch.jit.trace(Pair().eval(), (torch.rand(2, 4), torch.rand(2, 4))).save(str(path))
    check_pair(load("net"))


def test_names_of_the_arguments_count_and_not_their_order(load: Loads) -> None:
    script(load.root, "net", Pair(), tensors({"y": FOUR, "x": FOUR}, {"left": TWO, "right": ONE}))
    check_pair(load("net"), swapped=True)


def test_dictionaries_go_in_and_come_out(load: Loads) -> None:
    script(load.root, "net", Dictionary(), tensors({"a": FOUR, "b": FOUR}, {"difference": FOUR, "sum": FOUR}))
    a, b = numbers(5), numbers(5, 2)
    difference, total = run(load("net"), a, b)
    assert np.array_equal(difference, a - b) and np.array_equal(total, a + b)


def test_optional_argument_may_be_left_out(load: Loads) -> None:
    config = SINGLE + f'input [ {{ name: "bias" optional: true data_type: {FOUR} }} ]'
    script(load.root, "net", Optional(), config)
    session, x = load("net").sessions[0], numbers(2)
    assert np.array_equal(session.run({"x": x}, ["y"])[0], x)
    assert np.array_equal(session.run({"x": x, "bias": x}, ["y"])[0], x + x)


@pytest.mark.parametrize(
    ("names", "results"),
    [(("ARGS[0]", "ARGS[1]"), ("RESULT[0]", "RESULT[1]")), (("INPUT__0", "INPUT__1"), ("OUTPUT__0", "OUTPUT__1"))],
)
def test_exported_program_answers_as_in_one_process(
    load: Loads, names: tuple[str, str], results: tuple[str, str]
) -> None:
    config = tensors(dict.fromkeys(names, FOUR), dict(zip(results, (TWO, ONE), strict=True)))
    path = folder(load.root, "net", f'platform: "torch_aoti" {config}', "model.pt2")
    torch.export.save(exported(Pair(), 4), path)
    check_pair(load("net"))


def test_exported_program_knows_its_arguments_by_name(load: Loads) -> None:
    config = tensors({"y": FOUR, "x": FOUR}, {"left": TWO, "right": ONE})
    torch.export.save(exported(Pair(), 4), folder(load.root, "net", f'backend: "pytorch" {config}', "model.pt2"))
    check_pair(load("net"), swapped=True)


@pytest.mark.parametrize("name", ["KWARGS[scale]", "KWARGSscale", "scale"])
def test_exported_program_takes_keywords_and_returns_a_dictionary(load: Loads, name: str) -> None:
    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"scaled": x * scale, "plain": x}

    first, plain, scaled = (
        ("x", "plain", "scaled") if name == "scale" else ("ARGS[0]", "RESULT[plain]", "RESULT[scaled]")
    )
    config = tensors({name: FOUR, first: FOUR}, {plain: FOUR, scaled: FOUR})
    free = torch.export.Dim("batch", min=1, max=1024)
    with quiet():
        program = torch.export.export(
            Scaled(),
            (torch.rand(2, 4),),
            {"scale": torch.rand(2, 4)},
            dynamic_shapes={"x": {0: free}, "scale": {0: free}},
        )
    torch.export.save(program, folder(load.root, "net", f'platform: "torch_aoti" {config}', "model.pt2"))
    scale, x = numbers(3), numbers(3, 2)
    found = run(load("net"), scale, x)
    assert np.array_equal(found[0], x) and np.allclose(found[1], x * scale)


def compiled(path: Path, program: torch.export.ExportedProgram) -> None:
    if not any(os.access(f"{each}/g++", os.X_OK) for each in os.environ["PATH"].split(":")):
        pytest.skip("compiling a package takes a C++ compiler")
    with quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def test_compiled_package_answers_as_in_one_process(load: Loads) -> None:
    path = folder(load.root, "net", f'platform: "torch_aoti" {BY_POSITION}', "model.pt2")
    compiled(path, exported(Pair(), 4))
    check_pair(load("net"))


def test_compiled_package_reads_nothing_outside_of_its_tensors(load: Loads) -> None:
    table, of_8 = torch.arange(20.0).reshape(10, 2), load.root / "of-8.pt2"
    compiled(of_8, torch.export.export(torch.nn.Embedding.from_pretrained(table).eval(), (torch.arange(8),)))

    def config(name: str, of: str, batch: int, x: str, y: str) -> None:
        text = f'platform: "torch_aoti" {tensors({"x": f"TYPE_{of} dims: {x}"}, {"y": f"TYPE_FP32 dims: {y}"}, batch)}'
        shutil.copy(of_8, folder(load.root, name, text, "model.pt2"))

    for name, of, batch, x, y, expected in (
        ("open", "INT64", 0, "[ -1 ]", "[ -1, 2 ]", "dim value at 0, expected: 8"),
        ("small", "INT64", 0, "[ 3 ]", "[ 8, 2 ]", "dim value at 0, expected: 8"),
        ("narrow", "INT32", 0, "[ 8 ]", "[ 8, 2 ]", "dtype, expected"),
        ("joined", "INT64", 64, "[ 1 ] reshape { shape: [ ] }", "[ 2 ]", "dim value at 0, expected: 8"),
    ):
        config(name, of, batch, x, y)
        assert f"compiled for other inputs (input_handles[0]: unmatched {expected}" in load.reason(name)
    config("net", "INT64", 0, "[ 8 ]", "[ 8, 2 ]")
    loaded = load("net")
    assert np.array_equal(run(loaded, np.arange(1, 9))[0], table.numpy()[1:9])
    with pytest.raises(BackendFailed, match="^index out of bounds: 0 <= .* < 10"):
        run(loaded, np.arange(3, 11))
    maps = Path(f"/proc/{session_of(loaded).program.pid}/maps").read_text().splitlines()
    libraries = [line for line in maps if "aotinductor" in line]
    assert libraries and all(line.endswith("(deleted)") for line in libraries), "the package stays unpacked"


def test_module_in_python_runs_without_weights_of_a_pickle(load: Loads) -> None:
    path = folder(load.root, "net", f'backend: "pytorch" runtime: "model.py" {SINGLE}', "model.py")
    path.write_text("import torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x * 3\n")
    x = numbers(3)
    assert np.array_equal(run(load("net"), x)[0], x * 3)


def test_every_datatype_goes_through_unchanged(load: Loads) -> None:
    for name in ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "FP16", "FP32", "FP64", "BF16"):
        each = f"TYPE_{name} dims: [ -1 ]"
        script(load.root, name.lower(), Everything(), tensors({"x": each}, {"y": each}))
        loaded = load(name.lower())
        dtype = {"BF16": np.uint16, "BOOL": np.bool_, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}.get(
            name, np.dtype(name.lower()) if "INT" in name else None
        )
        for size in (7, 0, 20_000):
            x = (np.arange(2 * size).reshape(2, size) % 2).astype(dtype)
            (y,) = run(loaded, x)
            assert y.dtype == x.dtype and np.array_equal(x, y)


def test_large_outputs_stay_as_they_are_when_further_batches_run(load: Loads) -> None:
    script(load.root, "net", Wide(), tensors({"x": "TYPE_FP32 dims: [ 5000 ]"}, {"y": "TYPE_FP32 dims: [ 80000 ]"}))
    loaded = load("net")
    batches = [numbers(1, seed, 5000) for seed in range(4)]
    answers = [run(loaded, each)[0] for each in batches]
    for batch, answer in zip(batches, answers, strict=True):
        assert np.array_equal(answer, np.tile(batch, 16))


def test_error_of_the_model_is_the_error_of_that_batch(load: Loads) -> None:
    script(load.root, "net", Raising(), SINGLE)
    loaded = load("net")
    with pytest.raises(BackendFailed, match="negative numbers are refused"):
        run(loaded, -np.ones((1, 4), np.float32))
    assert np.array_equal(run(loaded, np.ones((1, 4), np.float32))[0], np.full((1, 4), 2, np.float32))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (tensors({"x": FOUR}, {"a": TWO, "b": ONE}), "forward takes x, y, the configuration has 1 inputs"),
        (BY_POSITION.replace("OUTPUT__1", "OUTPUT__2"), "the model returns 2 outputs"),
        (
            BY_POSITION.replace(f"{TWO}", "TYPE_FP64 dims: [ 2 ]"),
            "is torch.float32, the configuration has torch.float64",
        ),
    ],
)
def test_configuration_that_does_not_fit_the_program_is_refused(load: Loads, config: str, text: str) -> None:
    script(load.root, "net", Pair(), config.replace('"x"', '"INPUT__0"'))
    assert text in load.reason("net")


class _Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_pickle_is_refused_and_nothing_of_it_runs(load: Loads, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    torch.save(_Bomb(mark), folder(load.root, "new", f'backend: "pytorch" {SINGLE}'))
    folder(load.root, "old", f'backend: "pytorch" {SINGLE}').write_bytes(pickle.dumps(_Bomb(mark)))
    assert "is a pickle of torch.save" in load.reason("new") and "is a pickle" in load.reason("old")
    assert not mark.exists()


def test_pickle_inside_an_exported_program_does_not_run(load: Loads, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    whole, path = tmp_path / "whole.pt2", folder(load.root, "net", f'backend: "pytorch" {BY_POSITION}', "model.pt2")
    torch.export.save(exported(Pair(), 4), whole)
    bomb = tmp_path / "bomb.pt"
    torch.save(_Bomb(mark), bomb)
    reader = torch._C.PyTorchFileReader(str(whole))
    writer = torch._C.PyTorchFileWriter(str(path))
    for name in reader.get_all_records():
        data = bomb.read_bytes() if name.endswith("sample_inputs/model.pt") else reader.get_record(name)
        if not name.startswith((".data/", "byteorder")):
            writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    assert "Weights only load failed" in load.reason("net") or not mark.exists()
    assert not mark.exists()


def test_file_that_is_cut_off_is_refused(load: Loads) -> None:
    path = script(load.root, "net", Pair(), BY_POSITION)
    path.write_bytes(path.read_bytes()[:-200])
    assert "net/1/model.pt is cut off or damaged" in load.reason("net")


def test_file_whose_code_is_damaged_is_refused(load: Loads) -> None:
    path = script(load.root, "net", Pair(), BY_POSITION)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"FB", b"ZZ")[: len(data)])
    at = data.index(b"data.pkl")
    path.write_bytes(data[: at + 64] + bytes(64) + data[at + 128 :])
    assert load.reason("net").startswith("net/1/model.pt: ")


LEAVES = "import os, torch\n{at_import}\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        {at_run}\n"


def leaving(root: Path, *, at_import: str = "", at_run: str = "return x", name: str = "net") -> None:
    path = folder(root, name, f'backend: "pytorch" runtime: "model.py" {SINGLE}', "model.py")
    path.write_text(LEAVES.format(at_import=at_import, at_run=at_run))


def test_program_that_ends_its_process_is_refused(load: Loads) -> None:
    leaving(load.root, at_import="os.abort()", name="loading")
    leaving(load.root, at_run="os._exit(7)", name="zeros")
    assert "crashes PyTorch: the process that opened it ended with code -6" in load.reason("loading")
    assert "crashes PyTorch: the process that opened it ended with code 7" in load.reason("zeros")


def test_process_that_ends_is_started_again_and_then_waits(load: Loads) -> None:
    leaving(load.root, at_run="return x if bool((x >= 0).all()) else os._exit(7)")
    loaded, fine = load("net"), np.ones((1, 4), np.float32)
    with pytest.raises(BackendFailed, match="died \\(exit code 7\\), it is started again"):
        run(loaded, -fine)
    assert np.array_equal(run(loaded, fine)[0], fine)
    for _ in range(2):
        with pytest.raises(BackendFailed, match="died"):
            run(loaded, -fine)
    with pytest.raises(ModelNotReady, match="has died again, and is started again in"):
        run(loaded, fine)


def test_error_in_python_code_keeps_its_text_to_itself(load: Loads) -> None:
    leaving(load.root, at_run="raise ValueError('the password is 1234')")
    with pytest.raises(BackendFailed) as caught:
        run(load("net"), np.ones((1, 4), np.float32))
    assert str(caught.value) == "the model's code failed"


def test_instances_share_one_process_and_its_weights(load: Loads) -> None:
    class Heavy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.weights = torch.nn.Parameter(torch.ones(25 << 20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.weights[0]

    script(load.root, "one", Heavy(), SINGLE + "instance_group { count: 1 kind: KIND_CPU }")
    script(load.root, "two", Heavy(), SINGLE + "instance_group { count: 2 kind: KIND_CPU }")
    memory = []
    for name in ("one", "two"):
        loaded = load(name)
        with ThreadPoolExecutor(2) as threads:
            barrier = threading.Barrier(len(loaded.sessions))

            def both(session: Any, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                session.run({"x": numbers(64)}, ["y"])

            list(threads.map(both, loaded.sessions))
        assert len({session.program.pid for session in loaded.sessions if isinstance(session, PyTorchSession)}) == 1
        memory.append(sum(session.memory_bytes() for session in loaded.sessions))
    assert len(loaded.sessions) == 2
    assert memory[0] > 100 << 20 and memory[1] - memory[0] <= 0.3 * memory[0]


def test_instances_by_demand_run_at_once_in_one_process(load: Loads) -> None:
    one = 'parameters { key: "INTRA_OP_THREAD_COUNT" value: { string_value: "1" } }'
    script(load.root, "net", Pair(), BY_POSITION + one)
    loaded = load("net", cores=4)
    assert len(loaded.slots) == 4 and len(loaded.sessions) == 1
    batches = [(numbers(1 + seed % 9, seed), numbers(1 + seed % 9, seed + 50)) for seed in range(48)]
    module = Pair().eval()
    with torch.no_grad():
        expected = [module(torch.from_numpy(x), torch.from_numpy(y))[0].numpy() for x, y in batches]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda batch: run(loaded, *batch)[0], batches))
    for array, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, wanted, rtol=1e-5, atol=1e-6)


def test_instances_that_may_not_share_weights_have_processes_of_their_own(load: Loads) -> None:
    more = 'parameters { key: "ENABLE_WEIGHT_SHARING" value: { string_value: "false" } }'
    script(load.root, "net", Pair(), BY_POSITION + "instance_group { count: 2 kind: KIND_CPU }" + more)
    sessions = load("net").sessions
    assert len({session.program.pid for session in sessions if isinstance(session, PyTorchSession)}) == 2


def test_gpus_are_counted_by_pytorch_itself() -> None:
    assert _usable_gpus() == torch.cuda.device_count()


def test_closing_ends_the_process(load: Loads) -> None:
    script(load.root, "net", Pair(), BY_POSITION)
    loading = Loading(LocalStore(load.root), "net", find_backend=find_backend, cores=2, models=1)
    loaded = load_model(loading)[1]
    assert isinstance(loaded, LoadedVersion)
    pid = session_of(loaded).program.pid
    loaded.close()
    assert session_of(loaded).program.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid or 0, signal.SIGCONT)


async def test_server_batches_requests_and_counts_them(tmp_path: Path) -> None:
    script(tmp_path, "net", Pair(), BY_POSITION + "dynamic_batching { max_queue_delay_microseconds: 2000 }")
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=None, metrics_port=0, cores=2)
    module = Pair().eval()
    async with open_unit(settings, sink=ListSink()) as unit:
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{unit.http_port}", trust_env=False, timeout=60
        ) as client:
            assert (await client.get("/v2/health/ready")).status_code == 200

            async def one(seed: int) -> bool:
                x, y = numbers(1, seed), numbers(1, seed + 100)
                inputs = [
                    {"name": name, "shape": [1, 4], "datatype": "FP32", "data": array.ravel().tolist()}
                    for name, array in (("INPUT__0", x), ("INPUT__1", y))
                ]
                answer = await client.post("/v2/models/net/infer", json={"inputs": inputs})
                with torch.no_grad():
                    expected = module(torch.from_numpy(x), torch.from_numpy(y))
                found = {each["name"]: each["data"] for each in answer.json()["outputs"]}
                return bool(
                    np.allclose(found["OUTPUT__0"], expected[0].numpy().ravel(), atol=1e-5)
                    and np.allclose(found["OUTPUT__1"], expected[1].numpy().ravel(), atol=1e-5)
                )

            assert all(await asyncio.gather(*map(one, range(64))))
            (model,) = (await client.get("/v2/models/net/stats")).json()["model_stats"]
            assert model["inference_count"] == 64 and model["execution_count"] < 64
            shown = (await client.get("/v2/models/net/config")).json()
            assert shown["platform"] == "pytorch_libtorch" and shown["default_model_filename"] == "model.pt"
