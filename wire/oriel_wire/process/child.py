"""Runs one of our modules in a child process, without a shell, and exchanges bytes with it over pipes.

Work that may crash, hang or need much memory is done in a child, which can be killed without harm to the server.
The parent bounds the time of each write and read; the child bounds its own address space and files (`restrict_self`).
"""

import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO

PIECE_BYTES = 1 << 20  # of one write or read
EXIT_S = 5.0  # between the end of a process's pipes and its exit, on a busy machine
_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spawn(
    module: str,
    *arguments: str,
    stdin: int | IO[bytes] = subprocess.PIPE,
    stdout: int | IO[bytes] = subprocess.PIPE,
    stderr: int = subprocess.DEVNULL,
    environment: Mapping[str, str] | None = None,
) -> "subprocess.Popen[bytes]":
    """Run `python -m module arguments` with this interpreter and its import path; pipes are unbuffered.

    environment: None for the few variables that numeric libraries need, with one thread each. Raises OSError.
    """
    if environment is None:
        environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        environment |= dict.fromkeys(_ONE_THREAD, "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        bufsize=0,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


def restrict_self(memory_bytes: int | None = None, *, file_bytes: int = 0) -> None:
    """Called by a child: forbid core dumps, and files of more than `file_bytes`.

    memory_bytes: of address space, None for no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))


class Child:
    """A running child that reads requests from its input and writes answers to its output; its errors are dropped.

    One thread at a time may use it, but any thread may call `kill`. Deadlines are monotonic seconds. `write`, `read`,
    `read_line` and `wait` raise TimeoutError at the deadline. All but `wait` raise BrokenPipeError if the child has
    ended; call `end` then.
    """

    def __init__(self, module: str, *arguments: str, exit_s: float = EXIT_S) -> None:
        self._exit_s = exit_s
        self._process = process = spawn(module, *arguments)
        assert process.stdin is not None and process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        self._input_broken = False
        for pipe in (self._input, self._output):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def write(self, data: bytes | memoryview, deadline: float) -> None:
        """Write all of `data` to the child's input."""
        view = memoryview(data)
        while view:
            _wait(self._input.fileno(), select.POLLOUT, deadline)
            try:
                view = view[os.write(self._input.fileno(), view[:PIECE_BYTES]) :]
            except BrokenPipeError:
                self._input_broken = True
                raise

    def read(self, size: int, deadline: float) -> list[bytes]:
        """Read `size` bytes of the child's output, in pieces of at most PIECE_BYTES."""
        pieces: list[bytes] = []
        while size:
            pieces.append(self._read(size, deadline))
            size -= len(pieces[-1])
        return pieces

    def read_line(self, limit: int, deadline: float) -> bytes:
        """Read one line, which must be all there is to read. BrokenPipeError also if it exceeds `limit` bytes."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._read(limit, deadline)
            if len(line) > limit:
                raise BrokenPipeError
        return line

    def wait(self, deadline: float) -> None:
        """Wait until there is something to read."""
        _wait(self._output.fileno(), select.POLLIN, deadline)

    def kill(self) -> None:
        """Kill the process; a write or read under way in another thread fails. Nothing happens if it has ended."""
        self._process.kill()

    def end(self) -> int | None:
        """Kill the process, wait for it and close the pipes. Returns its exit code if it had ended by itself.

        May be called twice; returns None then.
        """
        if self._output.closed:
            return None
        try:
            # A process whose pipes are closed is about to exit. It closes them one after the other.
            ends = self._input_broken or self._output_ended()
            code = self._process.wait(self._exit_s) if ends else self._process.poll()
        except subprocess.TimeoutExpired:
            code = None
        self._process.kill()
        self._process.wait()
        self._input.close()
        self._output.close()
        return code

    def _read(self, size: int, deadline: float) -> bytes:
        _wait(self._output.fileno(), select.POLLIN, deadline)
        piece = os.read(self._output.fileno(), min(size, PIECE_BYTES))
        if not piece:
            raise BrokenPipeError
        return piece

    def _output_ended(self) -> bool:
        try:
            return not os.read(self._output.fileno(), 1)
        except BlockingIOError:
            return False


def _wait(descriptor: int, event: int, deadline: float) -> None:
    """Wait until the pipe can be used or is broken. Raises TimeoutError."""
    poll = select.poll()  # `select.select` fails for descriptors above 1023
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1e3):
        raise TimeoutError
