"""The fork server: one process per pool, started by `bootstrap`.

It imports the handler files once and then forks a worker for each request on its control socket (a file descriptor in
the settings). A request is one record with the worker's ends of a socket pair and of a pipe for its output; the
answers are records too: STARTED (token, pid) and EXITED (pid, wait status).

`multiprocessing` is not used: its fork server starts a second helper process (resource_tracker), and its queues start
threads. This one has no threads, so that forking is safe, and workers share the pages of everything that was imported
(the heap is frozen before the first fork so that the collector does not touch them).

No process outlives the logic process: its end is the end of their lifeline, upon which the kernel kills the fork server
and its workers, each with its group, so with what its services have started (`oriel_wire.process.start`). A worker
whose service has closed all descriptors ends with the fork server. SIGINT and SIGTERM are ignored: a service manager
sends them to all processes, while requests still need their workers.
"""

import gc
import logging
import os
import random
import select
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from oriel_logic.loading.handlers import load, preload
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.services.definition import Definition
from oriel_logic.services.serving import Services
from oriel_logic.workers import child
from oriel_logic.workers.bootstrap import EXITED, RECORD, STARTED
from oriel_wire.process.start import end_group_with, end_with_parent

# The loop answers all callers, a worker one: if both want a core the loop goes first. That took the 99th
# percentile of its lag, beside two busy workers on two cores, from 4 ms to 1. Nice counts inside a container, or a
# session where the kernel groups by them, so it costs other units nothing.
NICENESS = 10
LOG_FORMAT = "%(asctime)s %(levelname)s logic-worker %(name)s: %(message)s"


def main(settings: dict[str, Any]) -> None:
    """Run until the control socket ends. Never returns in a worker."""
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "ORIEL_LIFELINE_FD"):
        os.environ.pop(name, None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=os.environ.get("ORIEL_LOG_LEVEL", "").upper() or "INFO", format=LOG_FORMAT)
    os.set_inheritable(settings["control_fd"], False)
    control = socket.socket(fileno=settings["control_fd"])
    definitions, report = imported([HandlerFile.from_record(each) for each in settings["files"]])
    gc.collect()
    gc.freeze()
    try:
        link = serve(control, settings["lifeline_fd"])
        if link is not None:  # this is a forked worker
            # Services that the logic process cannot import run here completely, `async def` too.
            mine = [each for each in definitions if settings["sets_up_all"] or child.has_stage_here(each)]
            child.run(link, Services(), mine, report, limit_bytes=settings["max_frame_bytes"])
    except Exception:  # the process ends here; its parent sees the end of the socket
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def imported(files: Sequence[HandlerFile]) -> tuple[list[Definition], child.Report]:
    """Import `files`; return their definitions and the report of every worker."""
    definitions: list[Definition] = []
    report: child.Report = {"pid": 0, "problems": {}, "definitions": {}}
    for loaded in load(files, log=False):
        if loaded.definition is not None:
            definitions.append(loaded.definition)
            report["definitions"][loaded.name] = loaded.definition.without_code()
        elif loaded.problem:
            report["problems"][loaded.name] = loaded.problem
    preload(files)
    return definitions, report


def serve(control: socket.socket, lifeline: int) -> socket.socket | None:
    """Fork on request until the control socket ends, and return None then; in a forked worker return its socket."""
    server = os.getpid()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    try:
        while True:
            readable, _, _ = select.select([control.fileno(), wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                reap(control)
            if control.fileno() in readable:
                data, descriptors, _, _ = socket.recv_fds(control, RECORD.size, 2)
                if len(data) < RECORD.size or len(descriptors) < 2:
                    return None
                _, token, _ = RECORD.unpack(data)
                pid = os.fork()
                if pid == 0:
                    become_worker(server, control, lifeline, descriptors[1], wake_read, wake_write)
                    os.set_inheritable(descriptors[0], False)
                    return socket.socket(fileno=descriptors[0])
                for descriptor in descriptors:
                    os.close(descriptor)
                with suppress(OSError):  # whichever of both comes first; it may have ended already
                    os.setpgid(pid, pid)
                control.sendall(RECORD.pack(STARTED, token, pid))
    except OSError:
        return None  # the logic process has ended


def kill_group(pid: int) -> None:
    """Kill what is left of the group that a worker or a fork server leads or has led."""
    if pid:
        with suppress(OSError):  # it is empty
            os.killpg(pid, signal.SIGKILL)


def reap(control: socket.socket) -> None:
    with suppress(ChildProcessError):  # there are no more workers
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            kill_group(ended.si_pid)  # before its id can belong to another process
            pid, status = os.waitpid(ended.si_pid, 0)
            control.sendall(RECORD.pack(EXITED, pid, status))


def become_worker(server: int, control: socket.socket, lifeline: int, output: int, *pipes: int) -> None:
    os.setpgid(0, 0)
    end_with_parent(server)
    if sys.platform == "linux":
        # Opened anew, because one opened file ends one group: that of the fork server.
        end_group_with(os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY), os.getpid())
        os.close(lifeline)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    control.close()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    for descriptor in (output, *pipes):
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.nice(NICENESS)
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
