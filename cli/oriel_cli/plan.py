"""Turns the flags of `oriel up` into the three units that it supervises."""

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from oriel_cli.demo_assets import DemoAssets
from oriel_cli.units import Address, UnitSpec, free_ports
from oriel_wire.errors import StartFailed

__all__ = ["add_arguments", "units"]

LOOPBACK = "127.0.0.1"
# Fixed defaults: clients rely on them.
PORTS = {
    "gateway": {"http": 8080, "grpc": 8081, "admin": 8082},
    "logic": {"http": 8090, "admin": 8092},
    "inference": {"http": 8000, "grpc": 8001, "metrics": 8002},
}
WORDS = {"http": "HTTP", "grpc": "gRPC", "admin": "admin", "metrics": "metrics"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that shape the units."""
    parser.add_argument("--host", default=LOOPBACK, help="where the gateway's public ports bind (127.0.0.1)")
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of those ports, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM; both are reloaded when they change")
    parser.add_argument("--policies", type=Path, metavar="DIR", help="tenants.toml, tiers.toml, routes.toml")
    parser.add_argument("--services", type=Path, action="append", metavar="DIR", help="logic services (repeatable)")
    parser.add_argument(
        "--model-repository", type=Path, action="append", metavar="DIR", help="models, as Triton lays them out"
    )
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="logic's worker processes (2)")
    for unit, ports in PORTS.items():
        for label, port in ports.items():
            parser.add_argument(f"--{unit}-{label}-port", type=int, default=port, metavar="N", help=f"({port})")
    parser.add_argument("--free-ports", action="store_true", help="pick every port among those that are free")


def units(args: argparse.Namespace, assets: DemoAssets | None) -> list[UnitSpec]:
    """Gateway, logic and inference, in the order in which they are stopped. Raises StartFailed with what is missing."""
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
    tls = ["--tls-cert", str(args.tls_cert), "--tls-key", str(args.tls_key)] if args.tls_cert else []
    at = _addresses(args)
    gateway, logic, inference = at["gateway"], at["logic"], at["inference"]
    return [
        UnitSpec(
            name="gateway",
            argv=[
                *_command("gateway"),
                *("--policies", str(policies), "--host", args.host),
                *tls,
                *_ports(gateway),
                *("--endpoint", f"logic={logic['http']}", "--endpoint", f"inference={inference['http']}"),
                *("--grpc-endpoint", f"inference={inference['grpc']}"),
            ],
            addresses=gateway,
            scheme="https" if tls else "http",
            ready=("admin", "/health/ready"),
        ),
        UnitSpec(
            name="logic",
            argv=[
                *_command("logic"),
                *(word for folder in services for word in ("--services", str(folder))),
                *("--inference", str(inference["http"]), "--inference-grpc", str(inference["grpc"])),
                *("--host", LOOPBACK, "--workers", str(args.workers)),
                *_ports(logic),
            ],
            addresses=logic,
            ready=("admin", "/health/ready"),
        ),
        UnitSpec(
            name="inference",
            argv=[
                *_command("inference"),
                *(word for folder in repositories for word in ("--model-repository", str(folder))),
                *("--host", LOOPBACK),
                # One broken model must not keep the others from being tried out.
                *("--strict-readiness", "false"),
                *_ports(inference),
            ],
            addresses=inference,
            ready=("http", "/v2/health/ready"),
            models=("metrics", "/models"),
            prepare=prepare,
        ),
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
                host=args.host if unit == "gateway" and label != "admin" else LOOPBACK,
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
