"""The child process that converts large JSON for `large_json`: `python -m ... MEMORY LIMIT`.

MEMORY: address space of the process. LIMIT: the largest request in bytes of binary data. A request is a Task, the
length of the JSON part in front of binary tensors, -1 if all is JSON, and the name of its model. An answer is a Result
with that length, or with the text of a refusal. The sender of a hostile text can at most make it run out of memory or
time, or kill it.
"""

import gc
import sys
from collections.abc import Sequence
from enum import IntEnum

from oriel_inference.servers.load_body import unpack_files
from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.process.served import Requests, bound_memory, offer_to_oom_killer
from oriel_wire.v2.http import to_binary_request, to_json_response

__all__ = ["Result", "Task", "main"]

_Parts = Sequence[bytes | memoryview]
HEAP_BYTES = 8 << 20
_BLOCK_BYTES = 400  # of the largest blocks that Python's own heap has


class Task(IntEnum):
    """The conversion to make."""

    REQUEST = 1  # an infer request, its inputs as binary data
    RESPONSE = 2  # an infer response with binary outputs, as JSON alone
    LOAD = 3  # a load request, the files behind the rest


class Result(IntEnum):
    """The outcome of a conversion."""

    DONE = 0
    INVALID = 1
    TOO_LARGE = 2


def main() -> None:
    """Answer until there are no more requests."""
    memory_bytes, limit_bytes = [int(word) for word in sys.argv[1:3]]
    gc.disable()  # collecting cycles among millions of lists takes longer than reading them
    requests = Requests(niceness=5)  # with few cores the server's loop has priority
    bound_memory(memory_bytes)
    offer_to_oom_killer()
    pins = _keep_heap()
    gc.freeze()  # all present objects live until the end: they are not walked after each request
    while _serve(requests, limit_bytes):
        gc.collect()
    del pins


def _keep_heap() -> list[bytes]:
    """Have this process keep memory that it has freed for the next request, as long as the result lives.

    Otherwise a request costs some 2,000 page faults. Python returns a piece of its heap once all of it is free: one
    block of each stays in use. The C library keeps twice the size of the largest block that was freed.
    """
    bytes(2 * HEAP_BYTES)
    blocks = [bytes(_BLOCK_BYTES) for _ in range(HEAP_BYTES // _BLOCK_BYTES)]
    return blocks[:: (1 << 18) // _BLOCK_BYTES]  # a piece has 1 MiB


def _serve(requests: Requests, limit_bytes: int) -> bool:
    """Answer a request; return whether there was one."""
    given = requests.next()
    if given is not None:
        (task, length, model), body = given
        result, found, parts = _answer(Task(task), body, None if length < 0 else length, limit_bytes, model)
        requests.answer((result, found), parts)
    return given is not None


def _answer(
    task: Task, body: bytes, length: int | None, limit_bytes: int, model: str
) -> tuple[Result, int | str, _Parts]:
    try:
        length, parts = _work(task, body, length, limit_bytes, model)
        size = sum(len(part) for part in parts)
        if task is Task.REQUEST and size > limit_bytes:
            text = f"the request has {size} bytes as binary data, at most {limit_bytes} are accepted"
            return Result.TOO_LARGE, text, ()
        return Result.DONE, length, parts
    except TooLarge as error:
        return Result.TOO_LARGE, error.message, ()
    except BadMessage as error:
        return Result.INVALID, error.message.encode(errors="replace").decode(), ()
    except MemoryError:
        return Result.TOO_LARGE, "the JSON part needs too much memory: send tensors as binary data", ()


def _work(task: Task, body: bytes, length: int | None, limit_bytes: int, model: str) -> tuple[int, _Parts]:
    if task is Task.LOAD:
        parts, length = unpack_files(body)
        return length, parts
    if task is Task.RESPONSE:
        return -1, to_json_response(body, length or 0)
    parts, length = to_binary_request(body, length, limit_bytes, model)
    return length, parts


if __name__ == "__main__":
    main()
