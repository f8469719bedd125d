import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies.messages import Request
from oriel_logic.workers.frames import HEADER, SHARED_FROM, Frame, FrameTooLarge, Kind, Unframer, head, offsets, pack
from oriel_logic.workers.link import Link
from oriel_logic.workers.segments import drop, unpack, written

SIZES = st.sampled_from([0, 1, 100, SHARED_FROM - 1, SHARED_FROM, SHARED_FROM + 1, 300_000])
LONG_OR_SHORT = st.one_of(
    st.binary(max_size=40),
    SIZES.map(lambda size: bytes(range(251)) * (size // 251) + bytes(size % 251)),
    SIZES.map(lambda size: np.arange(size, dtype=np.uint8)),
    SIZES.map(lambda size: np.arange(size // 4, dtype=np.float32).reshape(1, -1)),
)
VALUES = st.recursive(
    LONG_OR_SHORT,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(st.tuples(st.sampled_from(list(Kind)), VALUES, st.integers(0, 2**33)), max_size=5)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[name], right[name]) for name in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@given(MESSAGES, st.lists(st.integers(1, 70_000), min_size=1))
def test_any_values_in_any_chunks_come_out_as_they_went_in(
    messages: list[tuple[Kind, Any, int]], sizes: list[int]
) -> None:
    stream, descriptors = b"", []
    for kind, value, cpu_us in messages:
        data, shared = head(kind, pack(value, limit_bytes=1 << 24), cpu_us=cpu_us)
        if shared:
            descriptors.append((len(stream), written(shared)))
        assert len(data) <= SHARED_FROM + HEADER.size + 8 * len(shared)
        stream += data
    unframer, frames, position, turn = Unframer(1 << 24), [], 0, 0
    while position < len(stream):
        end = min(len(stream), position + sizes[turn % len(sizes)])
        came = [each for start, each in descriptors if position <= start < end]  # with the frame's first byte
        frames += unframer.feed(stream[position:end], came)
        position, turn = end, turn + 1
    assert [frame.kind for frame in frames] == [kind for kind, _, _ in messages]
    assert [frame.cpu_us for frame in frames] == [min(cpu_us, 2**32 - 1) for _, _, cpu_us in messages]
    assert all(same(unpack(frame), value) for frame, (_, value, _) in zip(frames, messages, strict=True))
    assert unframer.left_over() == []


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_buffers_do_not_overlap_in_their_segment(sizes: list[int]) -> None:
    *starts, end = offsets(sizes)
    assert all(start % 64 == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(before <= after for before, after in zip(ends, [*starts[1:], end], strict=True))


def test_a_length_over_the_bound_is_refused_before_its_bytes_come() -> None:
    with pytest.raises(FrameTooLarge):
        Unframer(10).feed(HEADER.pack(11, Kind.RESULT, 0, 0, 0))
    with pytest.raises(FrameTooLarge):
        Unframer(10).feed(HEADER.pack(1, Kind.RESULT, 0, 0, 1025))
    with pytest.raises(FrameTooLarge):
        Unframer(10).feed(HEADER.pack(0, Kind.RESULT, 0, 0, 1) + (2**60).to_bytes(8, "big"))


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (HEADER.pack(0, 99, 0, 0, 0), "99"),
        (HEADER.pack(0, Kind.RESULT, 0, 0, 1) + bytes(8), "segment"),
        (HEADER.pack(0, Kind.RESULT, 1, 0, 0), "no payload"),
    ],
)
def test_what_is_no_frame_is_said(header: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Unframer(10).feed(header)


def test_values_over_the_bound_are_not_packed_and_out_of_band_bytes_count() -> None:
    for value in (bytes(2000), np.zeros(200_000, np.uint8), [bytes(100_000)]):
        with pytest.raises(FrameTooLarge):
            pack(value, limit_bytes=1000)


@pytest.mark.parametrize(
    "make", [lambda b: b, lambda b: (b, 1), lambda b: {"a": b}, lambda b: Request(body=b), lambda b: ("r", (b,), None)]
)
def test_long_bytes_are_not_copied_into_the_pickle(make: Callable[[bytes], Any]) -> None:
    packed = pack(make(bytes(1_000_000)), limit_bytes=1 << 24)
    assert [buffer.nbytes for buffer in packed.buffers] == [1_000_000]
    assert len(packed.payload) < 1000


@dataclass
class Ordinary:
    body: bytes


def test_arrays_arrive_as_writable_views_and_the_memory_ends_with_the_last_of_them() -> None:
    here, there = socket.socketpair()
    with here, there:
        before = mapped()
        Link(here, limit_bytes=1 << 24).send(Kind.RESULT, (np.ones(500_000, np.float32), Ordinary(bytes(70_000))))
        array, plain = unpack(Link(there, limit_bytes=1 << 24).receive())
        array += 1
        part = array[:10]
        assert plain == Ordinary(bytes(70_000)) and mapped() > before
        del array
        assert part.sum() == 20
        del part
        assert mapped() == before


def mapped() -> int:
    """Segments that this process maps or holds open."""
    with open("/proc/self/maps") as maps:
        held = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if is_open(name)]
        return sum("memfd:oriel" in line for line in [*maps, *held])


def is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


def test_a_frame_that_nobody_wants_leaves_nothing_behind() -> None:
    data, shared = head(Kind.RESULT, pack(bytes(100_000), limit_bytes=1 << 20))
    (frame,) = Unframer(1 << 20).feed(data, [written(shared)])
    drop(frame)
    drop(frame)
    assert frame.descriptor == -1
    assert isinstance(frame, Frame)


def test_a_segment_that_is_shorter_than_it_says_is_not_mapped() -> None:
    frame = Frame(Kind.RESULT, 0, b"", (100_000,), written([memoryview(b"short")]), True)
    with pytest.raises(ValueError, match="length"):
        unpack(frame)
