"""A process that outlives a killed server just long enough to kill what the models of that server have started.

The kernel ends a model's process with its server, but not what that process has started: its process group is left to
this one. It reads `+<group>` and `-<group>` lines, and its input ends when the server does, however that happens.
There is one per server, while there are model processes.
"""

import contextlib
import os
import signal
import subprocess
import sys

__all__ = ["Guard"]


class Guard:
    """The server's end. For one thread."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._told = -1

    def watch(self, group: int) -> None:
        """Kill this process group when the server ends. Raises OSError if that cannot be seen to."""
        self._groups.add(group)
        if self._process is not None and self._process.poll() is None:
            self._tell(f"+{group}\n")
            return
        self._end()  # somebody killed it
        self._begin()
        for each in self._groups:
            self._tell(f"+{each}\n")

    def release(self, group: int) -> None:
        """It has been killed."""
        self._groups.discard(group)
        if self._groups:
            self._tell(f"-{group}\n")
        else:
            self._end()

    def _begin(self) -> None:
        theirs, self._told = os.pipe()
        try:
            os.set_blocking(self._told, False)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        finally:
            os.close(theirs)

    def _tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # it was killed: the next `watch` starts another one
            os.write(self._told, line.encode())

    def _end(self) -> None:
        if self._told >= 0:
            os.close(self._told)
            self._told = -1
        process, self._process = self._process, None
        if process is not None:
            process.wait()


def main() -> None:
    """Until the server has ended."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(OSError):  # nobody is left in it
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
