"""The side of `helper` in the child: reads requests, writes answers, and bounds its own process.

It imports little, because each child starts with it.
"""

import json
import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import Any

HEAD = Struct("<IQ")  # bytes of the JSON value and of the body
PIECE_BYTES = 1 << 20  # bytes of one write or read

Parts = Sequence[bytes | memoryview]


class Requests:
    """The requests of the parent process, and the answers to it. Made once, before anything else is imported.

    It takes over standard input and output: runtimes may print, which must not become part of an answer. From then on
    the process dumps no core.

    niceness: added to that of the parent process, because serving goes first.
    file_bytes: bound on each file that the process writes; None for no bound.
    """

    def __init__(self, *, niceness: int = 0, file_bytes: int | None = 0) -> None:
        self._input = os.fdopen(os.dup(0), "rb")
        self._output = os.dup(1)
        silent = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1):
            os.dup2(silent, descriptor)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        os.nice(niceness)

    def next(self) -> tuple[Any, bytes] | None:
        """Wait for a request; return its value and its body, None when the parent has no more."""
        head = self._input.read(HEAD.size)
        if len(head) < HEAD.size:
            return None
        size, body_bytes = HEAD.unpack(head)
        return json.loads(self._input.read(size)), self._input.read(body_bytes)

    def answer(self, value: Any, parts: Parts = ()) -> None:
        """Send an answer."""
        text = json.dumps(value).encode()
        for part in (HEAD.pack(len(text), sum(map(len, parts))), text, *parts):
            view = memoryview(part)
            while view:
                view = view[os.write(self._output, view[:PIECE_BYTES]) :]


def bound_memory(size_bytes: int) -> None:
    """Bound the address space of this process, once everything is imported; 0 for no bound.

    Raises MemoryError if more is taken already: unused parts of it could otherwise let small models run by chance.
    """
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if not size_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
        return
    with suppress(OSError):  # not Linux
        taken = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        if taken > size_bytes:
            raise MemoryError(
                f"the runtime alone takes {taken} bytes of address space, of {size_bytes} that it may take"
            )
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes, hard))


def offer_to_oom_killer() -> None:
    """Let the kernel end this process, and not the server, when the machine runs out of memory."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
