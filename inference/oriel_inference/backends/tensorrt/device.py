"""Memory and streams of one GPU, by `cuda.bindings.runtime`. CUDA keeps the current device per thread, so every object
here is made, used and freed in one thread.
"""

import ctypes
import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_inference.backends.tensorrt.library import error_text
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)


class CudaFailed(Exception):
    """A call of CUDA's runtime returned an error. The text names the call."""


class Device:
    """One GPU, current in the thread that made this. Raises CudaFailed, as all methods do."""

    def __init__(self, runtime: Any, number: int) -> None:
        self._runtime = runtime
        self._success = int(runtime.cudaError_t.cudaSuccess)
        self._to_device = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._to_host = runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaSetDevice", number)

    def free_bytes(self) -> int:
        """Return the free memory of the GPU in bytes."""
        free, _ = self._call("cudaMemGetInfo")
        return int(free)

    def open_stream(self) -> Any:
        """Return a stream of its own, which does not wait for the default stream."""
        (stream,) = self._call("cudaStreamCreateWithFlags", self._runtime.cudaStreamNonBlocking)
        return stream

    def allocate(self, size_bytes: int) -> "Buffer":
        """Return a buffer; a tensor without elements gets one byte, because an address must not be null."""
        size_bytes = max(1, size_bytes)
        (device,) = self._call("cudaMalloc", size_bytes)
        try:
            (host,) = self._call("cudaHostAlloc", size_bytes, self._runtime.cudaHostAllocDefault)
        except CudaFailed:
            self.ignore_errors("cudaFree", device)
            raise
        return Buffer(int(device), int(host), size_bytes)

    def send(self, buffer: "Buffer", size_bytes: int, stream: Any) -> None:
        """Begin the copy of the first bytes from the host to the GPU."""
        self._call("cudaMemcpyAsync", buffer.device, buffer.host, size_bytes, self._to_device, stream)

    def fetch(self, buffer: "Buffer", size_bytes: int, stream: Any) -> None:
        """Begin the copy of the first bytes from the GPU to the host."""
        self._call("cudaMemcpyAsync", buffer.host, buffer.device, size_bytes, self._to_host, stream)

    def wait(self, stream: Any) -> None:
        """Wait for everything that was begun on a stream."""
        self._call("cudaStreamSynchronize", stream)

    def free(self, buffer: "Buffer") -> None:
        """Give the memory of a buffer back. An error is logged: nothing can be done about it."""
        self.ignore_errors("cudaFree", buffer.device)
        self.ignore_errors("cudaFreeHost", buffer.host)

    def ignore_errors(self, function: str, *arguments: Any) -> None:
        """Call a function that releases something; its error is logged."""
        try:
            self._call(function, *arguments)
        except CudaFailed as failure:
            _log.warning("%s", failure)

    def _call(self, function: str, *arguments: Any) -> tuple[Any, ...]:
        error, *values = getattr(self._runtime, function)(*arguments)
        if int(error) != self._success:
            raise CudaFailed(f"{function} failed: {error_text(self._runtime, error)}")
        return tuple(values)


class Buffer:
    """Memory of the GPU for one tensor, and as much pinned memory of the host, through which its values pass.

    device, host: addresses.
    """

    __slots__ = ("_bytes", "device", "host", "size_bytes")

    def __init__(self, device: int, host: int, size_bytes: int) -> None:
        self.device = device
        self.host = host
        self.size_bytes = size_bytes
        self._bytes: NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(host))

    def view(self, dtype: "np.dtype[Any]", shape: tuple[int, ...], size_bytes: int) -> Array:
        """Return the first bytes of the host's memory as an array; valid until the next batch."""
        return self._bytes[:size_bytes].view(dtype).reshape(shape)
