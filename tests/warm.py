"""Child processes of the product that start without importing anything: they are forked from a process that has.

Otherwise a new interpreter would spend most of a test's CPU time on the same imports. Everything after the imports is
the real code. Whole servers that a test starts start their children as ever, and so do the tests that ask for
`cold_children`. Linux only.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from oriel_wire.process import start

BOOTSTRAP = "oriel_logic.workers.bootstrap"
RUNTIME = "onnxruntime"
CHECK = "oriel_inference.repository.check_child"
# Module with the `main` of a child -> what is imported before the fork. Modules with the same imports share a process.
IMPORTED = {
    BOOTSTRAP: (BOOTSTRAP, "oriel_logic.workers.forkserver"),
    **dict.fromkeys(
        (CHECK, "oriel_inference.artefacts.child"),
        (
            *(CHECK, "oriel_inference.artefacts.child", "oriel_inference.artefacts.process", RUNTIME),
            *("oriel_inference.backends.onnx_runtime", "oriel_inference.backends.compilers"),
        ),
    ),
    **dict.fromkeys(
        (
            children := (
                "oriel_gateway.documents.compile_child",
                "oriel_inference.backends.python.child",
                "oriel_inference.language.child",
                "oriel_inference.servers.large_json_child",
            )
        ),
        children,
    ),
}
PYTHON = sys.executable
REQUEST_BYTES = 1 << 20
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class WarmProcess:
    """A process that has imported something and forks on request. path: its PYTHONPATH."""

    def __init__(self, imported: Sequence[str]) -> None:
        self.path = [entry for entry in sys.path if entry]
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, 2 * REQUEST_BYTES)
        self._lock = threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [PYTHON, "-P", "-W", "ignore::DeprecationWarning", __file__, str(theirs.fileno()), *imported],
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(self.path)} | THREADS,
                process_group=0,
            )

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a child; return its process id and its pidfd. descriptors: those that it gets."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            data, (pidfd,), _, _ = socket.recv_fds(self._socket, 16, 1)
        return int(data), pidfd

    def close(self) -> None:
        """End the process, and what it has forked."""
        self._socket.close()
        self._process.wait()


class Forked:
    """A forked child with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, exited: int, pipes: Sequence[FileIO | None]) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = pipes
        self._exited = exited  # where its exit code can be read
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        if self._lock.acquire(blocking=False):  # otherwise another thread waits for the end
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._wait(0)
            self._lock.release()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        with self._lock:
            return self._wait(timeout)

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1e3):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            self.returncode = int(os.read(self._exited, 16))
            os.close(self._exited)
            os.close(self._pidfd)
        return self.returncode


class Starter:
    """Stands for the module `subprocess` in `oriel_wire.process.start`."""

    DEVNULL, TimeoutExpired = subprocess.DEVNULL, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self._processes: dict[Sequence[str], WarmProcess] = {}
        self._lock = threading.Lock()

    def Popen(self, command: Sequence[str], **options: Any) -> Any:
        """Fork the child that the command would start, or start the command if none can be forked."""
        module, words = _child_of(command)
        path = options["env"].get("PYTHONPATH", "").split(os.pathsep)
        with self._lock:
            imported = IMPORTED.get(module, ())
            process = self._processes.get(imported)
            if imported and process is None:
                process = self._processes[imported] = WarmProcess(imported)
        if process is None:
            return subprocess.Popen(command, **options)
        further = [entry for entry in path if entry not in process.path]
        if any(Path(entry, name).exists() for entry in further for name in (RUNTIME, f"{RUNTIME}.py")):
            return subprocess.Popen(command, **options)
        return _forked(process, {"module": module, "arguments": words, "further": further}, options)

    def close(self) -> None:
        for each in self._processes.values():
            each.close()


def _child_of(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the module that a command runs, and its arguments; "" for a command of another kind."""
    if command[:3] == [PYTHON, "-P", "-m"]:
        return command[3], command[4:]
    if command[0] == PYTHON and command[1].endswith("/oriel_logic/workers/bootstrap.py"):
        return BOOTSTRAP, command[2:]
    return "", ()


def _forked(process: WarmProcess, request: dict[str, Any], options: dict[str, Any]) -> Forked:
    """Fork a child with the streams, descriptors and variables that `Popen` would give it."""
    pipes: list[FileIO | None] = []
    theirs: list[int] = []
    ours: list[int] = []
    for number, (name, mode) in enumerate((("stdin", "wb"), ("stdout", "rb"), ("stderr", "rb"))):
        wanted = options[name]
        if wanted == subprocess.PIPE:
            reading, writing = os.pipe()
            pipes.append(FileIO(reading if number else writing, mode))
            theirs.append(writing if number else reading)
        else:
            pipes.append(None)
            null = wanted == subprocess.DEVNULL
            theirs.append(os.open(os.devnull, os.O_RDWR) if null else os.dup(number if wanted is None else wanted))
    exited, exits = os.pipe()
    theirs.append(exits)
    try:
        passed = options["pass_fds"]
        request |= {"environment": dict(options["env"]), "folder": os.getcwd(), "descriptors": [0, 1, 2, *passed]}
        ours += [exits, *theirs[:3], *passed]
        return Forked(*process.fork(request, ours), exited, pipes)
    finally:
        for each in theirs:
            os.close(each)


# The side of the process that forks -----------------------------------------------------------------------------------


def serve(requests: socket.socket) -> Callable[[], None]:
    """Fork for each request until the tests end. Returns, in each child and at the end, what there is to do."""
    exits: dict[int, tuple[int, int]] = {}  # by the descriptor of a child: its process id, where its exit code goes
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != requests.fileno():
                pid, told = exits.pop(ready)
                poll.unregister(ready)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, str(code).encode())
                os.close(ready)
                os.close(told)
                continue
            data, (*descriptors,), _, _ = socket.recv_fds(requests, REQUEST_BYTES, 32)
            if not data:
                return partial(end, [pid for pid, _ in exits.values()])
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)
                return partial(become, json.loads(data), descriptors[1:])
            with contextlib.suppress(OSError):  # the child did it, and has ended
                os.setpgid(pid, pid)
            for each in descriptors[1:]:
                os.close(each)
            exits[pidfd := os.pidfd_open(pid)] = pid, descriptors[0]
            poll.register(pidfd, select.POLLIN)
            socket.send_fds(requests, [str(pid).encode()], [pidfd])


def end(pids: Sequence[int]) -> None:
    """Kill the children that are left."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Take over what a new process would be given, and run the child."""
    numbers = request["descriptors"]
    # None of them has a number that another one is to get.
    given = [os.dup(each) for each in descriptors]
    while clash := [index for index, each in enumerate(given) if each in numbers]:
        for index in clash:
            given[index] = os.dup(given[index])
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in given:
            with contextlib.suppress(OSError):  # it is the one of this listing
                os.close(int(name))
    for each, number in zip(given, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[:0] = request["further"]
    module = sys.modules[request["module"]]
    sys.argv[:] = [str(module.__file__), *request["arguments"]]
    if request["module"] == BOOTSTRAP:
        module.main(json.loads(sys.argv[1]))
    else:
        module.main()


if __name__ == "__main__":
    end_with = start.end_with_parent
    start.end_with_parent = lambda _: end_with(os.getppid())  # the parent is this process, not who wanted the child
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))()
