"""One `oriel gateway` in a process of its own, with limits that a test sets."""

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from oriel_cli.up.units import free_ports

from ..waiting import until
from .stack import Client


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A running gateway. pid: its process id, for figures in /proc."""

    port: int
    grpc_port: int
    admin_port: int
    pid: int

    def rss_bytes(self) -> int:
        fields = Path(f"/proc/{self.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    def files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu_s(self) -> float:
        return cpu_s(self.pid)


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def gateway_process(
    folder: Path,
    files: dict[str, bytes],
    *words: str,
    max_files: int | None = None,
    plain: bool = True,
    prelude: str = "",
) -> AsyncIterator[Process]:
    """Start a gateway on free ports, wait until it is ready, and end it.

    words: further flags.
    max_files: its limit of open files.
    plain: whether it serves HTTP without TLS.
    prelude: a line of Python that it executes before anything else.
    """
    policies = folder / "policies"
    policies.mkdir(exist_ok=True)
    for name, content in files.items():
        (policies / name).write_bytes(content)

    def limited() -> None:
        assert max_files is not None
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

    http_port, *others = (str(port) for port in free_ports("127.0.0.1", 3))
    code = f"import sys; {prelude or 'pass'}; from oriel_cli.main import main; sys.exit(main())"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", code, "gateway", "--policies", str(policies)),
        *("--http-port", http_port, "--grpc-port", others[0], "--admin-port", others[1], *words),
        # A bench, which has set no folder, adds nothing to the quotas, objectives and usage of the user.
        env={"ORIEL_STATE": str(folder / "state"), **os.environ},
        # With a preexec_fn Python runs code in a forked child, which may hang because this process has gRPC's threads.
        preexec_fn=None if max_files is None else limited,
    )
    try:

        async def ready() -> bool:
            assert process.returncode is None, "the gateway ended"
            return await _ready(int(http_port), plain)

        await until(ready)
        yield Process(port=int(http_port), grpc_port=int(others[0]), admin_port=int(others[1]), pid=process.pid)
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def _ready(port: int, plain: bool) -> bool:
    try:
        async with Client(port) as client:
            if not plain:
                return True
            return (await client.ask("/v2/health/ready", key=None, method="GET")).status == 200
    except (OSError, asyncio.IncompleteReadError):
        return False
