from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oriel_logic.bodies import npy
from oriel_logic.errors import Refused

ARRAYS = hnp.arrays(
    st.sampled_from(["<f4", ">f8", "<i2", "u1", "?", "<c8"]),
    hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


def saved(array: Any, *, pickled: bool = False) -> bytes:
    file = BytesIO()
    np.save(file, array, allow_pickle=pickled)
    return file.getvalue()


@given(ARRAYS, st.booleans())
def test_arrays_read_back_without_a_copy(array: Any, fortran: bool) -> None:
    data = saved(np.asfortranarray(array) if fortran else array)
    read = npy.decode(data)
    np.testing.assert_array_equal(read, array)
    assert read.dtype == array.dtype and not read.flags.writeable
    np.testing.assert_array_equal(npy.decode(npy.encode(array)), array)


def test_pickles_and_text_are_no_numbers() -> None:
    for data in (
        saved(np.array([{}], dtype=object), pickled=True),
        saved(np.array(["a"])),
        saved(np.zeros(2, "<M8[s]")),
    ):
        with pytest.raises(Refused, match="send numbers or booleans"):
            npy.decode(data)
    with pytest.raises(ValueError, match="allow_pickle"):
        npy.encode(np.array([{}], dtype=object))


def header(text: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x07\x00" + b" " * 100,
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000000,)}\n"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}\n"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}\n", bytes(12)),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 4611686018427387904, 8)}\n"),
        header(b"{'descr': '<f4', 'fortran_order': False, 'shape': " + str((1,) * 33).encode() + b"}\n", bytes(4)),
        header(b"{'descr': [('a', 'O')], 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
        header(b"(" * 4000),
        header(b" " * (npy.MAX_HEADER_BYTES + 1)),
        header(b"__import__('os')\n"),
    ],
)
def test_headers_that_lie_are_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        npy.decode(data)


@given(st.binary(max_size=100), st.integers(0, 130))
def test_any_bytes_are_an_array_or_a_refusal(noise: bytes, at: int) -> None:
    body = bytearray(saved(np.zeros(3, np.float32)))
    body[at : at + len(noise)] = noise
    for each in (noise, npy.MAGIC + noise, bytes(body)):
        try:
            assert npy.decode(each).dtype.kind in npy.KINDS
        except Refused as refused:
            assert str(refused)
