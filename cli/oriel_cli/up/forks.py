"""Forks the first processes of the units of `oriel up`: their imports are done once, and their memory is shared."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from socket import socket

from oriel_cli.up.units import UnitSpec
from oriel_wire.process.forked import can_fork, fork
from oriel_wire.process.process import LIFELINE_VARIABLE
from oriel_wire.process.shared_settings import TICKET_KEYS

# Unit -> what it imports when it starts. ONNX Runtime starts a thread, which a forked process would lack.
MODULES = {
    "inference": ("oriel_inference.command", "oriel_inference.app"),
    "logic": ("oriel_logic.command", "oriel_logic.app", "oriel_logic.workers.launch"),
    "gateway": ("oriel_gateway.command", "oriel_gateway.app"),
}
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # else numpy starts threads when it is imported


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks:
    """The lifeline of the units, reading and writing end, and the process ids of those that were forked by name."""

    lifeline: tuple[int, int]
    pids: Mapping[str, int]


def fork_units(specs: Sequence[UnitSpec], variables: Mapping[str, str], sock: socket) -> Forks:
    """Fork the first process of each unit that can be forked, the one that takes longest to start first.

    Returns in the supervisor only: in a forked process the unit runs until it ends, and SystemExit follows. Units with
    secrets of their own, a preparation or spare processes are started by their commands.

    variables: environment variables of the units besides those of this process.
    sock: a socket that stays with the supervisor.
    """
    reading, writing = os.pipe()
    pids: dict[str, int] = {}
    if not can_fork() or any(TICKET_KEYS in spec.environ or spec.prepare or spec.pool for spec in specs):
        return Forks(lifeline=(reading, writing), pids=pids)
    unset = [name for name in ONE_THREAD if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, "1"))
    import_module("numpy")
    for name in unset:
        del os.environ[name]
    for spec in reversed(specs):
        for module in MODULES[spec.name]:
            import_module(module)
        if not can_fork():  # an import has started a thread
            break
        own = {LIFELINE_VARIABLE: str(reading), **variables, **spec.environ}
        pid = fork(own, f"oriel {spec.name}", reading)
        if not pid:
            sock.detach()  # it is closed here
            if not sys.flags.safe_path:
                del sys.path[0]  # a file beside the command must not shadow a module that is imported later
            sys.exit(import_module("oriel_cli.main").main(spec.argv[spec.argv.index(spec.name) :]))
        pids[spec.name] = pid
    return Forks(lifeline=(reading, writing), pids=pids)
