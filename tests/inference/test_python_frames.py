"""The bytes between the server and a Python model's process."""

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.backends.python.frames import decode, encode, read_tensors, tensor_parts
from oriel_inference.backends.python.messages import (
    Answers,
    Execute,
    RequestHead,
    ResultHead,
    Say,
    TensorHead,
)
from oriel_wire.errors import BadMessage
from oriel_wire.process.messages import ALIGN, Assembler, FrameError

ARRAYS = {
    "BOOL": np.array([[True], [False]]),
    "INT8": np.arange(-3, 4, dtype=np.int8),
    "UINT64": np.array([2**64 - 1], np.uint64),
    "FP16": np.array([[1.5, -2.0]], np.float16),
    "FP32": np.arange(40_000, dtype=np.float32).reshape(2, -1),
    "FP64": np.zeros((3, 0), np.float64),
    "BF16": np.array([16256], np.uint16),
    "BYTES": np.array([[b"", b"a\0b"], ["grüße".encode(), b"x" * 100]], dtype=object),
}


def execute(number: int, names: list[str]) -> list[Any]:
    body: list[Any] = []
    heads = tensor_parts([(name, name, ARRAYS[name]) for name in names], body)
    head = RequestHead(number, "r", 0, 0, 0, {"a": 1, "b": "c", "d": True, "e": 0.5}, ["y"], 1.0, 2.0, 3.0, heads)
    return encode(Execute(number, [head]), body)


@settings(max_examples=60, deadline=None)
@given(
    frames=st.lists(st.lists(st.sampled_from(sorted(ARRAYS)), max_size=4), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 200_000), min_size=1, max_size=20),
)
def test_frames_survive_any_cut_of_the_stream(frames: list[list[str]], cuts: list[int]) -> None:
    stream = b"".join(b"".join(execute(number, names)) for number, names in enumerate(frames))
    assembler, found, at, turn = Assembler(), [], 0, 0
    while at < len(stream):
        into = assembler.buffer()
        count = min(len(into), cuts[turn % len(cuts)], len(stream) - at)
        into[:count] = stream[at : at + count]
        found += assembler.received(count)
        at, turn = at + count, turn + 1
    messages = [(cast(Execute, decode(head)), body) for head, body in found]
    assert [message.batch for message, _ in messages] == list(range(len(frames)))
    for (message, body), names in zip(messages, frames, strict=True):
        parts, end = read_tensors(message.requests[0].inputs, body)
        assert end == len(body) and [name for name, _, _ in parts] == names
        for name, datatype, array in parts:
            assert datatype == name and array.dtype == ARRAYS[name].dtype and array.shape == ARRAYS[name].shape
            assert np.array_equal(array, ARRAYS[name])
            assert array.flags.aligned and array.flags.writeable


def test_bodies_are_aligned() -> None:
    body: list[Any] = []
    tensor_parts([("a", "INT8", ARRAYS["INT8"]), ("b", "FP32", ARRAYS["FP32"])], body)
    assert sum(map(len, body)) % ALIGN == 0 and sum(map(len, body[:2])) == ALIGN


def feed(data: bytes, **limits: int) -> None:
    assembler = Assembler(**limits)
    assembler.buffer()[: len(data)] = data
    for head, _ in assembler.received(len(data)):
        decode(head)


@pytest.mark.parametrize(
    "data",
    [
        b"oPY1" + (3).to_bytes(4, "little") + bytes(8) + b"abc" + bytes(13),
        b"".join(encode(Say(20, "hello")))[:16] + bytes(32),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        feed(data)


@pytest.mark.parametrize(
    "head",
    [
        TensorHead("t", "FP32", (4,), 17),
        TensorHead("t", "FP32", (4,), -1),
        TensorHead("t", "FP33", (4,), 16),
        TensorHead("t", "FP32", (-4,), 16),
        TensorHead("t", "FP32", (2**40, 2**40), 16),
        TensorHead("t", "BYTES", (2**30,), 16),
    ],
)
def test_a_tensor_that_lies_about_itself_is_refused(head: TensorHead) -> None:
    with pytest.raises((FrameError, BadMessage)):
        read_tensors([head], memoryview(bytearray(16)))


def test_an_answer_without_tensors_is_small() -> None:
    frame = b"".join(encode(Answers(1, 0.0, 1.0, [ResultHead(error=(3, "no"))])))
    assert len(frame) < 80
