"""The backend `tensorrt`: opens plans on the GPUs of this machine."""

from collections.abc import Sequence
from pathlib import Path

from oriel_inference.backends import Backend, NeededBytes, Reserve
from oriel_inference.backends.tensorrt import GPU_KEY, HOST_CODE_KEY, PROVIDER
from oriel_inference.backends.tensorrt.engine import Engines
from oriel_inference.backends.tensorrt.library import find_library
from oriel_inference.backends.tensorrt.session import PlanSession
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions, Gpu


class TensorRt(Backend):
    """Opens `.plan` files. One object per load: the instances that it opens share their engine.

    Making one raises LoadFailed if TensorRT, CUDA's bindings or a GPU is missing.
    """

    name = "tensorrt"

    def __init__(self) -> None:
        self._library = find_library()
        self._engines = Engines(self._library)

    def open(self, path: Path, options: EngineOptions) -> PlanSession:
        return self.open_within(path, options, _unbounded)

    def open_within(self, path: Path, options: EngineOptions, reserve: Reserve) -> PlanSession:
        """Do what `open` does; `reserve` is called before memory is taken."""
        given = dict(options.providers).get(PROVIDER)
        if given is None:
            raise LoadFailed(f"{path.name} is a TensorRT plan, which runs on a GPU only")
        return PlanSession(
            self._library,
            self._engines,
            path,
            int(given[GPU_KEY]),
            host_code=given.get(HOST_CODE_KEY) == "1",
            reserve=reserve,
        )

    def gpus(self) -> Sequence[Gpu]:
        """Return the GPUs that CUDA shows to this process."""
        runtime = self._library.runtime
        attributes = runtime.cudaDeviceAttr
        _, count = runtime.cudaGetDeviceCount()
        found = []
        for number in range(count):
            major_error, major = runtime.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMajor, number)
            minor_error, minor = runtime.cudaDeviceGetAttribute(attributes.cudaDevAttrComputeCapabilityMinor, number)
            if not int(major_error) and not int(minor_error):
                found.append(Gpu(number=number, capability=f"{major}.{minor}"))
        return found


def _unbounded(needed: NeededBytes) -> None:
    """Reserve nothing: there is no budget."""
