"""Forks a process before this one has threads or an event loop: both share the memory of what was imported before."""

import asyncio
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from oriel_wire.observe.trace import reseed


def can_fork() -> bool:
    """Return whether children can be forked here: this process has no other thread, its standard descriptors are open,
    and the kernel reports their end on a descriptor.
    """
    if None in (sys.__stdin__, sys.__stdout__, sys.__stderr__):
        return False  # a pipe or a socket may have the number of the closed one
    try:
        os.close(os.pidfd_open(os.getpid()))
        return len(os.listdir("/proc/self/task")) == 1
    except (AttributeError, OSError):
        return False


def fork(variables: Mapping[str, str], name: str, *kept: int) -> int:
    """Fork a process that leads a session of its own; return its process id, and 0 in the process itself.

    There its input is empty, both its outputs are this process's standard error, and all descriptors but `kept` are
    closed.

    variables: environment variables that it has besides those of this process.
    name: the command line that it shows to `ps`.
    """
    gc.freeze()  # a collection would write to all of the shared memory
    if pid := os.fork():
        return pid
    reseed()
    os.setsid()
    os.environ.update(variables)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    first = 3
    for descriptor in sorted(kept):
        os.closerange(first, descriptor)
        first = descriptor + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    _show_as(name)
    return 0


def _show_as(name: str) -> None:
    """Write a command line into the memory from which the kernel shows it; one that is too long is left out."""
    with suppress(OSError, ValueError), open("/proc/self/stat", "rb") as stat:
        begin, end = map(int, stat.read().rpartition(b")")[2].split()[45:47])
        words = name.replace(" ", "\0").encode()
        if len(words) < end - begin:
            ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


class Forked:
    """A forked child, with as much of `asyncio.subprocess.Process` as a supervisor uses. Single writer: the loop."""

    stdin = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.get_running_loop().create_future()
        descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(descriptor, self._reap, descriptor)

    def _reap(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
        self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self._ended.set_result(self.returncode)

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit code, a negative number for a signal."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        os.kill(self.pid, signal.SIGTERM)
