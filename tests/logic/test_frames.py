import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.workers.frames import HEADER, FrameTooLarge, Kind, Unframer, decode, encode

VALUES = st.lists(st.tuples(st.sampled_from(list(Kind)), st.binary(max_size=40), st.integers(0, 2**33)), max_size=6)


@given(VALUES, st.lists(st.integers(1, 30), min_size=1))
def test_any_chunking_gives_the_same_frames(values: list[tuple[Kind, bytes, int]], sizes: list[int]) -> None:
    stream = b"".join(encode(kind, value, limit_bytes=1000, cpu_us=cpu) for kind, value, cpu in values)
    unframer, frames, position, turn = Unframer(1000), [], 0, 0
    while position < len(stream):
        size = sizes[turn % len(sizes)]
        frames += unframer.feed(stream[position : position + size])
        position, turn = position + size, turn + 1
    assert [(f.kind, decode(f), f.cpu_us) for f in frames] == [(k, v, min(c, 2**32 - 1)) for k, v, c in values]


def test_a_length_over_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameTooLarge):
        Unframer(10).feed(HEADER.pack(11, Kind.RESULT, 0))


def test_an_unknown_kind_is_no_frame() -> None:
    with pytest.raises(ValueError, match="99"):
        Unframer(10).feed(HEADER.pack(0, 99, 0))
