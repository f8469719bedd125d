"""Reads and writes `.npy` files: numbers only, never pickles; the header is bounded and must match the data."""

import math
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from oriel_logic.errors import Refused

MAGIC = npy.MAGIC_PREFIX
MAX_HEADER_BYTES = 4096
MAX_DIMENSIONS = 32
HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
KINDS = "biufc"
NOT_A_FILE = "the body is no .npy file"


def decode(data: bytes) -> NDArray[Any]:
    """Decode a file as a read-only view of `data`. Raises Refused."""
    file = BytesIO(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about headers that Python 2 wrote
            version = npy.read_magic(file)
            read = HEADERS[version]
            shape, fortran, dtype = read(file, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # numpy parses it as Python text, and raises many kinds of errors
        raise Refused(f"{NOT_A_FILE} of version 1 or 2") from error
    if dtype.kind not in KINDS or dtype.hasobject:
        raise Refused(f"the array has the dtype {str(dtype)[:50]}: send numbers or booleans")
    if len(shape) > MAX_DIMENSIONS or any(length < 0 for length in shape):
        raise Refused(f"the array has {len(shape)} dimensions, at most {MAX_DIMENSIONS} are read")
    start = file.tell()
    if math.prod(shape) * dtype.itemsize != len(data) - start:
        raise Refused(
            f"the .npy header promises {list(shape)[:8]} values of {dtype}, but the body has another number of bytes"
        )
    flat: NDArray[Any] = np.frombuffer(data, dtype, offset=start)
    try:
        return flat.reshape(shape, order="F" if fortran else "C")
    except ValueError as error:  # an empty array with dimensions past what numpy counts
        raise Refused(f"{NOT_A_FILE} that numpy can hold") from error


def encode(array: NDArray[Any]) -> bytes:
    """Encode an array. Raises ValueError for arrays of objects."""
    file = BytesIO()
    npy.write_array(file, np.asanyarray(array), allow_pickle=False)
    return file.getvalue()
