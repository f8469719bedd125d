"""Modules of ours that run in a process of their own, with pipes for input and output and few of our variables."""

import os
import subprocess
import sys

__all__ = ["start_child"]

_KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES")
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def start_child(module: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """`python -m module arguments`: binary pipes, what it says of errors is dropped."""
    environment = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment |= dict.fromkeys(_ONE_THREAD, "1")
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
