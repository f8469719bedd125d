"""Messages between two processes: any cut of the stream, bounds on sizes, and the ends of a connection."""

import asyncio
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_wire.process.messages import (
    ALIGN,
    SCRATCH_BYTES,
    Assembler,
    FrameError,
    MessageStream,
    frame,
    padded,
    receive,
    send,
)

from ..waiting import until

SIZES = st.sampled_from([0, 1, 15, 16, 100, SCRATCH_BYTES - 32, SCRATCH_BYTES, 300_000])


@settings(max_examples=60, deadline=None)
@given(
    frames=st.lists(st.tuples(st.binary(max_size=40), st.lists(SIZES, max_size=3)), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
)
def test_frames_survive_any_cut_of_the_stream(frames: list[tuple[bytes, list[int]]], cuts: list[int]) -> None:
    stream, expected = b"", []
    for head, sizes in frames:
        body: list[Any] = []
        for size in sizes:
            padded(bytes(range(251)) * (size // 251) + bytes(size % 251), body)
        stream += b"".join(frame(head, body))
        expected.append((head, b"".join(body)))
    assembler, found, at, turn = Assembler(), list[Any](), 0, 0
    while at < len(stream):
        into = assembler.buffer()
        count = min(len(into), cuts[turn % len(cuts)], len(stream) - at)
        into[:count] = stream[at : at + count]
        found += assembler.received(count)
        at, turn = at + count, turn + 1
    assert [(bytes(head), bytes(body)) for head, body in found] == expected
    for _, body in found:
        array = np.frombuffer(body, np.uint8)
        assert array.flags.writeable and array.ctypes.data % ALIGN == 0


@pytest.mark.parametrize("data", [b"x" * 32, b"oPY1" + b"\xff" * 28, frame(b"", [bytes(1001)])[0]])
def test_what_is_no_frame_or_too_large_is_refused_by_its_header(data: bytes) -> None:
    assembler = Assembler(1000)
    assembler.buffer()[: len(data)] = data
    with pytest.raises(FrameError, match="malformed or too large"):
        assembler.received(len(data))


def test_a_body_over_the_bound_is_not_sent() -> None:
    with pytest.raises(FrameError, match="more than fit"):
        frame(b"", [bytes(1001)], max_body_bytes=1000)


class End:
    """One end on the loop, and what it has received."""

    def __init__(self, max_body_bytes: int = 1 << 30) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.lost: list[str] = []
        self.stream = MessageStream(max_body_bytes=max_body_bytes, on_frame=self._take, on_lost=self.lost.append)

    def _take(self, head: memoryview, body: memoryview) -> None:
        self.frames.append((bytes(head), bytes(body)))


async def test_a_stream_and_a_blocking_end_exchange_more_than_a_socket_holds() -> None:
    ours, theirs = socket.socketpair()
    end, pieces = End(), [bytes([number % 251]) * 5000 for number in range(1200)]

    def echo() -> None:
        assembler = Assembler()
        with theirs:
            while not (frames := receive(theirs, assembler)):
                pass
            ((head, body),) = frames
            send(theirs, frame(bytes(head), [body[at : at + 5000] for at in range(0, len(body), 5000)]))

    thread = threading.Thread(target=echo)
    thread.start()
    await end.stream.open(ours)
    end.stream.send(frame(b"head", pieces))
    await until(lambda: end.lost)
    thread.join()
    assert end.frames == [(b"head", b"".join(pieces))] and end.lost == [""] and not end.stream.is_open


async def test_a_frame_that_cannot_be_read_ends_the_stream_with_its_problem() -> None:
    ours, theirs = socket.socketpair()
    end = End(max_body_bytes=10)
    with theirs:
        await end.stream.open(ours)
        send(theirs, frame(b"good") + frame(b"bad", [bytes(11)]))
        await until(lambda: end.lost)
    assert end.lost == ["a message is malformed or too large"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_closed_stream_reports_its_end_once_and_no_frame(when: str) -> None:
    ours, theirs = socket.socketpair()
    end = End()
    with theirs:
        send(theirs, frame(b"late"))
        if when == "before":
            end.stream.close()
        opening = asyncio.ensure_future(end.stream.open(ours))
        if when == "after":
            await asyncio.sleep(0)
        end.stream.close()
        end.stream.close()
        await asyncio.wait([opening])
        await until(lambda: end.lost)
        end.stream.send(frame(b"nothing"))
        assert end.lost == [""] and not end.stream.is_open


def test_a_blocking_end_fails_once_the_other_has_gone() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        with pytest.raises(OSError, match="gone"):
            receive(ours, Assembler())
        with pytest.raises(OSError):
            send(ours, frame(b"", [bytes(10)]))
