"""Lists the NVIDIA GPUs that the driver shows to this process. It calls the driver's own library and needs no package.

`CUDA_VISIBLE_DEVICES` is respected, as in every CUDA program.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

from oriel_inference.model import Gpu

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_SUCCESS = 0


@cache
def list_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none without a driver. The driver is called once per process."""
    return find_gpus(ctypes.CDLL)


def find_gpus(open_library: Callable[[str], Any]) -> tuple[Gpu, ...]:
    """Return the GPUs that a driver library reports.

    open_library: name -> the driver's functions; raises OSError if the library is missing.
    """
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
        requested = (
            driver.cuDeviceGet(ctypes.byref(device), number),
            driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
            driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
        )
        if any(requested):
            return ()
        found.append(Gpu(number=number, capability=f"{major.value}.{minor.value}"))
    return tuple(found)
