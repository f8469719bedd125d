"""Turns the flags of `oriel up` into the three units that it supervises."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

from oriel_cli.policies.explain import read
from oriel_cli.up.demo_assets import DemoAssets
from oriel_cli.up.units import Address, UnitSpec, free_ports
from oriel_policies.documents import Scaling, compile_documents
from oriel_policies.errors import BadDocument
from oriel_wire.engine.listener import LAME_DUCK_VARIABLE
from oriel_wire.errors import StartFailed
from oriel_wire.process.shared_settings import TICKET_KEYS

LOOPBACK = "127.0.0.1"
Addresses = Mapping[str, Address]  # label, as "http" -> address
MOST_PROCESSES = 16  # the most processes of one unit, even if its pool may have more replicas in a cluster
# Fixed defaults: clients rely on them.
PORTS = {
    "gateway": {"http": 8080, "grpc": 8081, "admin": 8082, "internal": 8084},
    "logic": {"http": 8090, "admin": 8092},
    "inference": {"http": 8000, "grpc": 8001, "metrics": 8002},
}
MODEL_POLL_S = "5"
WORDS = {"http": "HTTP", "grpc": "gRPC", "admin": "admin", "internal": "internal", "metrics": "metrics"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that describe the units."""
    parser.add_argument("--host", default=LOOPBACK, help="where the gateway's public ports bind (127.0.0.1)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of those ports, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM; both are reloaded when they change")
    parser.add_argument(
        "--policies", type=Path, metavar="DIR", help="policies: every *.toml, *.ndjson and *.json in it counts"
    )
    parser.add_argument("--services", type=Path, action="append", metavar="DIR", help="logic services (repeatable)")
    parser.add_argument(
        "--model-repository", type=Path, action="append", metavar="DIR", help="models, as Triton lays them out"
    )
    parser.add_argument(
        "--scale-to-zero",
        action="store_true",
        help="start and stop logic and inference by demand, within the bounds of the pools' scaling tables",
    )
    parser.add_argument(
        "--models-through-gateway",
        action="store_true",
        help="let services call models through the gateway, in its order and counted as demand",
    )
    parser.add_argument(
        "--usage", metavar="DIR", help="where usage is recorded (ORIEL_STATE, else ~/.local/state/oriel); or 'none'"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="logic's worker processes (2)")
    parser.add_argument("--log-format", choices=("text", "json"), help="of all units: lines for people, or JSON (text)")
    for unit, ports in PORTS.items():
        for label, port in ports.items():
            parser.add_argument(f"--{unit}-{label}-port", type=int, default=port, metavar="N", help=f"({port})")
    parser.add_argument("--free-ports", action="store_true", help="pick every port among those that are free")


def units(args: argparse.Namespace, assets: DemoAssets | None) -> list[UnitSpec]:
    """Describe gateway, logic and inference, in the order in which they are stopped.

    Raises StartFailed, which says what is missing.
    """
    policies = args.policies or (assets.policies if assets else None)
    services = args.services or (list(assets.services) if assets else [])
    repositories = args.model_repository or ([assets.models, assets.generated] if assets else [])
    _require(policies, services, repositories)
    prepare = assets.prepare if assets and assets.generated in repositories else ()
    generated = {assets.generated} if assets else set()
    for folder in [policies, *services, *repositories]:
        if folder not in generated and not folder.is_dir():
            raise StartFailed(
                f"there is no folder {str(folder)!r}: check --policies, --services and --model-repository"
            )
    if bool(args.tls_cert) != bool(args.tls_key):
        raise StartFailed("a certificate goes with its key: pass both --tls-cert and --tls-key")
    at = _addresses(args)
    bounds = _bounds(args.host, policies) if args.scale_to_zero else {}
    if bounds:
        (port,) = free_ports(LOOPBACK, 1)
        at["gateway"]["scaler"] = Address(what="gateway scaler", host=LOOPBACK, port=port, flag="--free-ports")
    internal = at["gateway"]["internal"] if args.models_through_gateway else at["gateway"].pop("internal")
    logics = _processes("logic", at["logic"], bounds)
    inferences = _processes("inference", at["inference"], bounds)
    if args.models_through_gateway:
        models_at = ["--gateway", str(internal)]
    else:
        models_at = [word for each in inferences for word in ("--inference", str(each["http"]))]
        models_at += [word for each in inferences for word in ("--inference-grpc", str(each["grpc"]))]
    models = [_inference(args, repositories, each, scales=bool(bounds)) for each in inferences]
    models[0] = dataclasses.replace(models[0], prepare=prepare)
    return [
        _gateway(args, policies, at["gateway"], logics, inferences),
        *_scaled("logic", bounds, [_logic(args, services, models_at, each) for each in logics]),
        *_scaled("inference", bounds, models),
    ]


def _gateway(
    args: argparse.Namespace,
    policies: Path | None,
    addresses: Addresses,
    logics: Sequence[Addresses],
    inferences: Sequence[Addresses],
) -> UnitSpec:
    through = args.models_through_gateway
    return UnitSpec(
        name="gateway",
        argv=[
            *_command("gateway"),
            *("--policies", str(policies), "--host", args.host),
            *(("--tls-cert", str(args.tls_cert), "--tls-key", str(args.tls_key)) if args.tls_cert else ()),
            *_usage(args),
            *_ports(addresses),
            *(word for each in logics for word in ("--endpoint", f"logic={each['http']}")),
            *(word for each in inferences for word in ("--endpoint", f"inference={each['http']}")),
            *(word for each in inferences for word in ("--grpc-endpoint", f"inference={each['grpc']}")),
        ],
        addresses=addresses,
        scheme="https" if args.tls_cert else "http",
        environ={TICKET_KEYS: os.environ.get(TICKET_KEYS) or token_hex(32)} if through else {},
        ready=("admin", "/health/ready"),
    )


