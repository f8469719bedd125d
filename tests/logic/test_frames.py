import gc
import pickle
import socket
import struct
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies.messages import Request
from oriel_logic.workers.frames import (
    HEAD,
    LONG_FROM,
    MAX_BUFFERS,
    FrameTooLarge,
    Kind,
    body_bound,
    decoded,
    encoded,
    offsets,
    pack,
    unpack,
)
from oriel_logic.workers.link import Link
from oriel_logic.workers.memory import MemoryBound
from oriel_wire.process.messages import ALIGN, Assembler, FrameError

SIZES = st.sampled_from([0, 1, 100, LONG_FROM - 1, LONG_FROM, LONG_FROM + 1, 300_000])
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


@given(MESSAGES)
def test_any_values_come_out_as_they_went_in(messages: list[tuple[Kind, Any, int]]) -> None:
    stream = b"".join(
        piece
        for kind, value, cpu_us in messages
        for piece in encoded(kind, pack(value, limit_bytes=1 << 24), cpu_us=cpu_us)
    )
    assembler, frames = Assembler(body_bound(1 << 24)), []
    while stream:
        into = assembler.buffer()
        count = min(len(into), len(stream))
        into[:count], stream = stream[:count], stream[count:]
        frames += [decoded(head, body) for head, body in assembler.received(count)]
    assert [frame.kind for frame in frames] == [kind for kind, _, _ in messages]
    assert [frame.cpu_us for frame in frames] == [min(cpu_us, 2**32 - 1) for _, _, cpu_us in messages]
    assert all(same(unpack(frame), value) for frame, (_, value, _) in zip(frames, messages, strict=True))


@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=20))
def test_buffers_do_not_overlap_in_their_body(sizes: list[int]) -> None:
    *starts, end = offsets(sizes)
    assert all(start % ALIGN == 0 for start in starts)
    ends = [start + size for start, size in zip(starts, sizes, strict=True)]
    assert all(before <= after for before, after in zip(ends, [*starts[1:], end], strict=True))


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"", "requires a buffer"),
        (HEAD.pack(99, 0), "99"),
        (HEAD.pack(Kind.RESULT, 0) + b"half", "12 bytes"),
        (HEAD.pack(Kind.RESULT, 0) + bytes(8 * (MAX_BUFFERS + 1)), "8208 bytes"),
        (HEAD.pack(Kind.RESULT, 0) + struct.pack("<Q", 2**60), "longer than its body"),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_before_it_is_unpacked(head: bytes, why: str) -> None:
    with pytest.raises(FrameError, match=why):
        decoded(memoryview(head), memoryview(bytes(10)))


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
    made: int = 0

    def __post_init__(self) -> None:
        if not self.body:
            raise ValueError("it has no body")
        self.made += 1


def test_a_value_with_a_long_body_arrives_as_it_is_and_is_not_made_anew() -> None:
    value = Ordinary(bytes(LONG_FROM))
    packed = pack(value, limit_bytes=1 << 24)
    assert len(packed.buffers) == 1
    assert pickle.loads(packed.payload, buffers=packed.buffers) == value


def test_more_long_buffers_than_a_frame_may_have_travel_too() -> None:
    value = [np.zeros(LONG_FROM, np.uint8)] * 3 + [np.full(LONG_FROM, n % 251, np.uint8) for n in range(MAX_BUFFERS)]
    packed = pack(value, limit_bytes=1 << 28)
    assert len(packed.buffers) == MAX_BUFFERS
    head, *body = encoded(Kind.RESULT, packed)
    frame = decoded(memoryview(head)[16 : 16 + HEAD.size + 8 * MAX_BUFFERS], memoryview(b"".join(body)))
    assert same(unpack(frame), value)


def test_arrays_arrive_as_writable_views_and_the_memory_ends_with_the_last_of_them() -> None:
    here, there = socket.socketpair()
    with here, there:
        sending = Thread(
            target=Link(here, MemoryBound(), limit_bytes=1 << 24).send,
            args=(Kind.RESULT, (np.ones(500_000, np.float32), Ordinary(bytes(70_000)))),
        )
        sending.start()
        frame = Link(there, MemoryBound(), limit_bytes=1 << 24).receive()
        sending.join()
    memory = weakref.ref(frame.body.obj)  # type: ignore[arg-type]  # an array, as the frame is large
    array, plain = unpack(frame)
    array += 1
    part = array[:10]
    del array
    assert plain == Ordinary(bytes(70_000)) and part.sum() == 20 and memory() is not None
    del part
    gc.collect()
    assert memory() is None, "neither the frame nor the link keeps it"
