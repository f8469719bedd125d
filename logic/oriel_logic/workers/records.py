"""The records on the fork server's control socket: `kind u8 | token, pid or length u32 | pid or wait status i32`.

BROKEN is followed by `length` bytes of text: why workers can never be started. It is the last one.
"""

import os
import signal
import struct
import time
from contextlib import suppress

RECORD = struct.Struct("!BIi")
SPAWN, STARTED, EXITED, BROKEN = 1, 2, 3, 4


def cpu_ns(pid: int) -> int:
    """Return the processor time of a process so far; 0 if it has been reaped, or is none of Linux's."""
    with suppress(OSError):
        return time.clock_gettime_ns(~pid << 3 | 2)  # the number of its clock, as of clock_getcpuclockid()
    return 0


def kill_group(pid: int) -> None:
    """Kill what is left of the group that a worker or a fork server leads or has led."""
    if pid:
        with suppress(OSError):  # it is empty
            os.killpg(pid, signal.SIGKILL)
