"""The child process that converts large JSON for `large_json`: `python -m ... MEMORY SECONDS LIMIT`.

MEMORY, SECONDS: limits for one conversion. LIMIT: the largest request in bytes of binary data. It reads and writes one
frame at a time (`large_json_frames`) and exits at the end of its input. The sender of a hostile text can at most make
it run out of memory or time, or kill it.
"""

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from oriel_inference.servers.large_json_frames import FRAME, Result, Task
from oriel_inference.servers.load_body import unpack_files
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.process.child import PIECE_BYTES, restrict_self
from oriel_wire.v2.http import to_binary_request, to_json_response

__all__ = ["main"]

_Parts = Sequence[bytes | memoryview]


def main() -> None:
    """Answer until the input ends."""
    memory_bytes, timeout_s, limit_bytes = [int(word) for word in sys.argv[1:4]]
    gc.disable()  # collecting cycles among millions of lists takes longer than reading them
    restrict_self(memory_bytes)
    os.nice(5)  # with few cores the server's loop has priority
    with contextlib.suppress(OSError):
        # If the machine runs out of memory, the kernel should kill this process and not the server.
        Path("/proc/self/oom_score_adj").write_text("1000")
    gc.freeze()  # what lives now lives until the end: it is not walked after each request
    read = sys.stdin.buffer.read
    while len(head := read(FRAME.size)) == FRAME.size:
        # The process ends itself if its parent is no longer there to kill it.
        signal.alarm(timeout_s)
        code, length, size = FRAME.unpack(head)
        _write(*_answer(Task(code), read(size), None if length < 0 else length, limit_bytes))
        signal.alarm(0)
        gc.collect()


def _answer(task: Task, body: bytes, length: int | None, limit_bytes: int) -> tuple[Result, int, _Parts]:
    try:
        length, parts = _work(task, body, length, limit_bytes)
        size = sum(len(part) for part in parts)
        if task is Task.REQUEST and size > limit_bytes:
            text = f"the request has {size} bytes as binary data, at most {limit_bytes} are accepted"
            return Result.TOO_LARGE, 0, [text.encode()]
        return Result.DONE, length, parts
    except TooLarge as error:
        return Result.TOO_LARGE, 0, [error.message.encode()]
    except BadMessage as error:
        return Result.INVALID, 0, [error.message.encode(errors="replace")]
    except MemoryError:
        return Result.TOO_LARGE, 0, [b"the JSON part needs too much memory: send tensors as binary data"]


def _work(task: Task, body: bytes, length: int | None, limit_bytes: int) -> tuple[int, _Parts]:
    if task is Task.LOAD:
        parts, length = unpack_files(body)
        return length, parts
    if task is Task.RESPONSE:
        return -1, to_json_response(body, length or 0)
    parts, length = to_binary_request(body, length, limit_bytes)
    return length, parts


def _write(result: Result, length: int, parts: _Parts) -> None:
    size = sum(len(part) for part in parts)
    for part in (FRAME.pack(result, length, size), *parts):
        view = memoryview(part)
        while view:
            view = view[os.write(1, view[:PIECE_BYTES]) :]


if __name__ == "__main__":
    main()
