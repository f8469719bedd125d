"""`oriel simulate cost`: what services cost on nodes, packed in several ways, and the cheapest way that was found."""

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns
from oriel_policies.errors import DoesNotFit
from oriel_policies.metering.prices import NANO
from oriel_tools.simulate.packing import Need, NodeKind, Packing, lower_bound, pack
from oriel_wire.process.allowed import with_values

CHEAPEST = "cheapest that was found"
MAX_BYTES = 1 << 20
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Size = Annotated[float, Meta(ge=0.0, le=65_536.0)]
Count = Annotated[int, Meta(ge=0, le=100_000)]


class Node(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A kind of node. hour: its price, a number or a text for an exact one."""

    cpus: Size
    memory_gib: Size
    hour: float | str
    accelerator: str = ""
    accelerators: Annotated[int, Meta(ge=0, le=1024)] = 0


class Service(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A service, or one choice of it. Of a service with `on`, each choice may have other numbers."""

    replicas: Count | None = None
    cpus: Size | None = None
    memory_gib: Size | None = None
    accelerator: str = ""
    accelerators: Annotated[int, Meta(ge=1, le=1024)] = 1
    on: "Annotated[list[Service], Meta(max_length=16)]" = []


class Row(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One way to place the services. accelerators, nodes: only these; all if empty."""

    name: Name
    accelerators: list[str] = []
    nodes: list[str] = []
    apart: bool = False  # services without accelerators stay off nodes that have some


class Mix(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The document."""

    currency: Annotated[str, Meta(pattern="^[A-Z]{3}$")] = "USD"
    nodes: Annotated[dict[Name, Node], Meta(min_length=1, max_length=32)]
    services: Annotated[dict[Name, Service], Meta(min_length=1, max_length=64)]
    compare: Annotated[list[Row], Meta(max_length=64)] = []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `simulate cost`."""
    parser.add_argument("mix", type=Path, metavar="FILE", help="a TOML file with nodes and services (docs/cost.md)")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Pack the services in every way of the document, and as cheaply as possible, and print the results."""
    mix = read(args.mix)
    try:
        found = [*compared(mix)]
    except (CommandFailed, DoesNotFit) as wrong:
        raise CommandFailed(f"{args.mix}: {wrong}") from wrong
    if args.json:
        print(json.dumps({"currency": mix.currency, "rows": [_document(*each) for each in found]}))
    else:
        print("\n".join(_lines(mix, found)))
    return 0


def read(path: Path) -> Mix:
    """Read the document. Raises CommandFailed with file, place and reason."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CommandFailed(f"{path}: at most {MAX_BYTES >> 20} MiB")
        return msgspec.convert(tomllib.loads(path.read_text()), Mix)
    except (OSError, UnicodeDecodeError) as refused:
        raise CommandFailed(f"{path}: cannot be read ({refused})") from refused
    except tomllib.TOMLDecodeError as wrong:
        raise CommandFailed(f"{path}: {wrong}") from wrong
    except msgspec.ValidationError as wrong:
        raise CommandFailed(f"{path}: {with_values(wrong, Mix)}") from wrong


def compared(mix: Mix) -> Iterator[tuple[str, Packing, int]]:
    """Yield the name of each row, its packing, and what no packing of all choices can be cheaper than.

    The last row is the cheapest of all that were found. Raises CommandFailed and DoesNotFit.
    """
    kinds = [_kind(name, node) for name, node in mix.nodes.items()]
    services = [_needs(name, service) for name, service in mix.services.items()]
    rows = list[tuple[str, Packing, int]]()
    for row in (*mix.compare, Row(name=CHEAPEST)):
        for name in row.nodes:
            if name not in mix.nodes:
                raise CommandFailed(f"{row.name!r}: there is no node {name!r}")
        wanted = [
            kind
            for kind in kinds
            if (not row.nodes or kind.name in row.nodes)
            and (not row.accelerators or not kind.accelerators or kind.accelerator in row.accelerators)
        ]
        chosen = [
            [
                need
                for need in needs
                if not need.accelerators or need.accelerator in (row.accelerators or [need.accelerator])
            ]
            for needs in services
        ]
        for needs, left in zip(services, chosen, strict=True):
            if not left:
                raise CommandFailed(f"{row.name!r}: {needs[0].service} runs on none of {', '.join(row.accelerators)}")
        try:
            packing = pack(chosen, wanted, apart=row.apart)
        except DoesNotFit as wrong:
            raise DoesNotFit(f"{row.name!r}: {wrong}") from wrong
        rows.append((row.name, packing, lower_bound(packing.needs, wanted)))
    *others, (name, best, least) = rows
    cheapest = min([best, *[packing for _, packing, _ in others]], key=lambda packing: packing.price)
    yield from others
    yield name, cheapest, least if cheapest is best else lower_bound(cheapest.needs, kinds)


def _kind(name: str, node: Node) -> NodeKind:
    try:
        price = Decimal(str(node.hour)) * NANO
    except InvalidOperation:
        price = Decimal(-1)
    if not price.is_finite() or not 0 <= price <= 10**6 * NANO or price != price.to_integral_value():
        raise CommandFailed(f"nodes.{name}.hour: 0 to 1000000 with at most nine decimals")
    if bool(node.accelerator) != bool(node.accelerators):
        raise CommandFailed(f"nodes.{name}: 'accelerator' and 'accelerators' go together")
    return NodeKind(
        name=name,
        cpu_millis=round(node.cpus * 1000),
        memory_mib=round(node.memory_gib * 1024),
        price=int(price),
        accelerator=node.accelerator,
        accelerators=node.accelerators,
    )


def _needs(name: str, service: Service) -> list[Need]:
    found = []
    for number, each in enumerate(service.on or [service]):
        where = f"services.{name}.on[{number}]" if service.on else f"services.{name}"
        if each.on and service.on:
            raise CommandFailed(f"{where}: a choice has no choices")
        replicas = service.replicas if each.replicas is None else each.replicas
        cpus = service.cpus if each.cpus is None else each.cpus
        memory_gib = service.memory_gib if each.memory_gib is None else each.memory_gib
        if replicas is None or cpus is None or memory_gib is None:
            raise CommandFailed(f"{where} needs 'replicas', 'cpus' and 'memory_gib'")
        found.append(
            Need(
                service=name,
                cpu_millis=round(cpus * 1000),
                memory_mib=round(memory_gib * 1024),
                replicas=replicas,
                accelerator=each.accelerator,
                accelerators=each.accelerators if each.accelerator else 0,
            )
        )
    return found


def _document(name: str, packing: Packing, least: int) -> dict[str, Any]:
    return {
        "name": name,
        "hour": packing.price / NANO,
        "at_least": least / NANO,
        "idle_cpus": _idle(packing),
        "nodes": [
            {"kind": nodes.kind.name, "count": nodes.count, "replicas": dict(nodes.replicas)} for nodes in packing.nodes
        ],
    }


def _idle(packing: Packing) -> float:
    used = sum([need.replicas * need.cpu_millis for need in packing.needs])
    return (packing.cpu_millis - used) / 1000


def _lines(mix: Mix, found: Sequence[tuple[str, Packing, int]]) -> list[str]:
    rows = []
    for name, packing, _ in found:
        counts: dict[str, int] = {}
        for nodes in packing.nodes:
            counts[nodes.kind.name] = counts.get(nodes.kind.name, 0) + nodes.count
        listed = ", ".join([f"{count} {kind}" for kind, count in sorted(counts.items())])
        idle = _idle(packing)
        share = idle * 1000 / packing.cpu_millis if packing.cpu_millis else 0.0
        rows.append([name, f"{packing.price / NANO:.2f}", f"{idle:.0f}", f"{share:.0%}", listed])
    heading = ("services", f"{mix.currency}/hour", "idle CPUs", "of all", "nodes")
    lines = columns(heading, rows, right=range(1, 4))
    name, packing, least = found[-1]
    lines += [
        "",
        f"{name}: {packing.price / NANO:.2f} {mix.currency}/hour, no less than {least / NANO:.2f} is possible",
    ]
    for nodes in packing.nodes:
        each = ", ".join([f"{count} {service}" for service, count in nodes.replicas.items()])
        lines.append(f"  {nodes.count} x {nodes.kind.name}: {each}")
    return lines
