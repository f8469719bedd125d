"""A stand-in for `pynvml`, the Python module of NVIDIA's management library: two GPUs, one of which gives no power.

It is as strict as the library: nothing is answered before `nvmlInit`, and handles are those that it gave.
"""

from types import SimpleNamespace
from typing import Any

BUS_IDS = ("0000:17:00.0", "0000:65:00.0")
UUIDS = ("GPU-11111111-aaaa", "GPU-22222222-bbbb")


class NVMLError(Exception):
    """A code that is not success."""


class ManagementLibrary:
    """The module. energy_mj: what the first GPU has taken since its driver was loaded. broken: `nvmlInit` fails."""

    NVMLError = NVMLError

    def __init__(self, *, broken: bool = False) -> None:
        self.broken = broken
        self.energy_mj = 5_000_000
        self._begun = False

    def nvmlInit(self) -> None:
        if self.broken:
            raise NVMLError("Driver Not Loaded")
        self._begun = True

    def nvmlDeviceGetHandleByPciBusId(self, bus_id: str) -> Any:
        if not self._begun:
            raise NVMLError("Uninitialized")
        if bus_id not in BUS_IDS:
            raise NVMLError("Not Found")
        return SimpleNamespace(number=BUS_IDS.index(bus_id))

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return UUIDS[handle.number]

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        return SimpleNamespace(gpu=(37, 100)[handle.number], memory=9)

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:
        return SimpleNamespace(total=80 << 30, free=79 << 30, used=(handle.number + 1) << 30)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._of_first(handle, 70_500)

    def nvmlDeviceGetPowerManagementLimit(self, handle: Any) -> int:
        return self._of_first(handle, 700_000)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return self._of_first(handle, self.energy_mj)

    def _of_first(self, handle: Any, value: int) -> int:
        if handle.number != 0:
            raise NVMLError("Not Supported")
        return value
