"""Stands in for `cuda.bindings.runtime`, where there is no GPU, and is stricter than CUDA.

Addresses of device memory are no addresses of this process. Work on a stream is done when the stream is waited for, so
that what is read too early has not been written. Whatever the documentation forbids, or this project has ruled out, is
entered in `misuses` and raised: memory that was freed, a wrong kind of copy, the default stream, a stream in another
thread than the one that made it, a thread that has not set its device.
"""

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np

cudaStreamNonBlocking = 1
cudaHostAllocDefault = 0
GARBAGE = 0xAB


class cudaError_t(IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1
    cudaErrorMemoryAllocation = 2
    cudaErrorInsufficientDriver = 35
    cudaErrorNoDevice = 100
    cudaErrorInvalidDevice = 101
    cudaErrorLaunchFailure = 719


class cudaMemcpyKind(IntEnum):
    cudaMemcpyHostToHost = 0
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2
    cudaMemcpyDeviceToDevice = 3


class cudaDeviceAttr(IntEnum):
    cudaDevAttrComputeCapabilityMajor = 75
    cudaDevAttrComputeCapabilityMinor = 76


OK = cudaError_t.cudaSuccess
_TEXTS = {
    cudaError_t.cudaErrorMemoryAllocation: b"out of memory",
    cudaError_t.cudaErrorInsufficientDriver: b"CUDA driver version is insufficient for CUDA runtime version",
    cudaError_t.cudaErrorNoDevice: b"no CUDA-capable device is detected",
    cudaError_t.cudaErrorInvalidDevice: b"invalid device ordinal",
    cudaError_t.cudaErrorLaunchFailure: b"unspecified launch failure",
}


class Misuse(Exception):
    """The API was used in a way that the documentation forbids."""


class cudaStream_t:
    """A handle of a stream."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __int__(self) -> int:
        return self._handle


class Stream:
    """What the stand-in knows of a stream. work: functions that return an error, in the order of their launch."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.thread = threading.get_ident()
        self.work: list[Callable[[], cudaError_t]] = []


class Machine:
    """The GPUs of this machine and what is on them. The tests set it up and read it.

    total_bytes: of each GPU. taken: what engines and contexts have taken, by GPU.
    fails: name of a function -> the error that its next calls return.
    calls: the names of functions, in the order of their calls.
    engines, contexts: how many were made. executed: (thread, profile) of each execution.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total_bytes = {0: 1 << 30}
        self.capability = (9, 0)
        self.count_error = OK
        self.device_memory: dict[int, tuple[int, np.ndarray[Any, Any]]] = {}
        self.pinned: dict[int, ctypes.Array[ctypes.c_uint8]] = {}
        self.released: list[Any] = []  # pinned memory that was freed stays mapped: a late write must not crash the test
        self.streams: dict[int, Stream] = {}
        self.taken: dict[int, int] = {}
        self.fails: dict[str, cudaError_t] = {}
        self.calls: list[str] = []
        self.misuses: list[str] = []
        self.engines = self.contexts = 0
        self.executed: list[tuple[int, int]] = []
        self.lock = threading.RLock()
        self.current = threading.local()
        self._next = 0x7F00_0000_0000

    def misuse(self, text: str) -> Misuse:
        self.misuses.append(text)
        return Misuse(text)

    def free_bytes(self, device: int) -> int:
        buffers = sum(array.size for own, array in self.device_memory.values() if own == device)
        return self.total_bytes[device] - buffers - self.taken.get(device, 0)

    def take(self, device: int, size_bytes: int) -> bool:
        """Count memory that TensorRT takes for itself; negative bytes give it back."""
        with self.lock:
            if size_bytes > self.free_bytes(device):
                return False
            self.taken[device] = self.taken.get(device, 0) + size_bytes
            return True

    def device(self) -> int:
        number: int | None = getattr(self.current, "number", None)
        if number is None:
            raise self.misuse("a thread uses CUDA without having set its device")
        return number

    def stream(self, handle: Any) -> Stream:
        number = int(handle)
        if not number:
            raise self.misuse("the default stream is used")
        found = self.streams.get(number)
        if found is None:
            raise self.misuse("a stream is used that does not exist, or not any more")
        if found.thread != threading.get_ident():
            raise self.misuse("a stream is used in another thread than the one that made it")
        if found.device != self.device():
            raise self.misuse("a stream is used while another device is current")
        return found

    def device_bytes(self, address: int, size_bytes: int, device: int) -> np.ndarray[Any, Any]:
        """Return the device memory behind an address."""
        entry = self.device_memory.get(address)
        if entry is None:
            raise self.misuse("device memory is used that was not allocated, or was freed")
        own, array = entry
        if own != device:
            raise self.misuse("memory of another device is used")
        if size_bytes > array.size:
            raise self.misuse(f"{size_bytes} bytes are used of a buffer of {array.size}")
        return array[:size_bytes]

    def host_bytes(self, address: int, size_bytes: int) -> np.ndarray[Any, Any]:
        """Return the pinned memory behind an address."""
        memory = self.pinned.get(address)
        if memory is None:
            raise self.misuse("host memory is copied that is not pinned, or was freed")
        if size_bytes > len(memory):
            raise self.misuse(f"{size_bytes} bytes are copied from or to {len(memory)} pinned bytes")
        return np.frombuffer(memory, np.uint8)[:size_bytes]

    def address(self) -> int:
        self._next += 1 << 20
        return self._next

    def enter(self, name: str) -> cudaError_t:
        with self.lock:
            self.calls.append(name)
        return self.fails.get(name, OK)

    @property
    def is_empty(self) -> bool:
        """Return whether everything that was made has been released."""
        return not (self.device_memory or self.pinned or self.streams or any(self.taken.values()))


machine = Machine()


def cudaGetDeviceCount() -> tuple[cudaError_t, int | None]:
    if machine.count_error:
        return machine.count_error, None
    return OK, len(machine.total_bytes)


def cudaDeviceGetAttribute(attribute: cudaDeviceAttr, device: int) -> tuple[cudaError_t, int | None]:
    if device not in machine.total_bytes:
        return cudaError_t.cudaErrorInvalidDevice, None
    return OK, machine.capability[attribute - cudaDeviceAttr.cudaDevAttrComputeCapabilityMajor]


def cudaDriverGetVersion() -> tuple[cudaError_t, int]:
    return OK, 13000


def cudaGetErrorString(error: cudaError_t) -> tuple[cudaError_t, bytes]:
    return OK, _TEXTS.get(error, b"unrecognized error code")


def cudaSetDevice(device: int) -> tuple[cudaError_t]:
    if error := machine.enter("cudaSetDevice"):
        return (error,)
    if device not in machine.total_bytes:
        return (cudaError_t.cudaErrorInvalidDevice,)
    machine.current.number = device
    return (OK,)


def cudaMemGetInfo() -> tuple[cudaError_t, int | None, int | None]:
    if error := machine.enter("cudaMemGetInfo"):
        return error, None, None
    device = machine.device()
    with machine.lock:
        return OK, machine.free_bytes(device), machine.total_bytes[device]


def cudaMalloc(size: int) -> tuple[cudaError_t, int | None]:
    if error := machine.enter("cudaMalloc"):
        return error, None
    device = machine.device()
    with machine.lock:
        if size > machine.free_bytes(device):
            return cudaError_t.cudaErrorMemoryAllocation, None
        address = machine.address()
        machine.device_memory[address] = device, np.full(size, GARBAGE, np.uint8)
    return OK, address


def cudaFree(address: int) -> tuple[cudaError_t]:
    machine.enter("cudaFree")
    machine.device()
    with machine.lock:
        if machine.device_memory.pop(address, None) is None:
            raise machine.misuse("device memory is freed that was not allocated, or was freed before")
    return (OK,)


def cudaHostAlloc(size: int, flags: int) -> tuple[cudaError_t, int | None]:
    if error := machine.enter("cudaHostAlloc"):
        return error, None
    machine.device()
    memory = (ctypes.c_uint8 * size)()
    address = ctypes.addressof(memory)
    ctypes.memset(address, GARBAGE, size)
    with machine.lock:
        machine.pinned[address] = memory
    return OK, address


def cudaFreeHost(address: int) -> tuple[cudaError_t]:
    machine.enter("cudaFreeHost")
    with machine.lock:
        memory = machine.pinned.pop(address, None)
        if memory is None:
            raise machine.misuse("pinned memory is freed that was not allocated, or was freed before")
        ctypes.memset(address, GARBAGE, len(memory))
        machine.released.append(memory)
    return (OK,)


def cudaStreamCreateWithFlags(flags: int) -> tuple[cudaError_t, cudaStream_t | None]:
    if error := machine.enter("cudaStreamCreateWithFlags"):
        return error, None
    if flags != cudaStreamNonBlocking:
        raise machine.misuse("a stream waits for the default stream")
    with machine.lock:
        handle = machine.address()
        machine.streams[handle] = Stream(machine.device())
    return OK, cudaStream_t(handle)


def cudaStreamDestroy(stream: cudaStream_t) -> tuple[cudaError_t]:
    machine.enter("cudaStreamDestroy")
    if machine.stream(stream).work:
        raise machine.misuse("a stream is destroyed before its work is done")
    with machine.lock:
        del machine.streams[int(stream)]
    return (OK,)


def cudaMemcpyAsync(
    destination: int, source: int, count: int, kind: cudaMemcpyKind, stream: cudaStream_t
) -> tuple[cudaError_t]:
    if error := machine.enter("cudaMemcpyAsync"):
        return (error,)
    found = machine.stream(stream)
    if kind == cudaMemcpyKind.cudaMemcpyHostToDevice:
        target, origin = machine.device_bytes(destination, count, found.device), machine.host_bytes(source, count)
    elif kind == cudaMemcpyKind.cudaMemcpyDeviceToHost:
        target, origin = machine.host_bytes(destination, count), machine.device_bytes(source, count, found.device)
    else:
        raise machine.misuse(f"a copy of kind {kind}")

    def copy() -> cudaError_t:
        target[:] = origin
        return OK

    found.work.append(copy)
    return (OK,)


def cudaStreamSynchronize(stream: cudaStream_t) -> tuple[cudaError_t]:
    found = machine.stream(stream)
    error = machine.enter("cudaStreamSynchronize")
    while found.work:
        error = found.work.pop(0)() or error
    return (error,)
