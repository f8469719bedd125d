"""Tensors that stay in the memory of a device between two models, instead of going to the host and back."""

from collections.abc import Sequence
from math import prod
from typing import Any, Protocol

import numpy as np

from oriel_inference.backends.gpu_work import BATCHES
from oriel_wire.v2.messages import Array

# A device by the runtime's name and number, as ("cuda", 0).
Memory = tuple[str, int]
# Kernels may read whole vectors, so an input must begin where the allocator of the device could have begun it.
ALIGNMENT = 256


class Value(Protocol):
    """A tensor of the runtime in the memory of a device."""

    def data_ptr(self) -> int: ...

    def numpy(self) -> Array: ...

    def update_inplace(self, data: Array) -> None: ...


class _Held:
    """The parts that all views of one value share.

    owner: the object that has to live as long as the value, because the memory is its own.
    copy: the value on the host; None until a view is needed there.
    """

    __slots__ = ("copy", "owner", "value")

    def __init__(self, value: Value, owner: object) -> None:
        self.value = value
        self.owner = owner
        self.copy: Array | None = None


class _Flags:
    """Those flags of numpy's arrays that are asked for between two models. `aligned` is what makes `concatenate` call
    `usable_on`.
    """

    aligned = False
    c_contiguous = True


class DeviceTensor:
    """A tensor in the memory of a device, with those parts of numpy's arrays that are used between two models.

    Rows and other shapes are views of one value, whose memory is freed with the last of them. Nobody writes into it.
    memory: the device's allocator. offset: the bytes of the value before the first element of this view.
    """

    __slots__ = ("_held", "dtype", "memory", "nbytes", "ndim", "offset", "shape", "size")

    base = None
    flags = _Flags

    def __init__(
        self, held: _Held, memory: Memory, dtype: "np.dtype[Any]", shape: tuple[int, ...], offset: int
    ) -> None:
        self._held = held
        self.memory = memory
        self.dtype = dtype
        self.shape = shape
        self.offset = offset
        self.ndim = len(shape)
        self.size = prod(shape)
        self.nbytes = self.size * dtype.itemsize

    @classmethod
    def of(
        cls, value: Value, memory: Memory, dtype: "np.dtype[Any]", shape: Sequence[int], owner: object
    ) -> "DeviceTensor":
        """Return the whole of a value. owner: kept alive as long as the value."""
        return cls(_Held(value, owner), memory, dtype, tuple(shape), 0)

    @property
    def address(self) -> int:
        """Return the address of the first element in the memory of the device."""
        return self._held.value.data_ptr() + self.offset

    @property
    def is_usable(self) -> bool:
        """Return whether the device can take this view as it is; else it has to be copied."""
        return self.offset % ALIGNMENT == 0 and self.size > 0

    def host(self) -> Array:
        """Return the values as an array of the host. Blocks for the copy of the whole value, which its views share."""
        held = self._held
        if held.copy is None:
            with BATCHES.entered():
                held.copy = held.value.numpy()
        first = self.offset // self.dtype.itemsize
        return held.copy.reshape(-1)[first : first + self.size].reshape(self.shape)

    def reshape(self, shape: Sequence[int]) -> "DeviceTensor":
        """Return a view with another shape; one dimension may be -1. Raises ValueError if it has other elements."""
        known = prod(dim for dim in shape if dim != -1)
        found = tuple(self.size // max(1, known) if dim == -1 else dim for dim in shape)
        if prod(found) != self.size:
            raise ValueError(f"a tensor of {self.size} elements cannot have the shape {tuple(shape)}")
        return DeviceTensor(self._held, self.memory, self.dtype, found, self.offset)

    def __getitem__(self, rows: slice) -> "DeviceTensor":
        """Return a view of consecutive rows."""
        start, stop, _ = rows.indices(self.shape[0])
        each = self.nbytes // max(1, self.shape[0])
        shape = (max(0, stop - start), *self.shape[1:])
        return DeviceTensor(self._held, self.memory, self.dtype, shape, self.offset + start * each)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Let numpy join this with arrays of the host."""
        return np.array(self.host(), dtype=dtype, copy=copy)

    def follows(self, other: "DeviceTensor") -> bool:
        """Return whether this begins in the same value where `other` ends, with rows of the same shape."""
        return (
            self._held is other._held
            and self.offset == other.offset + other.nbytes
            and self.shape[1:] == other.shape[1:]
            and self.ndim == other.ndim > 0
        )

    def extended(self, rows: int) -> "DeviceTensor":
        """Return a view of `rows` rows that begins where this one begins."""
        return DeviceTensor(self._held, self.memory, self.dtype, (rows, *self.shape[1:]), self.offset)


def on_host(tensor: Any) -> Array:
    """Return a tensor as an array of the host; an array as it is."""
    array: Array = tensor.host() if isinstance(tensor, DeviceTensor) else tensor
    return array


def usable_on(array: Any, memory: Memory | None) -> Any:
    """Return the values of an array that is not aligned, or of a `DeviceTensor`, in a form that a session takes.

    memory: the allocator of the session's device; None if the session takes only arrays of the host.
    """
    if not isinstance(array, DeviceTensor):
        return array.copy()
    return array if array.memory == memory and array.is_usable else array.host()


def joined_on(arrays: Sequence[Any], memory: Memory) -> Any:
    """Return the rows of several tensors as one tensor.

    Consecutive rows of one value in the memory of the session's device stay there. Everything else is copied to the
    host and joined there.
    memory: the allocator of the device of the session that takes the result.
    """
    first = before = arrays[0]
    if not isinstance(first, DeviceTensor) or first.memory != memory or not first.is_usable:
        return np.concatenate(arrays)
    for array in arrays[1:]:
        if not isinstance(array, DeviceTensor) or not array.follows(before):
            return np.concatenate(arrays)
        before = array
    return first.extended(sum([array.shape[0] for array in arrays]))
