"""The process that reads and writes large JSON: `python -m ... MEMORY SECONDS LIMIT`.

MEMORY, SECONDS: bounds of one text. LIMIT: bytes that a request may become. Frames in, frames out, one at a time
(`large_json_frames`). It may run out of memory or time, or die: whoever sent the text gains nothing but that. Ends
when its input ends.
"""

import contextlib
import gc
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from oriel_inference.servers.large_json_frames import FRAME, PIECE_BYTES, Result, Task
from oriel_inference.servers.load_body import unpack_files
from oriel_wire.errors import BadMessage
from oriel_wire.v2.http import to_binary_request, to_json_response

__all__ = ["main"]

_Parts = Sequence[bytes | memoryview]


def main() -> None:
    """Answer until the input ends."""
    memory_bytes, timeout_s, limit_bytes = [int(word) for word in sys.argv[1:4]]
    gc.disable()  # looking for cycles among millions of lists took longer than reading them
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    os.nice(5)  # where cores are few, the server's loop goes first
    with contextlib.suppress(OSError):
        # If the machine runs out of memory it shall be this process that ends, not the server.
        Path("/proc/self/oom_score_adj").write_text("1000")
    read = sys.stdin.buffer.read
    while len(head := read(FRAME.size)) == FRAME.size:
        # Should nobody be left to kill this process, it ends itself.
        signal.alarm(timeout_s)
        code, length, size = FRAME.unpack(head)
        _write(*_answer(Task(code), read(size), None if length < 0 else length, limit_bytes))
        signal.alarm(0)
        gc.collect()


def _answer(task: Task, body: bytes, length: int | None, limit_bytes: int) -> tuple[Result, int, _Parts]:
    try:
        length, parts = _work(task, body, length)
        size = sum(len(part) for part in parts)
        if task is Task.REQUEST and size > limit_bytes:
            text = f"the request has {size} bytes as binary data, at most {limit_bytes} are accepted"
            return Result.TOO_LARGE, 0, [text.encode()]
        return Result.DONE, length, parts
    except BadMessage as error:
        return Result.INVALID, 0, [error.message.encode(errors="replace")]
    except MemoryError:
        return Result.TOO_LARGE, 0, [b"the JSON part needs too much memory: send tensors as binary data"]


def _work(task: Task, body: bytes, length: int | None) -> tuple[int, _Parts]:
    if task is Task.LOAD:
        parts, length = unpack_files(body)
        return length, parts
    if task is Task.RESPONSE:
        return -1, to_json_response(body, length or 0)
    parts, length = to_binary_request(body, length)
    return length, parts


def _write(result: Result, length: int, parts: _Parts) -> None:
    size = sum(len(part) for part in parts)
    for part in (FRAME.pack(result, length, size), *parts):
        view = memoryview(part)
        while view:
            view = view[os.write(1, view[:PIECE_BYTES]) :]


if __name__ == "__main__":
    main()
