"""Fork servers that start without importing Oriel: they are forked from a process that has imported it.

Otherwise a new interpreter would spend most of a test's CPU time on the same imports. Everything after the imports is
the real code; `test_launch.py` and the tests that start whole servers run the real start as well.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from oriel_logic.workers.launch import BOOTSTRAP
from oriel_wire.process.start import Lifeline, end_group_with

REQUEST_BYTES = 1 << 20


class Forked:
    """One fork server with the interface of `ChildProcess`. Its exit code is unknown: -1 stands for any."""

    def __init__(self, pid: int, pidfd: int, lifeline: Lifeline) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._lifeline = lifeline

    def wait(self) -> int:
        if self._pidfd >= 0:
            select.select([self._pidfd], [], [])
            os.close(self._pidfd)
            self._pidfd = -1
        return -1

    def kill(self) -> None:
        self._lifeline.close()


class WarmProcess:
    """The process that has imported Oriel and forks on request."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for each in (self._socket, theirs):
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                each.setsockopt(socket.SOL_SOCKET, option, 2 * REQUEST_BYTES)
        self._lock = threading.Lock()
        path = {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), "OMP_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=os.environ | path
            )

    def start(self, python: str, settings: dict[str, Any], environment: dict[str, str], lifeline: Lifeline) -> Any:
        """Fork a process for `launch.start_process`."""
        assert python == sys.executable
        request = {"settings": settings, "environment": environment, "folder": os.getcwd()}
        descriptors = [settings["control_fd"], lifeline.reading_end, 1, 2]
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            data, (pidfd,), _, _ = socket.recv_fds(self._socket, 16, 1)
        return Forked(int(data), pidfd, lifeline)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


def serve(requests: socket.socket) -> None:
    """Fork for each request until the tests end."""
    from oriel_logic.workers import bootstrap
    from oriel_logic.workers import forkserver as imported_before_the_fork  # noqa: F401

    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES, 4)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not data:
            break
        pid = os.fork()
        if pid == 0:
            os.setsid()
            requests.close()
            request = json.loads(data)
            become(request, descriptors)
            end_group_with(request["settings"]["lifeline_fd"], os.getpid())
            bootstrap.main(request["settings"])
            os._exit(3)
        for each in descriptors:
            os.close(each)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(requests, [str(pid).encode()], [pidfd])
        os.close(pidfd)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0]:
            pass


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Take over what a new process would be given: environment, working folder, import path and descriptors."""
    control, lifeline, out, err = descriptors
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.close(out)
    os.close(err)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = [*given, *(each for each in sys.path if each not in given)]
    sys.argv[:] = [str(BOOTSTRAP)]
    request["settings"] |= {"control_fd": control, "lifeline_fd": lifeline}


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
