"""Reads the load of GPUs with NVIDIA's management library, by its Python package nvidia-ml-py."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from typing import Any

from oriel_inference.backends.cuda import list_gpus

WAIT_S = 1.0  # a scrape does not wait longer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLoad:
    """One GPU at one moment. A figure that its driver does not give is None.

    uuid: the id that `nvidia-smi -L` prints. utilization: the share of time in which it computed, 0 to 1.
    power, power_limit: watts. energy: joules since the first reading.
    """

    uuid: str
    utilization: float | None
    memory_total: int | None
    memory_used: int | None
    power: float | None
    power_limit: float | None
    energy: float | None


class GpuLoads:
    """The GPUs of this process, which are those that CUDA shows to it.

    bus_ids: their PCI addresses; None asks the driver. wait_s: seconds to wait for the driver's answer.
    open_library: returns the module `pynvml`, or raises ImportError.
    """

    def __init__(
        self,
        bus_ids: Sequence[str] | None = None,
        open_library: Callable[[], Any] = lambda: import_module("pynvml"),
        wait_s: float = WAIT_S,
    ) -> None:
        self._bus_ids = bus_ids
        self._open_library = open_library
        self._wait_s = wait_s
        self._library: Any = None
        self._handles: list[tuple[str, Any]] = []
        self._first_mj: dict[str, int] = {}
        self._opened = False
        self._reading: asyncio.Future[list[GpuLoad]] | None = None

    async def latest(self) -> list[GpuLoad]:
        """Return the load of each GPU now; none where there is no driver, or where it does not answer in time.

        The driver is called in a thread, one call at a time: it may take milliseconds, and for ever when a GPU fails.
        A thread that waits for it does not keep the process from ending.
        """
        if self._reading is None or self._reading.done():
            loop = asyncio.get_running_loop()
            self._reading = loop.create_future()
            Thread(target=self._answer, args=(loop, self._reading), name="gpu-load", daemon=True).start()
        done, _ = await asyncio.wait({self._reading}, timeout=self._wait_s)
        return self._reading.result() if done else []

    def read(self) -> list[GpuLoad]:
        """Return the load of each GPU. It blocks on the driver."""
        if not self._opened:
            self._opened = True
            self._open()
        return [self._load(uuid, handle) for uuid, handle in self._handles]

    def _answer(self, loop: asyncio.AbstractEventLoop, reading: "asyncio.Future[list[GpuLoad]]") -> None:
        found: list[GpuLoad] = []
        try:
            found = self.read()
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(reading.set_result, found)

    def _open(self) -> None:
        bus_ids = [gpu.bus_id for gpu in list_gpus()] if self._bus_ids is None else self._bus_ids
        if not bus_ids:
            return
        try:
            library = self._library = self._open_library()
        except ImportError:
            _log.warning("there are no metrics of GPUs: pip install nvidia-ml-py")
            return
        try:
            library.nvmlInit()
            handles = [library.nvmlDeviceGetHandleByPciBusId(each) for each in bus_ids]
            self._handles = [(library.nvmlDeviceGetUUID(handle), handle) for handle in handles]
        except library.NVMLError as error:
            _log.warning("there are no metrics of GPUs: %s", error)

    def _load(self, uuid: str, handle: Any) -> GpuLoad:
        library = self._library
        rates = self._ask(library.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(library.nvmlDeviceGetMemoryInfo, handle)
        power_mw = self._ask(library.nvmlDeviceGetPowerUsage, handle)
        limit_mw = self._ask(library.nvmlDeviceGetPowerManagementLimit, handle)
        energy_mj = self._ask(library.nvmlDeviceGetTotalEnergyConsumption, handle)
        return GpuLoad(
            uuid=uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_total=None if memory is None else memory.total,
            memory_used=None if memory is None else memory.used,
            power=None if power_mw is None else power_mw / 1e3,
            power_limit=None if limit_mw is None else limit_mw / 1e3,
            energy=None if energy_mj is None else (energy_mj - self._first_mj.setdefault(uuid, energy_mj)) / 1e3,
        )

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        """Return the answer; None if this GPU does not give it, as parts of a GPU give no power."""
        try:
            return question(handle)
        except self._library.NVMLError:
            return None
