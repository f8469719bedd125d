"""One child process as the server sees it: how it starts, what it sends, how it ends.

Everything here belongs to the loop, except that a separate thread starts the processes: the common threads may all wait
for models that are being loaded. A child is killed with all it has started, see `oriel_wire.process.start`; without its
descriptors it still ends with the thread that started it, which lives as long as the server.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import msgspec

from oriel_inference.backends.python.frames import encode
from oriel_inference.backends.python.launch import Launch, model_environment
from oriel_wire.process.messages import Buffer, MessageStream
from oriel_wire.process.output import OutputPipe
from oriel_wire.process.start import ChildProcess

_log = logging.getLogger(__name__)

MAX_CONTROL_BYTES = 256 << 20
_starter = ThreadPoolExecutor(1, thread_name_prefix="oriel-python-starter")
_M = TypeVar("_M")


class ModelProcess(Generic[_M]):
    """A child process and its sockets.

    module: the name of the child's module, which has `main`.
    decode: returns the message of a head. Raises FrameError.
    on_message: called with every message and its body.
    on_end: called once with the reason when the process is gone or unusable.
    launch: the values with which it is started.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        module: str,
        decode: Callable[[memoryview], _M],
        max_body_bytes: int,
        on_message: Callable[[_M, memoryview], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._module = module
        self._decode = decode
        self._max_body_bytes = max_body_bytes
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._starting = False
        self._child: ChildProcess | None = None
        self._work = MessageStream(max_body_bytes=max_body_bytes, on_frame=self._received, on_lost=self._lost)
        self._control = MessageStream(max_body_bytes=0, on_frame=lambda *_: None, on_lost=lambda _: None)
        self._pidfd = -1
        self._output: OutputPipe | None = None
        self._ended = False
        self.broken = ""

    @property
    def pid(self) -> int | None:
        """Return the child's process id once it was started."""
        return None if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the child, which then waits for its first message. Raises OSError. If cancelled, the child is ended."""
        ours = [path for path in sys.path if path]
        launch, path = self._launch, os.pathsep.join(ours)
        variables = model_environment(os.environ, launch.environment, threads=launch.threads, path=path)
        command = [sys.executable, "-P", "-m", self._module]
        if launch.python:  # the packages of its environment go before the server's
            variables |= {"PYTHONPATH": "", "PATH": f"{os.path.dirname(launch.python)}:{variables.get('PATH', '')}"}
            code = f"import sys; sys.path += {ours!r}; from {self._module} import main; main()"
            command = [launch.python, "-P", "-c", code]
        work, work_theirs = socket.socketpair()
        control, control_theirs = socket.socketpair()
        output, output_theirs = os.pipe()
        self._output = OutputPipe(output, self._print)
        # The thread cannot be stopped, so only the thread closes the ends it works with.
        self._starting = True
        starting = self._loop.run_in_executor(
            _starter, _start, command, work_theirs, control_theirs, output_theirs, variables
        )
        starting.add_done_callback(self._started)
        try:
            await self._work.open(work)
            await self._control.open(control)
            await asyncio.shield(starting)
            if self._ended:
                self._cut()  # the child ended in the meantime
        except BaseException:
            self.kill("it did not start")
            self._cut()
            work.close()
            control.close()
            raise

    def _started(self, starting: "asyncio.Future[ChildProcess]") -> None:
        self._starting = False
        if starting.cancelled() or starting.exception() is not None:
            self.close()
            return
        self._child = starting.result()
        # A pipe that a grandchild keeps open would hide that the child has died.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # not allowed everywhere; then the end of the socket has to do
                self._pidfd = os.pidfd_open(self._child.pid)
                self._loop.add_reader(self._pidfd, self.close)
        if self.broken:
            self.kill(self.broken)

    def send(self, message: msgspec.Struct, body: Sequence[Buffer] = ()) -> None:
        """Send work. Raises FrameError if it is too large; a child that is gone receives nothing."""
        pieces = encode(message, body, max_body_bytes=self._max_body_bytes)
        if not self._ended:
            self._work.send(pieces)

    def tell(self, message: msgspec.Struct, body: Sequence[Buffer] = ()) -> None:
        """Send a message that the child has to receive while it works."""
        pieces = encode(message, body, max_body_bytes=self._max_body_bytes)
        if not self._ended:
            self._control.send(pieces)
            if self._control.unsent_bytes > MAX_CONTROL_BYTES:
                self.kill("it does not read its socket any more")

    def kill(self, why: str) -> None:
        """Kill the child whatever it does; `on_end` follows."""
        self.broken = self.broken or why
        self._signal()
        if self._pidfd < 0:
            self.close()

    def close(self) -> None:
        """Release everything and report how the child ended: it is gone, or its socket is. Later calls do nothing."""
        if self._ended or self._starting:
            return  # `_started` calls this again
        self._ended = True
        self._signal()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._cut()
        if self._output is not None:
            self._output.close()
        self._on_end(self._how())

    def _lost(self, problem: str) -> None:
        """Handle the end of the child's socket: the child has usually ended, and its exit code follows."""
        if problem:
            self.kill(f"it sent a message that cannot be read: {problem}")
        self._signal()
        if self._pidfd < 0:
            self.close()

    def _received(self, head: memoryview, body: memoryview) -> None:
        if not self._ended:
            self._on_message(self._decode(head), body)

    def _cut(self) -> None:
        self._work.close()
        self._control.close()

    def _signal(self) -> None:
        if self._child is not None:
            self._child.kill()

    def _how(self) -> str:
        if self._child is None:
            return "could not be started"
        # It was killed if it had not ended, so the kernel alone has to be waited for.
        code = self._child.wait()
        if self.broken:
            return self.broken
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _print(self, line: str) -> None:
        model = self._launch.model
        _log.info("model %s: %s", model, line, extra={"target": model, "printed": "model"})


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process as Linux reports it; 0 if it has ended, and on other systems."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _start(
    command: Sequence[str], work: socket.socket, control: socket.socket, output: int, environment: Mapping[str, str]
) -> ChildProcess:
    """Start the child, which takes its ends of the sockets over."""
    descriptors = (work.fileno(), control.fileno())
    try:
        return ChildProcess(
            [*command, *map(str, (os.getpid(), *descriptors))],
            environment=environment,
            descriptors=descriptors,
            stdout=output,
            stderr=output,
        )
    finally:
        work.close()
        control.close()
        os.close(output)
