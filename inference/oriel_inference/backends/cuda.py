"""Which NVIDIA GPUs the driver shows this process, asked of the driver's own library. Nothing is installed for it.

`CUDA_VISIBLE_DEVICES` counts, as it does for every CUDA program.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from oriel_inference.model import Gpu

__all__ = ["find_gpus", "list_gpus"]

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_SUCCESS = 0


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """Those of this machine; empty without a driver. Asked once per process."""
    return find_gpus(ctypes.CDLL)


def find_gpus(open_library: Callable[[str], Any]) -> tuple[Gpu, ...]:
    """open_library: name -> the driver's functions; raises OSError if it is not there."""
    try:
        driver = open_library(LIBRARY)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != _SUCCESS or driver.cuDeviceGetCount(ctypes.byref(count)) != _SUCCESS:
        return ()
    found = []
    for number in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        asked = (
            driver.cuDeviceGet(ctypes.byref(device), number),
            driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
            driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
        )
        if any(asked):
            return ()
        found.append(Gpu(number=number, capability=f"{major.value}.{minor.value}"))
    return tuple(found)
