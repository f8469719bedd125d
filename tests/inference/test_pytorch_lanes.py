"""Lanes to the process of a PyTorch model, against a thread in its place."""

import os
import socket
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from oriel_inference.backends.pytorch.lane import BROKEN, MESSAGE_BYTES, Answer, Batch, Block, Lane
from oriel_inference.model import TensorInfo
from oriel_wire.v2.messages import Array

X = TensorInfo(name="x", datatype="FP32", shape=(-1, 4))
Reply = Callable[[Batch, Block], tuple[bytes, list[int]]]


def answer_of(reply: Reply, arrays: list[Array | None]) -> list[Array] | str:
    """Return the answer of a batch to which the other side replies so."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with control, theirs:
        lane = Lane(control, [X] * len(arrays), [X])
        _, descriptors, _, _ = socket.recv_fds(theirs, 16, 2)
        other, block = socket.socket(fileno=descriptors[0]), Block(descriptors[1])

        def serve() -> None:
            with other:
                batch = msgspec.msgpack.decode(other.recv(MESSAGE_BYTES), type=Batch)
                message, sent = reply(batch, block)
                socket.send_fds(other, [message], sent)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            return lane.run(arrays, [0])
        finally:
            thread.join()
            lane.socket.close()


def message(answer: Answer) -> bytes:
    return msgspec.msgpack.encode(answer)


def echo(batch: Batch, block: Block) -> tuple[bytes, list[int]]:
    """Return the first input that is there."""
    shape, at = next(each for each in batch.inputs if each is not None)
    data = block.memory(batch.size)[at : at + 4 * int(np.prod(shape))]
    return message(Answer([(shape, 0)], data)), []


def test_inputs_lie_in_shared_memory_and_small_outputs_in_the_message() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for given in (x, x[::-1], np.asfortranarray(x), x[:0]):
        found = answer_of(echo, [None, given])
        assert not isinstance(found, str)
        assert found[0].dtype == np.float32 and np.array_equal(found[0], given)


def test_large_outputs_are_views_of_the_memory_that_came_along() -> None:
    kept: list[Block] = []

    def reply(batch: Batch, block: Block) -> tuple[bytes, list[int]]:
        kept.append(Block())
        kept[0].memory(1 << 20)[64:68] = np.float32(7).tobytes()
        return message(Answer([((2, 4), 64)])), [kept[0].descriptor]

    found = answer_of(reply, [np.zeros((2, 4), np.float32)])
    kept.clear()
    assert not isinstance(found, str)
    assert found[0].shape == (2, 4) and found[0][0, 0] == 7 and not found[0].flags.owndata


def test_error_of_the_model_is_no_broken_lane() -> None:
    assert answer_of(lambda *_: (message(Answer([], error="no")), []), [np.zeros((1, 4), np.float32)]) == "no"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([["x"], b""]),
        message(Answer([])),
        message(Answer([((1, 4), 0)], b"short")),
        message(Answer([((1, 4), -8)], bytes(64))),
        message(Answer([((-2, -2), 0)], bytes(64))),
        message(Answer([((1 << 62, 4), 0)], bytes(64))),
    ],
)
def test_answer_that_cannot_be_read_breaks_the_lane(answer: bytes) -> None:
    with pytest.raises(BROKEN):
        answer_of(lambda *_: (answer, []), [np.zeros((1, 4), np.float32)])


def test_memory_that_could_be_made_smaller_breaks_the_lane() -> None:
    read, write = os.pipe()
    unsealable = os.memfd_create("memory")
    os.ftruncate(unsealable, 1 << 16)
    try:
        for descriptor in (read, unsealable):
            with pytest.raises(OSError):
                answer_of(
                    lambda *_, d=descriptor: (message(Answer([((1, 4), 0)])), [d]), [np.zeros((1, 4), np.float32)]
                )
    finally:
        for descriptor in (read, write, unsealable):
            os.close(descriptor)


def test_memory_without_a_seal_is_sealed_before_it_is_read() -> None:
    unsealed = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 1 << 16)
    assert answer_of(lambda *_: (message(Answer([((1, 4), 0)])), [unsealed]), [np.zeros((1, 4), np.float32)])
    with pytest.raises(PermissionError):
        os.ftruncate(unsealed, 0)
    os.close(unsealed)
