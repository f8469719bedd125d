"""A session of a plan: an execution context in a thread of its own, which does everything that has to do with it."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oriel_inference.backends import NeededBytes, Reserve, Session
from oriel_inference.backends.gpu_work import BATCHES, OPENINGS, opened_in
from oriel_inference.backends.tensorrt import PROVIDER
from oriel_inference.backends.tensorrt.context import PlanContext
from oriel_inference.backends.tensorrt.device import CudaFailed, Device
from oriel_inference.backends.tensorrt.engine import Engine, Engines
from oriel_inference.backends.tensorrt.library import Library
from oriel_inference.errors import LoadFailed
from oriel_wire.v2.messages import Array


class PlanSession(Session):
    """One instance of a plan on one GPU. rows: the most rows that a batch may have; 0 if it cannot be batched.

    Runs that come at the same time are done one after the other. Raises LoadFailed, and has then taken nothing.
    """

    provider = PROVIDER

    def __init__(
        self, library: Library, engines: Engines, path: Path, gpu: int, *, host_code: bool, reserve: Reserve
    ) -> None:
        self._library = library
        self._engines = engines
        self._gpu = gpu
        self._thread = ThreadPoolExecutor(1, f"oriel-tensorrt-gpu{gpu}")

        def opening() -> tuple[Engine, PlanContext]:
            try:
                return self._open(path, host_code=host_code, reserve=reserve)
            except CudaFailed as failure:
                raise LoadFailed(f"{path.name}: {failure}") from failure

        with OPENINGS.entered():
            self._engine, self._context = opened_in(self._thread, opening)
        plan = self._engine.plan
        self.rows = plan.rows
        self.inputs = tuple(tensor.info for tensor in plan.inputs)
        self.outputs = tuple(tensor.info for tensor in plan.outputs)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; see `Session`. Raises OutsideProfile too."""
        with BATCHES.entered():
            return self._thread.submit(self._context.run, inputs, outputs).result()

    def close(self) -> None:
        """Release context, buffers and stream, and the engine if no other instance uses it."""
        with BATCHES.entered():
            self._thread.submit(self._free).result()
        self._thread.shutdown()

    # In the thread of the session ---------------------------------------------------------------------------------

    def _open(self, path: Path, *, host_code: bool, reserve: Reserve) -> tuple[Engine, PlanContext]:
        device = Device(self._library.runtime, self._gpu)

        def before(size_bytes: int) -> None:
            free = device.free_bytes()
            if size_bytes > free:
                raise LoadFailed(f"{path.name} has {size_bytes} bytes, and the GPU has {free} bytes of memory free")

        engine = self._engines.acquire(path, self._gpu, host_code=host_code, before=before)

        def plan_bytes(device_bytes: int, host_bytes: int) -> None:
            needed = NeededBytes(
                gpu=self._gpu, shared=engine.size_bytes, per_session=device_bytes, host_per_session=host_bytes
            )
            reserve(needed)

        try:
            return engine, PlanContext(engine, device, self._library.log, plan_bytes)
        except BaseException:
            self._engines.release(engine, self._gpu)
            raise

    def _free(self) -> None:
        self._context.free()
        self._engines.release(self._engine, self._gpu)
