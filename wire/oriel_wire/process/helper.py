"""Runs one of our modules in a child process and asks it one thing after the other.

Work that may crash, hang or need much memory is done in a helper, which can be killed without harm to the server. A
request and an answer are each one frame: `HEAD`, a JSON value and a body of bytes. The helper's side is `served`.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from fcntl import fcntl
from typing import Any

from oriel_wire.process.environment import selected
from oriel_wire.process.served import HEAD, PIECE_BYTES, Parts
from oriel_wire.process.start import THREADS, ChildProcess

MAX_VALUE_BYTES = 1 << 20
MAX_ERROR_BYTES = 4096  # last bytes of a helper's stderr that are kept
EXIT_S = 5.0  # between the end of a process's pipes and its exit, on a busy machine
F_SETPIPE_SZ = 1031  # as `fcntl` has it on Linux only
POLL_S = 0.5  # between two tests whether an answer is still wanted


class HelperLate(Exception):
    """The helper did not answer in time, and was killed."""


class HelperUnwanted(Exception):
    """The answer was not wanted any more, and the helper was killed."""


class HelperEnded(Exception):
    """The helper has ended, or has answered something that cannot be read.

    code: its exit code, a negative number for a signal; None if it was killed because its answer cannot be read.
    words: the last line that it has printed to stderr, "" if there is none.
    """

    def __init__(self, code: int | None, words: str) -> None:
        self.code = code
        self.words = words
        how = "gave an answer that cannot be read" if code is None else f"ended with code {code}"
        super().__init__(f"{how}: {words}" if words else how)


def _always() -> bool:
    return True


class Helper:
    """A child process that is started when it is first asked, and anew when it is asked after it has ended.

    One thread at a time may use it, but any thread may call `close`.

    module, arguments: the child runs `python -m module arguments`, without the secrets of this process's environment,
        and with one thread of each numeric library.
    descriptors: numbers of further descriptors that it inherits.
    max_body_bytes: the largest body of an answer.
    answered: requests that the present process has answered.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        descriptors: Collection[int] = (),
        max_body_bytes: int = 0,
        exit_s: float = EXIT_S,
    ) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._descriptors = descriptors
        self._max_body_bytes = max_body_bytes
        self._exit_s = exit_s
        self._process: ChildProcess | None = None
        self.answered = 0
        self._errors = b""
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Return the process id while there is a process."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process unless it runs. Raises OSError, and HelperEnded if it was closed."""
        if self._process is not None and self._process.code is not None:
            self.stop()
        if self._process is None and not self._closed:
            environment = selected(os.environ) | dict.fromkeys(THREADS, "1")
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self._process = ChildProcess(
                self._command,
                environment=environment,
                descriptors=self._descriptors,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
            self.answered, self._errors = 0, b""
            for pipe in self._process.pipes:
                os.set_blocking(pipe.fileno(), False)
            for pipe in self._process.pipes[:2] if self._max_body_bytes else ():
                with suppress(OSError):  # not Linux, or as much as this user may have
                    fcntl(pipe.fileno(), F_SETPIPE_SZ, PIECE_BYTES)
        if self._closed:
            self.stop()
            raise HelperEnded(None, "")

    def ask(
        self,
        value: Any,
        parts: Parts = (),
        *,
        timeout_s: float,
        wanted: Callable[[], bool] = _always,
    ) -> tuple[Any, list[bytes]]:
        """Send a request; return the value and the body, in pieces, of its answer.

        value: anything that JSON can express. parts: the body of the request.
        wanted: called now and then while the helper works; the request is given up when it returns False.
        Raises HelperLate after `timeout_s`, HelperUnwanted, HelperEnded, and OSError if it cannot be started. The
        process has been ended then.
        """
        self.start()
        deadline = time.monotonic() + timeout_s
        text = json.dumps(value).encode()
        try:
            for part in (HEAD.pack(len(text), sum(map(len, parts))), text, *parts):
                self._write(part, deadline)
            self._wait_for_answer(deadline, wanted)
            size, body_bytes = HEAD.unpack(b"".join(self._read(HEAD.size, deadline)))
            if size > MAX_VALUE_BYTES or body_bytes > self._max_body_bytes:
                raise ValueError("an answer is too large")
            answer = json.loads(b"".join(self._read(size, deadline)))
            body = self._read(body_bytes, deadline)
            self.answered += 1
            return answer, body
        except TimeoutError:
            self.stop()
            raise HelperLate from None
        except (OSError, ValueError, RecursionError) as error:
            code = self.stop(ends=isinstance(error, BrokenPipeError))
            raise HelperEnded(code, self._last_words()) from None
        except BaseException:  # the rest of its answer would be taken for that to the next request
            self.stop()
            raise

    async def ask_once(self, value: Any, parts: Parts = (), *, timeout_s: float) -> tuple[Any, list[bytes]]:
        """Ask in a thread, and end the process. It has ended before this returns, also if this is cancelled."""

        def ask() -> tuple[Any, list[bytes]]:
            try:
                return self.ask(value, parts, timeout_s=timeout_s)
            finally:
                self.stop()

        asking = asyncio.ensure_future(asyncio.to_thread(ask))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            self.close()  # a call that no thread has begun fails at once when one does
            with suppress(HelperLate, HelperEnded, OSError):
                await asking
            raise

    def stop(self, *, ends: bool = False) -> int | None:
        """End the process, if there is one, and wait for that. Returns its exit code if it has ended by itself.

        ends: its pipes are closed, so that it is about to exit.
        """
        process, self._process = self._process, None
        if process is None:
            return None
        code = process.code
        if code is None and ends:
            with suppress(TimeoutError):
                code = process.wait(self._exit_s)
        process.kill()
        process.wait()
        self._read_errors(process)
        for pipe in process.pipes:
            pipe.close()
        return code

    def close(self) -> None:
        """Kill the process for good; what waits for it in another thread fails with HelperEnded."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()

    def _write(self, data: bytes | memoryview, deadline: float) -> None:
        descriptor = self._pipe(0)
        view = memoryview(data)
        while view:
            self._wait(descriptor, select.POLLOUT, deadline)
            view = view[os.write(descriptor, view[:PIECE_BYTES]) :]

    def _read(self, size: int, deadline: float) -> list[bytes]:
        """Read `size` bytes, in pieces of at most PIECE_BYTES."""
        descriptor = self._pipe(1)
        pieces: list[bytes] = []
        while size:
            self._wait(descriptor, select.POLLIN, deadline)
            pieces.append(os.read(descriptor, min(size, PIECE_BYTES)))
            if not pieces[-1]:
                raise BrokenPipeError
            size -= len(pieces[-1])
        return pieces

    def _wait_for_answer(self, deadline: float, wanted: Callable[[], bool]) -> None:
        while True:
            try:
                return self._wait(self._pipe(1), select.POLLIN, min(deadline, time.monotonic() + POLL_S))
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
            if not wanted():
                raise HelperUnwanted

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until the pipe can be used or is broken; read stderr meanwhile. Raises TimeoutError."""
        assert self._process is not None
        poll = select.poll()  # `select.select` fails for descriptors above 1023
        poll.register(descriptor, event)
        errors = self._pipe(2)
        poll.register(errors, select.POLLIN)
        while ready := dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)):
            if descriptor in ready:
                return
            if not self._read_errors(self._process):
                poll.unregister(errors)
        raise TimeoutError

    def _read_errors(self, process: ChildProcess) -> bool:
        """Keep the end of what was printed to stderr; return whether more may follow."""
        try:
            while data := os.read(process.pipes[2].fileno(), PIECE_BYTES):
                self._errors = (self._errors + data)[-MAX_ERROR_BYTES:]
            return False
        except BlockingIOError:
            return True

    def _last_words(self) -> str:
        return self._errors.decode("utf-8", "replace").strip().rpartition("\n")[2][:300]

    def _pipe(self, number: int) -> int:
        assert self._process is not None
        return self._process.pipes[number].fileno()
