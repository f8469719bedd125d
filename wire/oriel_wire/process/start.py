"""Starts child processes that are killed with all they have started, at the latest when this process ends.

A child leads a process group of its own. It inherits the reading end of a pipe, its lifeline, whose writing end only
this process has. Once that end is closed, and be it because this process was killed, the kernel kills the group. That
is so on Linux; elsewhere a child whose parent was killed ends when it next reads from its parent or writes to it.
"""

import ctypes
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import IO

# One of them: numeric libraries' own threads would take the cores from what serves.
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def end_group_with(lifeline: int, group: int) -> None:
    """Let the kernel kill the process group `group` when the writing end of the pipe `lifeline` is closed.

    lifeline: descriptor of the reading end. Each opened file ends one group.
    """
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, although code in it may close its lifeline.

    parent: process id of the parent, which may have ended already.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)


class Lifeline:
    """The pipe whose end is the end of a child. reading_end: the descriptor that the child inherits."""

    def __init__(self) -> None:
        # The reading end stays open here too, so that the group can be killed after its leader has ended.
        self._ends = list(os.pipe())
        self.reading_end = self._ends[0]

    def close(self) -> None:
        """Kill the group. Any thread may call this, also again."""
        with suppress(IndexError):
            while True:
                os.close(self._ends.pop())


class ChildProcess:
    """A running child. Any thread may use it.

    environment: all variables of the child.
    descriptors: numbers of further descriptors that it inherits.
    stdin, stdout, stderr: as for `subprocess.Popen`; the pipes are unbuffered.
    lifeline: its lifeline, if the child has to know that. Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        descriptors: Collection[int] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = subprocess.DEVNULL,
        stderr: int | None = subprocess.DEVNULL,
        lifeline: Lifeline | None = None,
    ) -> None:
        self._lifeline = lifeline or Lifeline()
        try:
            self._process = subprocess.Popen(
                command,
                bufsize=0,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=environment,
                pass_fds=(self._lifeline.reading_end, *descriptors),
                process_group=0,
            )
            end_group_with(self._lifeline.reading_end, self.pid)
        except BaseException:
            self._lifeline.close()
            raise

    @property
    def pid(self) -> int:
        """Return the process id, which is also that of its group."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Return the exit code if the child has ended, a negative number for a signal."""
        return self._process.poll()

    @property
    def pipes(self) -> list[IO[bytes]]:
        """Return this process's ends of those of the pipes to stdin, from stdout and from stderr that there are."""
        process = self._process
        return [pipe for pipe in (process.stdin, process.stdout, process.stderr) if pipe is not None]

    def kill(self) -> None:
        """Kill the child, and what is left of its group if it has ended. Later calls do nothing."""
        if self._process.returncode is None:
            with suppress(OSError):  # it ends at this moment
                os.killpg(self.pid, signal.SIGKILL)
        self._lifeline.close()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the end of the child; return its exit code. Raises TimeoutError."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError from None
