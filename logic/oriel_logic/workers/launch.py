"""The fork server as the logic process uses it."""

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import python_multipart

import oriel_logic
import oriel_policies
import oriel_wire
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.workers.bootstrap import BROKEN, RECORD, SPAWN, build
from oriel_wire.process.environment import selected
from oriel_wire.process.start import THREADS, ChildProcess, Lifeline

BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
PACKAGES = {each.__name__: each.__path__[0] for each in (oriel_logic, oriel_policies, oriel_wire)}
LENT = {each.__name__: each.__path__[0] for each in (msgspec, np, python_multipart)}

# glibc gives the buffers of pictures back to the kernel after each job and faults them in again for the next one,
# page by page: a quarter of what decoding a photograph costs. So a worker keeps up to 64 MiB of what it has freed.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
ALSO = "ORIEL_WORKER_ENVIRONMENT"  # names of further variables that users' code gets
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


class Event(NamedTuple):
    """An event of a fork server.

    kind: STARTED (token, pid) and EXITED (pid, wait status) are about one worker; after BROKEN none can be started.
    problem: the reason of BROKEN.
    """

    kind: int
    first: int
    second: int
    problem: str = ""


def start_process(
    python: str, settings: Mapping[str, Any], environment: Mapping[str, str], lifeline: Lifeline
) -> ChildProcess:
    """Start a fork server's process, which inherits the two descriptors that the settings name. Raises OSError."""
    command = [python, str(BOOTSTRAP), json.dumps(settings)]
    descriptors = [settings["control_fd"]]
    return ChildProcess(
        command, environment=environment, descriptors=descriptors, stdout=None, stderr=None, lifeline=lifeline
    )


class ForkServer:
    """A running fork server for `files`. `spawn` asks for a worker without waiting; `events` reports the results."""

    def __init__(self, process: ChildProcess, control: socket.socket, files: Sequence[HandlerFile] = ()) -> None:
        self.files = tuple(files)
        self._process = process
        self._control = control
        self._unread = b""

    @classmethod
    def launch(
        cls,
        files: Sequence[HandlerFile],
        *,
        python: str = sys.executable,
        sets_up_all: bool = False,
        max_frame_bytes: int,
    ) -> "ForkServer":
        """Start the process, which imports the services meanwhile. Blocks for the exec only. Raises OSError.

        sets_up_all: also set up services that run on the logic process's loop.
        python: the interpreter of the workers. One other than ours sees the packages of its own environment, Oriel's
            own code with the packages it needs, and nothing else of our environment.
        """
        control, theirs = socket.socketpair()
        lifeline = Lifeline()
        with theirs:
            settings: dict[str, Any] = {
                "control_fd": theirs.fileno(),
                "lifeline_fd": lifeline.reading_end,
                "files": [file.to_record() for file in files],
                "packages": PACKAGES,
                "lent": LENT,
                "build": build(),
                "max_frame_bytes": max_frame_bytes,
                "sets_up_all": sets_up_all or python != sys.executable,
            }
            passed = selected(os.environ, os.environ.get(ALSO, "").split(","))
            environment = {name: value for name, value in passed.items() if name not in OURS}
            environment["PYTHONSAFEPATH"] = "1"
            if python == sys.executable:
                environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            # One worker is one core's work; threads would also make the fork server's forks unsafe.
            for name, value in (*((name, "1") for name in THREADS), *ALLOCATOR.items()):
                environment.setdefault(name, value)
            process = start_process(python, settings, environment, lifeline)
        control.setblocking(False)
        return cls(process, control, files)

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that is readable when `events` has something to return."""
        return self._control.fileno()

    def spawn(self, token: int) -> tuple[socket.socket, int]:
        """Ask for a worker; return our end of its socket, and the end of the pipe where its output can be read.

        Raises OSError if the fork server has ended.
        """
        ours, theirs = socket.socketpair()
        output, printed = os.pipe()
        try:
            with theirs:
                socket.send_fds(self._control, [RECORD.pack(SPAWN, token, 0)], [theirs.fileno(), printed])
        except OSError:
            ours.close()
            os.close(output)
            raise
        finally:
            os.close(printed)
        ours.setblocking(False)
        return ours, output

    def events(self) -> list[Event] | None:
        """Return the events since the last call; None once the fork server has ended. Does not block."""
        try:
            data = self._control.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            return None
        data = self._unread + data
        found = []
        while len(data) >= RECORD.size:
            kind, first, second = RECORD.unpack_from(data)
            end = RECORD.size + (first if kind == BROKEN else 0)
            if len(data) < end:
                break
            found.append(Event(kind, first, second, data[RECORD.size : end].decode(errors="replace")))
            data = data[end:]
        self._unread = data
        return found

    def close(self) -> None:
        """Kill the fork server and its workers, with all that they have started. Blocks until it has ended."""
        self._control.close()
        self._process.kill()
        self._process.wait()
