"""Memory for bytes that are about to be received, without numpy: its import takes a fifth of a gateway's start."""

import ctypes

_bytearray_of = ctypes.pythonapi.PyByteArray_FromStringAndSize
_bytearray_of.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_bytearray_of.restype = ctypes.py_object


def unwritten(size: int) -> memoryview:
    """Return a view of `size` bytes, which hold anything until they are written: `bytearray(size)` would write zeros,
    9 us for 600 KB.
    """
    return memoryview(_bytearray_of(None, size))
