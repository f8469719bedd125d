"""Servers as processes: started, awaited, weighed, and ended with all their children."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gateway_bench.contenders import ROOT, cpu_s, free_port, tree

__all__ = ["cpu_s", "free_port", "pss_mb", "serving"]

END_S = 5.0


@contextmanager
def serving(
    command: Sequence[str], environment: Mapping[str, str], ready: Callable[[], bool], start_s: float = 90.0
) -> Iterator[int]:
    """The process id of a server once `ready` says so; its whole process group ends with the block.

    Exits with the end of its log when it does not start.
    """
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(
        list(command), env={**os.environ, **environment}, stdout=log, stderr=log, cwd=ROOT, start_new_session=True
    )
    try:
        end = time.monotonic() + start_s
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                sys.exit(f"{Path(command[0]).name} did not start: {log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def pss_mb(pid: int) -> float:
    """Memory of a process tree, shared pages divided among their users."""
    lines = [Path(f"/proc/{member}/smaps_rollup").read_text() for member in tree(pid)]
    return sum(int(found[1]) for text in lines if (found := re.search(r"^Pss:\s+(\d+)", text, re.M))) / 1024
