"""A lane to the process of a model: one batch at a time. The messages of both sides, and the server's side.

Inputs are copied into shared memory once, outputs once by the process of the model; the arrays of a batch's outputs are
views of the memory that it has sent, and that memory lives as long as they do. Outputs of few bytes come in the message
itself. Shared memory is sealed before it is read: nobody can make it smaller, and nobody reads behind its end.
"""

import fcntl
import math
import mmap
import os
import socket
import weakref
from collections.abc import Sequence

import msgspec
import numpy as np

from oriel_inference.model import TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

ALIGN = 64
SMALL_BYTES = 1 << 15
MESSAGE_BYTES = 1 << 17
RUN_S = 600.0
BROKEN = (OSError, ValueError, OverflowError, msgspec.MsgspecError)

Position = tuple[tuple[int, ...], int]  # the shape of a tensor, and where it begins


class Batch(msgspec.Struct, array_like=True):
    """One batch for the model.

    inputs: None for an optional one that is left out. size: the bytes of all. wanted: the numbers of the outputs.
    """

    inputs: list[Position | None]
    size: int
    wanted: list[int]


class Answer(msgspec.Struct, array_like=True):
    """The outputs of a batch. data: their bytes, unless shared memory comes along. error: why there are none."""

    outputs: list[Position]
    data: bytes = b""
    error: str = ""


class Block:
    """Shared memory. descriptor: its file, which the block owns; None makes a new one. Raises OSError."""

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("oriel-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # also where the other side has left it out
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def memory(self, size: int = 1) -> mmap.mmap:
        """Return all of the memory, enlarged to at least `size` bytes."""
        if self._map is None or len(self._map) < size:
            there = os.fstat(self.descriptor).st_size
            if there < size:
                there = 1 << (size - 1).bit_length()
                os.ftruncate(self.descriptor, there)
            self._map = mmap.mmap(self.descriptor, there)
        return self._map


def arrange(tensors: Sequence[tuple[tuple[int, ...], int]]) -> tuple[list[Position], int]:
    """Return where each tensor begins when they follow one another, and the bytes of all. tensors: shapes and bytes."""
    found: list[Position] = []
    end = 0
    for shape, size in tensors:
        found.append((shape, end))
        end += size + -size % ALIGN
    return found, end


class Lane:
    """The server's side. One thread at a time may use it.

    control: the socket to the process, through which the other end goes there.
    inputs, outputs: the tensors of the model, in the order of the configuration.
    """

    def __init__(self, control: socket.socket, inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]) -> None:
        self._inputs = [DATATYPES[info.datatype].dtype for info in inputs]
        self._outputs = [DATATYPES[info.datatype].dtype for info in outputs]
        self._block = Block()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Answer).decode
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(RUN_S)
        with theirs:
            socket.send_fds(control, [b"lane"], [theirs.fileno(), self._block.descriptor])

    def run(self, arrays: Sequence[Array | None], wanted: list[int]) -> list[Array] | str:
        """Run one batch; blocks. Returns the outputs, or why there are none. arrays: one for each input.

        Raises one of BROKEN if the process has ended or has sent what cannot be read.
        """
        there = [array for array in arrays if array is not None]
        positions, size = arrange([(array.shape, array.nbytes) for array in there])
        memory = self._block.memory(max(size, 1))
        for array, (_, at) in zip(there, positions, strict=True):
            slot = np.frombuffer(memory, np.uint8, array.nbytes, at)
            np.copyto(slot, np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        following = iter(positions)
        inputs = [None if array is None else next(following) for array in arrays]
        self.socket.send(self._encode(Batch(inputs, max(size, 1), wanted)))
        message, descriptors, *_ = socket.recv_fds(self.socket, MESSAGE_BYTES, 1)
        if not message:
            raise ConnectionResetError("it closed its socket")
        shared = Block(descriptors[0]) if descriptors else None
        answer = self._decode(message)
        if answer.error:
            return answer.error
        whole = np.frombuffer(bytearray(answer.data) if shared is None else shared.memory(), np.uint8)
        found: list[Array] = []
        for index, (shape, at) in zip(wanted, answer.outputs, strict=True):
            dtype = self._outputs[index]
            size = math.prod(shape) * dtype.itemsize
            if min(at, size, len(whole) - at - size) < 0:
                raise ValueError("it sent an output that lies outside its memory")
            found.append(whole[at : at + size].view(dtype).reshape(shape))
        return found
