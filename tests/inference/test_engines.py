"""Which runtime is installed and what it can: environments, drivers and providers as doubles."""

import ctypes
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

from oriel_inference.app import open_unit
from oriel_inference.backends import cuda, distributions, find_backend, onnx_runtime, providers
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions, Gpu
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed

from . import models

CUDA = providers.CUDA


@pytest.mark.parametrize(
    ("names", "remedy"),
    [
        (["numpy", "onnxruntime"], ""),
        (["onnxruntime-gpu", "oriel-serving"], ""),
        # the plug-in is made for a plain ONNX Runtime
        (["onnxruntime", "onnxruntime-ep-openvino"], ""),
        (
            ["onnxruntime", "onnxruntime_openvino"],
            "onnxruntime onnxruntime-openvino && pip install 'oriel-serving[openvino]'",
        ),
        (
            ["ONNXRuntime", "onnxruntime-gpu"],
            "pip uninstall -y onnxruntime onnxruntime-gpu && pip install 'oriel-serving[gpu]'",
        ),
        (["onnxruntime-directml", "onnxruntime"], "pip install 'oriel-serving[cpu]'"),
    ],
)
def test_two_distributions_of_onnx_runtime(names: list[str], remedy: str) -> None:
    said = distributions.conflict(names)
    assert bool(said) == bool(remedy) and remedy in said


async def test_server_does_not_start_with_two_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "oriel_inference.app.check_distributions", lambda: distributions.conflict(["onnxruntime", "onnxruntime-gpu"])
    )
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(StartFailed, match="overwrite each other's files; keep one: pip uninstall"):
        async with open_unit(settings):
            pass


class Driver:
    """The driver's functions, for the devices of `capabilities`."""

    def __init__(self, capabilities: Sequence[tuple[int, int]], *, error: int = 0) -> None:
        self.capabilities, self.error = capabilities, error
        self.retained: list[int] = []
        self.current: list[int] = []

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device: Any, number: int) -> int:
        device._obj.value = number
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: ctypes.c_int) -> int:
        value._obj.value = self.capabilities[device.value][attribute - 75]
        return 0

    def cuDeviceGetPCIBusId(self, text: Any, size: int, device: ctypes.c_int) -> int:
        text.value = f"0000:{device.value:02x}:00.0".encode()
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: ctypes.c_int) -> int:
        self.retained.append(device.value)
        context._obj.value = 100 + device.value
        return self.error

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        self.current.append(int(context.value or 0))
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        total._obj.value = 80 << 30
        free._obj.value = total._obj.value - self.current[-1]
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0


def test_gpus_of_the_driver() -> None:
    found = cuda.find_gpus(lambda _: Driver([(9, 0), (8, 6)]))
    assert found == (
        Gpu(number=0, capability="9.0", bus_id="0000:00:00.0"),
        Gpu(number=1, capability="8.6", bus_id="0000:01:00.0"),
    )
    assert cuda.find_gpus(lambda _: Driver([(9, 0)], error=100)) == ()

    def missing(name: str) -> Any:
        raise OSError(name)

    assert cuda.find_gpus(missing) == ()


def test_memory_in_use_on_the_gpus_of_the_driver() -> None:
    driver, contexts = Driver([(9, 0), (8, 6)]), dict[int, ctypes.c_void_p]()
    for _ in range(2):
        assert cuda.find_used_bytes(lambda _: driver, (0, 1), contexts) == {0: 100, 1: 101}
    assert driver.retained == [0, 1] and driver.current == []
    assert cuda.find_used_bytes(lambda _: Driver([(9, 0)], error=2), (0,), {}) == {}


class Session:
    """What ONNX Runtime says of a session after it has fallen back, or not."""

    def __init__(self, actual: list[str], used: Sequence[str] = ()) -> None:
        self.actual, self.used = actual, used

    def get_providers(self) -> list[str]:
        return self.actual

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [type("Part", (), {"ep_name": name}) for name in self.used]


