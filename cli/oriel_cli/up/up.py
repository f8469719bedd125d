"""`oriel up`: gateway, logic and inference as three processes under one supervisor."""

import argparse
import asyncio
import ipaddress
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.applications import Starlette

from oriel_cli import state
from oriel_cli.up import demo_assets, plan, report
from oriel_cli.up.forks import Forks, fork_units
from oriel_cli.up.scaled import ScaledUnit
from oriel_cli.up.scaler_client import follow
from oriel_cli.up.supervisor import Supervisor
from oriel_cli.up.unit import Timings
from oriel_cli.up.units import UnitSpec, refuse_busy_ports
from oriel_cli.watch.traces import TraceStore, routes
from oriel_wire.errors import StartFailed
from oriel_wire.observe.spans import BUFFER_VARIABLE
from oriel_wire.process.control import serve_control
from oriel_wire.process.logs import configure_logging, is_captured, standard_output
from oriel_wire.process.process import listen, run_unit

_log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan.add_arguments(parser)
    parser.add_argument("--demo", action="store_true", help="use the examples and demo keys; loopback only")
    parser.add_argument("--json", action="store_true", help="when ready, print one line of JSON instead of the table")
    parser.add_argument("--grace-s", type=float, default=30.0, metavar="S", help="how long stopping may take (30)")


def run(args: argparse.Namespace) -> int:
    began_s = time.monotonic()
    if not 0.0 <= args.grace_s < math.inf:
        raise StartFailed(f"--grace-s {args.grace_s:g} is no time: pass a number of seconds that is 0 or more")
    assets = demo_assets.find() if args.demo else None
    if assets is not None and not _is_loopback(args.host):
        raise StartFailed("--demo uses published keys and binds to loopback only: leave --host out")
    if assets is not None and args.tls_cert:
        raise StartFailed("--demo speaks plain HTTP on loopback: leave --tls-cert and --tls-key out")
    specs = plan.units(args, assets)
    refuse_busy_ports(address for spec in specs for address in spec.addresses.values())
    sock = listen("127.0.0.1", 0, "trace buffer")
    traces = f"http://127.0.0.1:{sock.getsockname()[1]}"
    variables = {"ORIEL_LOG_LEVEL": os.environ.get("ORIEL_LOG_LEVEL", "WARNING"), BUFFER_VARIABLE: traces}
    forks = fork_units(specs, variables, sock)
    configure_logging("up")
    session = _Session(specs=specs, assets=assets, as_json=args.json, began_s=began_s, sock=sock, forks=forks)

    async def main(stop: asyncio.Event) -> None:
        await session.serve(stop, traces, {**os.environ, **variables}, Timings(grace_s=args.grace_s))

    return run_unit(main, unit="up", grace_s=args.grace_s + 5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """One `oriel up` from the first process to the last. sock: the listening socket of the trace buffer."""

    specs: Sequence[UnitSpec]
    assets: demo_assets.DemoAssets | None
    as_json: bool
    began_s: float
    sock: socket.socket
    forks: Forks

    async def serve(self, stop: asyncio.Event, traces: str, environ: Mapping[str, str], timings: Timings) -> None:
        gateway = self.specs[0].addresses
        inference = next(spec for spec in self.specs if spec.models is not None).addresses
        supervisor = Supervisor(
            self.specs,
            say=_say,
            environ=environ,
            timings=timings,
            forks=self.forks,
            changed=self._show,
            scaler=partial(follow, gateway["scaler"].host, gateway["scaler"].port) if "scaler" in gateway else None,
        )
        admin_port = gateway["admin"].port

        async def ready() -> None:
            models = [model for unit in supervisor.units for model in await unit.models()]
            if self.assets is not None:
                _refuse_unready(models)
            state.remember(
                state.Instance(
                    pid=os.getpid(),
                    admin_port=admin_port,
                    gateway=str(gateway["http"]),
                    traces=traces,
                    demo=self.assets is not None,
                    inference=str(inference["http"]),
                    metrics=str(inference["metrics"]),
                )
            )
            took_s = time.monotonic() - self.began_s
            form = report.as_json if self.as_json else report.as_text
            shown = form(supervisor.units, models, self.assets, traces=traces, took_s=took_s)
            if self.as_json or not is_captured():
                _print(shown)
            else:
                _log.info("%s", shown)

        # The trace buffer ends after the units, so that it still receives the last spans of their drain.
        async with asyncio.TaskGroup() as group:
            buffer = group.create_task(
                serve_control(Starlette(routes=routes(TraceStore())), self.sock, asyncio.Event())
            )
            try:
                await supervisor.run(stop, ready)
            finally:
                state.forget(admin_port)
                buffer.cancel()

    def _show(self, unit: ScaledUnit) -> None:
        if self.as_json:
            _print(report.change_as_json(unit))
        else:
            _say(f"{unit.name}: {unit.summary}")


def _refuse_unready(models: Sequence[Mapping[str, Any]]) -> None:
    """Raise StartFailed if a model of the demo is not ready. Without --demo, the models that are ready are served."""
    unready = [model for model in models if model.get("state") != "READY"]
    if unready:
        names = ", ".join(str(model.get("name")) for model in unready)
        reason = next((str(model["reason"]) for model in unready if model.get("reason")), "it does not say why")
        raise StartFailed(f"models that are not ready: {names}: {reason}")


def _say(line: str) -> None:
    if is_captured():
        _log.info("%s", line)
    else:
        print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _print(text: str) -> None:
    """Write an answer of this command, which is no part of the log."""
    output = standard_output()
    output.write(f"{text}\n".encode())
    output.flush()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
