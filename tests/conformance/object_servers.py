"""Object stores on this machine, each a process on a free port. `make test` makes build/stores, where they live."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from oriel_cli.units import free_ports

TOOLS = Path(__file__).resolve().parents[2] / "build" / "stores" / "bin"
START_S = 60.0


def tool(name: str) -> str:
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"no {name} in build/stores: make test makes it")
    return str(path)


@contextmanager
def serving(command: Sequence[str], port: int, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """The process, once `port` takes connections; ended with all it started."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > until:
                pytest.fail(f"{Path(command[0]).name} does not listen on its port (ended with {process.poll()})")
            time.sleep(0.05)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


# What any of them takes for credentials: none of them looks.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def moto() -> Iterator[str]:
    """S3 by moto: its endpoint. The caller's environment needs CREDENTIALS."""
    # As a module: the first line of an installed script cannot be long, and a path may be.
    tool("moto_server")
    (port,) = free_ports("127.0.0.1", 1)
    command = (str(TOOLS / "python"), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port))
    with serving(command, port, {**CREDENTIALS, "PYTHONUNBUFFERED": "1"}):
        yield f"http://127.0.0.1:{port}"
