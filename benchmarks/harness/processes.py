"""Servers as processes: started, awaited, measured, and ended with all their children."""

import atexit
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from oriel_cli.up import units

__all__ = [
    "PEERS",
    "ROOT",
    "accepts",
    "cpu_s",
    "free_port",
    "free_ports",
    "gateway",
    "gateway_command",
    "inference",
    "inference_command",
    "pss_mb",
    "serving",
    "state_environment",
    "status_of",
    "tree",
]

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
END_S = 5.0
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")


@cache
def state_environment() -> dict[str, str]:
    """The environment of a server that keeps quotas, objectives and usage in a folder that goes with this process.

    Without it they would be added to those of the user.
    """
    folder = tempfile.TemporaryDirectory(prefix="oriel-bench-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return {"ORIEL_STATE": folder.name}


def free_ports(count: int) -> list[int]:
    """`count` ports that nobody listens on now."""
    return units.free_ports("127.0.0.1", count)


def free_port() -> int:
    """A port that nobody listens on now."""
    return free_ports(1)[0]


def gateway_command(policies: Path | str, port: int, *flags: str, admin_port: int = 0) -> list[str]:
    """`oriel gateway` with these documents. admin_port: 0 for any."""
    ports = ["--http-port", str(port), "--grpc-port", str(free_port()), "--admin-port", str(admin_port or free_port())]
    return [sys.executable, "-m", "oriel_cli.main", "gateway", "--policies", str(policies), *ports, *flags]


def inference_command(models: Path | str, port: int, *flags: str, grpc_port: int = 0) -> list[str]:
    """`oriel inference` with this repository. grpc_port: 0 for any."""
    ports = ["--http-port", str(port), "--grpc-port", str(grpc_port or free_port())]
    ports += ["--metrics-port", str(free_port())]
    return [sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(models), *ports, *flags]


@contextmanager
def serving(
    command: Sequence[str],
    ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    *,
    start_s: float = 90.0,
    own_session: bool = True,
) -> Iterator[int]:
    """The process id of a server once `ready` is true; its whole process group ends with the block.

    own_session: the kernel shares the cores among sessions before it does among processes (autogroup), so that this
    decides how much of a busy machine a server gets. The kept figures are of the servers as they are started here.
    environment: more variables, over those of `state_environment`.
    Exits with the end of its log when it does not start within `start_s`.
    """
    log = tempfile.TemporaryFile()
    variables = {**os.environ, **state_environment(), **(environment or {})}
    process = subprocess.Popen(
        list(command), env=variables, stdout=log, stderr=log, cwd=ROOT,
        start_new_session=own_session, process_group=None if own_session else 0,
    )  # fmt: skip
    try:
        end = time.monotonic() + start_s
        while not ready():
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                sys.exit(f"{Path(command[0]).name} did not start: {log.read().decode(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()


@contextmanager
def gateway(
    policies: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    start_s: float = 90.0,
    own_session: bool = False,
) -> Iterator[tuple[int, int, int]]:
    """A gateway with these documents: its process id, its HTTP port and its admin port."""
    port, admin_port = free_ports(2)
    command = gateway_command(policies, port, *flags, admin_port=admin_port)
    with serving(command, lambda: accepts(port), environment, start_s=start_s, own_session=own_session) as pid:
        yield pid, port, admin_port


@contextmanager
def inference(
    models: Path | str, *flags: str, start_s: float = 90.0, own_session: bool = False
) -> Iterator[tuple[int, int, int]]:
    """An inference server whose models are ready: its process id, its HTTP port and its gRPC port."""
    port, grpc_port = free_ports(2)
    ready = f"http://127.0.0.1:{port}/v2/health/ready"
    command = inference_command(models, port, *flags, grpc_port=grpc_port)
    with serving(command, lambda: status_of(ready) == 200, start_s=start_s, own_session=own_session) as pid:
        yield pid, port, grpc_port


def accepts(port: int) -> bool:
    """Return whether somebody listens on this port."""
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def status_of(url: str) -> int:
    """The status of a GET; 0 while nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code
    except OSError:
        return 0


def tree(pid: int) -> list[int]:
    """A process and its descendants; one that ends meanwhile may be left out."""
    out = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                out += tree(int(child))
    return out


def cpu_s(pid: int, *, ended: bool = False) -> float:
    """User and system seconds so far of a process and its descendants.

    ended: also of the descendants that have ended.
    """
    ticks = 0
    for member in tree(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11 : 15 if ended else 13]))
    return ticks * TICK_S


def pss_mb(pid: int) -> float:
    """Memory of a process tree (proportional set size: shared pages are divided among their users)."""
    lines = [Path(f"/proc/{member}/smaps_rollup").read_text() for member in tree(pid)]
    return sum(int(found[1]) for text in lines if (found := re.search(r"^Pss:\s+(\d+)", text, re.M))) / 1024