def test_silent_fallback_is_found_out() -> None:
    providers.verify(Session([CUDA, "CPUExecutionProvider"], [CUDA]), [CUDA])
    providers.verify(Session(["CPUExecutionProvider"]), [])
    with pytest.raises(
        LoadFailed, match=f"asks for {CUDA}, but ONNX Runtime could not start it .* on CPUExecutionProvider"
    ):
        providers.verify(Session(["CPUExecutionProvider"]), [CUDA])
    with pytest.raises(LoadFailed, match=f"{CUDA} supports no part of this model"):
        providers.verify(Session([CUDA, "CPUExecutionProvider"], ["CPUExecutionProvider"]), [CUDA])
    with pytest.raises(LoadFailed, match=f"{providers.TENSORRT} supports no part of this model"):
        providers.verify(Session([providers.TENSORRT, CUDA], [CUDA]), [providers.TENSORRT, CUDA])


def test_a_package_that_lists_cuda_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the GPU package and no working driver: nothing may be placed on a GPU that is not there."""
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(onnx_runtime, "list_gpus", lambda: (Gpu(number=0, capability="9.0"),))
    monkeypatch.setattr(providers, "_preload", lambda: None)
    onnx_runtime._tried_gpus.cache_clear()
    try:
        backend = onnx_runtime.OnnxRuntime()
        assert backend.gpus() == ()
        path = models.put(tmp_path, "double", models.double()) / "1/model.onnx"
        with pytest.raises(LoadFailed, match=CUDA):
            backend.open(path, EngineOptions(providers=((CUDA, {"device_id": "0"}),)))
    finally:
        onnx_runtime._tried_gpus.cache_clear()


@pytest.mark.parametrize(
    ("provider", "extra"), [(CUDA, "gpu"), (providers.TENSORRT, "tensorrt"), (providers.OPENVINO, "openvino")]
)
def test_provider_that_is_not_installed_comes_with_its_extra(provider: str, extra: str) -> None:
    if provider in onnxruntime.get_available_providers():
        pytest.skip("it is installed here")
    assert f"pip install 'oriel-serving[{extra}]'" in providers.missing(provider)


def test_providers_that_fail_at_the_same_time_leave_standard_output_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, "CPUExecutionProvider"])
    monkeypatch.setattr(providers, "_preload", lambda: None)
    path = models.put(tmp_path, "double", models.double()) / "1/model.onnx"
    before, refused = sys.stdout, []

    def fail(_: int) -> None:
        with pytest.raises(LoadFailed):
            onnx_runtime.OnnxRuntime().open(path, EngineOptions(providers=((CUDA, {}),)))
        refused.append(1)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fail, range(32)))
    assert len(refused) == 32 and sys.stdout is before


def test_session_settings_reach_the_runtime(tmp_path: Path) -> None:
    path = models.put(tmp_path, "double", models.double()) / "1/model.onnx"
    options = EngineOptions(
        memory_arena=False,
        memory_pattern=False,
        graph_level=2,
        session_entries={"session.use_device_allocator_for_initializers": "1"},
        run_entries={"memory.enable_memory_arena_shrinkage": ""},
    )
    session = onnx_runtime.OnnxRuntime().open(path, options)
    settings = session._session.get_session_options()  # type: ignore[attr-defined]  # of an OnnxRuntimeSession
    assert not settings.enable_cpu_mem_arena and not settings.enable_mem_pattern
    assert settings.graph_optimization_level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    assert settings.get_session_config_entry("session.use_device_allocator_for_initializers") == "1"
    x = models.np.ones((1, 4), dtype=models.np.float32)
    assert session.run({"x": x}, ["y"])[0].tolist() == [[2.0] * 4]


def test_a_python_model_outside_a_server_is_told_from_an_unknown_backend() -> None:
    with pytest.raises(LoadFailed, match="Python model runs in processes of an inference server"):
        find_backend("python")
