"""Lists the NVIDIA GPUs that the driver shows to this process. It calls the driver's own library and needs no package.

`CUDA_VISIBLE_DEVICES` is respected, as in every CUDA program.
"""

import ctypes
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from oriel_inference.backends.gpu_work import BATCHES
from oriel_inference.model import Gpu

LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_SUCCESS = 0
_BUS_ID_BYTES = 32  # 13 with a four-digit domain


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
        bus_id = ctypes.create_string_buffer(_BUS_ID_BYTES)
        requested = (
            driver.cuDeviceGet(ctypes.byref(device), number),
            driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device),
            driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device),
            driver.cuDeviceGetPCIBusId(bus_id, _BUS_ID_BYTES, device),
        )
        if any(requested):
            return ()
        capability = f"{major.value}.{minor.value}"
        found.append(Gpu(number=number, capability=capability, bus_id=bus_id.value.decode("ascii", "replace")))
    return tuple(found)


_contexts: dict[int, ctypes.c_void_p] = {}


def gpu_used_bytes() -> dict[int, int]:
    """Return GPU -> bytes of its memory that are in use, by any process; empty without a driver.

    The first call opens the primary context of each GPU, which the runtimes share, and keeps it.
    """
    with BATCHES.entered():
        return find_used_bytes(ctypes.CDLL, [gpu.number for gpu in list_gpus()], _contexts)


def find_used_bytes(
    open_library: Callable[[str], Any], numbers: Iterable[int], contexts: dict[int, ctypes.c_void_p]
) -> dict[int, int]:
    """Return GPU -> bytes in use as a driver library reports them; a GPU that cannot be asked is left out.

    numbers: the GPUs.
    contexts: the contexts that are open; those that this opens are added.
    """
    found: dict[int, int] = {}
    for number in numbers:
        driver = open_library(LIBRARY)
        if number not in contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            if driver.cuDeviceGet(ctypes.byref(device), number) != _SUCCESS:
                continue
            if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) != _SUCCESS:
                continue
            contexts[number] = context
        if driver.cuCtxPushCurrent_v2(contexts[number]) != _SUCCESS:
            continue
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == _SUCCESS:
            found[number] = total.value - free.value
        driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))
    return found
