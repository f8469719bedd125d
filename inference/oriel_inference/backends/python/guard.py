"""A process that outlives a killed server just long enough to kill what the models of that server have started.

The kernel ends the process of a model together with the server, but not the processes that the model has started:
killing their process group is the task of this one. It reads `+<group>` and `-<group>` lines, and its input ends when
the server ends, however that happens. There is one per server while model processes exist.
"""

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """The server's side of the guard process. Used by one thread."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self._write_end = -1

    def watch(self, group: int) -> None:
        """Have this process group killed when the server ends. Raises OSError if that cannot be arranged."""
        self._groups.add(group)
        if self._process is not None and self._process.poll() is None:
            self._tell(f"+{group}\n")
            return
        self._end()  # the guard process was killed
        self._begin()
        for each in self._groups:
            self._tell(f"+{each}\n")

    def release(self, group: int) -> None:
        """Report that the process group was killed."""
        self._groups.discard(group)
        if self._groups:
            self._tell(f"-{group}\n")
        else:
            self._end()

    def _begin(self) -> None:
        theirs, self._write_end = os.pipe()
        try:
            os.set_blocking(self._write_end, False)
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
        with contextlib.suppress(OSError):  # the guard was killed: the next `watch` starts another one
            os.write(self._write_end, line.encode())

    def _end(self) -> None:
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        process, self._process = self._process, None
        if process is not None:
            process.wait()


def main() -> None:
    """Run until the server has ended."""
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
        with contextlib.suppress(OSError):  # the group is empty
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