def _logic(
    args: argparse.Namespace, services: Sequence[Path], models_at: Sequence[str], addresses: Addresses
) -> UnitSpec:
    return UnitSpec(
        name="logic",
        argv=[
            *_command("logic"),
            *(word for folder in services for word in ("--services", str(folder))),
            *models_at,
            *("--host", LOOPBACK, "--workers", str(args.workers)),
            *_usage(args),
            *_ports(addresses),
        ],
        addresses=addresses,
        # The gateway, which calls this server, has ended when it is stopped.
        environ={} if args.scale_to_zero or args.models_through_gateway else {LAME_DUCK_VARIABLE: "0"},
        ready=("admin", "/health/ready"),
        needs="" if args.models_through_gateway else "inference",
    )


def _inference(
    args: argparse.Namespace, repositories: Sequence[Path], addresses: Addresses, *, scales: bool
) -> UnitSpec:
    return UnitSpec(
        name="inference",
        argv=[
            *_command("inference"),
            *(word for folder in repositories for word in ("--model-repository", str(folder))),
            *("--host", LOOPBACK),
            *_usage(args),
            # If one model is broken, the others can still be tried out.
            *("--strict-readiness", "false"),
            # A model file that is repaired or replaced is loaded, as services are.
            *("--model-control-mode", "poll", "--repository-poll-secs", MODEL_POLL_S),
            # A spare process has one child for model checks; more checks at once would start more.
            *(("--model-load-thread-count", "1") if scales else ()),
            *_ports(addresses),
        ],
        addresses=addresses,
        environ={} if scales or args.models_through_gateway else {LAME_DUCK_VARIABLE: "0"},
        ready=("http", "/v2/health/ready"),
        models=("metrics", "/models"),
    )


def _usage(args: argparse.Namespace) -> Sequence[str]:
    return ("--usage", args.usage) if args.usage else ()


def _bounds(host: str, policies: Path | None) -> dict[str, Scaling]:
    """Return the `scaling` tables of the pools `logic` and `inference`. Raises StartFailed."""
    if host != LOOPBACK:
        raise StartFailed("with --scale-to-zero the gateway answers its supervisor on --host: leave --host out")
    try:
        pools = compile_documents(read(str(policies))).pools
    except BadDocument as bad:
        raise StartFailed(f"the policies are not usable: {bad}") from bad
    bounds = {}
    for name in ("logic", "inference"):
        scaling = pools[name].scaling if name in pools else None
        if scaling is None:
            raise StartFailed(f"--scale-to-zero needs [pools.{name}.scaling] in the policies: see docs/scaling.md")
        bounds[name] = scaling
    return bounds


def _processes(unit: str, first: dict[str, Address], bounds: Mapping[str, Scaling]) -> list[dict[str, Address]]:
    """Return the addresses of every process that the unit may run at the same time."""
    more = min(bounds[unit].maximum, MOST_PROCESSES) - 1 if bounds else 0
    picked = iter(free_ports(LOOPBACK, more * len(first)) if more else ())
    return [
        first,
        *(
            {label: dataclasses.replace(address, port=next(picked)) for label, address in first.items()}
            for _ in range(more)
        ),
    ]


def _scaled(unit: str, bounds: Mapping[str, Scaling], specs: list[UnitSpec]) -> list[UnitSpec]:
    """Describe the processes of a unit: unchanged, or scaled by the demand for the pool that has the unit's name."""
    if not bounds:
        return specs
    spare = [sys.executable, "-P", "-m", "oriel_cli.up.spare"]
    return [
        dataclasses.replace(
            spec,
            name=f"{unit}-{number}" if number > 1 else unit,
            pool=unit,
            minimum=min(bounds[unit].minimum, len(specs)),
            spare=[*spare, *spec.argv[spec.argv.index(unit) :]],
        )
        for number, spec in enumerate(specs, 1)
    ]


def _require(policies: Path | None, services: Sequence[Path], repositories: Sequence[Path]) -> None:
    wanted = {"--policies DIR": policies, "--services DIR": services, "--model-repository DIR": repositories}
    missing = [flag for flag, given in wanted.items() if not given]
    if missing:
        raise StartFailed(f"'oriel up' needs {', '.join(missing)} (or --demo for the examples)")


def _addresses(args: argparse.Namespace) -> dict[str, dict[str, Address]]:
    at = {
        unit: {
            label: Address(
                what=f"{unit} {WORDS[label]}",
                host=args.host if unit == "gateway" and label in ("http", "grpc") else LOOPBACK,
                port=getattr(args, f"{unit}_{label}_port"),
                flag=f"--{unit}-{label}-port",
            )
            for label in ports
        }
        for unit, ports in PORTS.items()
    }
    if not args.free_ports:
        return at
    picked = iter(free_ports(LOOPBACK, sum(len(ports) for ports in PORTS.values())))
    return {
        unit: {label: dataclasses.replace(address, port=next(picked)) for label, address in addresses.items()}
        for unit, addresses in at.items()
    }


def _command(unit: str) -> list[str]:
    # -P: a file in the folder `oriel` is started from must not shadow a module.
    return [sys.executable, "-P", "-m", "oriel_cli.main", unit]


def _ports(addresses: Mapping[str, Address]) -> list[str]:
    return [word for label, address in addresses.items() for word in (f"--{label}-port", str(address.port))]
