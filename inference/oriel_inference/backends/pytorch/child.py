"""The process of a PyTorch model: `python -m oriel_inference.backends.pytorch.child CONTROL`.

It imports PyTorch, waits for the program that it is to load, and then answers on its lanes, each in a thread. Errors of
the model are answers; what crashes PyTorch ends the process, which the server notices.
"""

import ctypes
import gc
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

from oriel_wire.process.served import Requests, offer_to_oom_killer

_requests = Requests(file_bytes=None)
# `torch.export.load` falls back to unpickling whatever the file holds, unless this forbids it.
os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"

import msgspec
import torch

from oriel_inference.backends import without_folders
from oriel_inference.backends.pytorch.lane import MESSAGE_BYTES, SMALL_BYTES, Answer, Batch, Block, Position, arrange
from oriel_inference.backends.pytorch.names import Unfit
from oriel_inference.backends.pytorch.programs import Model

_MALLOC_OPTIONS = ((-1, 256 << 20), (-3, 32 << 20))  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD


def main() -> None:
    """Load the program, and serve it until the server is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    offer_to_oom_killer()
    _keep_freed_memory()
    while (given := _requests.next()) is not None and given[0] == "gpus":
        _requests.answer(torch.cuda.device_count())
    if given is None:
        return
    try:
        model = Model(given[0])
    except Exception as error:
        _requests.answer(_words(error))
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # nobody reads what is printed from now on
    gc.collect()
    gc.freeze()
    _requests.answer("")
    threading.Thread(target=_accept, args=(control, model), daemon=True).start()
    _requests.next()


def _keep_freed_memory() -> None:
    """Let the C library keep memory that a batch has freed: the next one would otherwise fault its pages in again."""
    with suppress(AttributeError):  # not glibc
        for option, value in _MALLOC_OPTIONS:
            ctypes.CDLL(None).mallopt(option, value)


def _accept(control: socket.socket, model: Model) -> None:
    while descriptors := socket.recv_fds(control, 16, 2)[1]:
        lane, block = socket.socket(fileno=descriptors[0]), Block(descriptors[1])
        threading.Thread(target=_serve, args=(lane, block, model), daemon=True).start()


def _serve(lane: socket.socket, block: Block, model: Model) -> None:
    model.set_up_thread()
    decode, encode = msgspec.msgpack.Decoder(Batch).decode, msgspec.msgpack.Encoder().encode
    while message := lane.recv(MESSAGE_BYTES):
        shared: list[Block] = []
        try:
            answer = _run(decode(message), block, model, shared)
        except Exception as error:
            shown = isinstance(error, Unfit) or not model.runs_python
            answer = Answer([], error=_words(error) if shown else "the model's code failed")
        socket.send_fds(lane, [encode(answer)], [each.descriptor for each in shared])


def _run(batch: Batch, block: Block, model: Model, shared: list[Block]) -> Answer:
    """Run a batch whose inputs lie in `block`. shared: gets the memory of the outputs, if they are not small."""
    tensors = [
        None if position is None else _tensor(block.memory(batch.size), position, dtype)
        for position, dtype in zip(batch.inputs, model.dtypes, strict=True)
    ]
    found = model.run(tensors, batch.wanted)
    positions, size = arrange([(tuple(each.shape), each.nbytes) for each in found])
    if size > SMALL_BYTES:
        shared.append(Block())
    memory: Any = shared[0].memory(size) if shared else bytearray(size)
    for each, position in zip(found, positions, strict=True):
        _tensor(memory, position, each.dtype).copy_(each)
    return Answer(positions, b"" if shared else memory)


def _tensor(memory: Any, position: Position, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor that lies at a position of some memory."""
    shape, at = position
    elements = torch.Size(shape).numel()
    if not elements:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=elements, offset=at).view(shape)


def _words(error: Exception) -> str:
    """Return the last line of an error: TorchScript puts its own traceback before it, and C++ its own behind it."""
    lines = [line for line in str(error).partition("\nException raised from ")[0].splitlines() if line.strip()]
    return without_folders(lines[-1] if lines else type(error).__name__)[:400]


if __name__ == "__main__":
    main()
