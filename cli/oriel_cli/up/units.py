"""Describes to the supervisor a process that it keeps alive, and finds free ports for it."""

import errno
import random
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One listening port of a unit. what: "gateway HTTP"; flag: the flag that moves it, such as
    "--gateway-http-port".
    """

    what: str
    host: str
    port: int
    flag: str

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpec:
    """One process to keep alive.

    argv: the whole command. addresses: label ("http") -> Address. scheme: "http" or "https", as its "http" port speaks.
    ready: (label, path) that answers 200 when the unit serves. models: (label, path) of the JSON list of models, None
    for units without.
    prepare: a command that must end with 0 before each first start (generates files), empty for none.
    pool: the gateway's pool by whose demand the process is started and stopped; "" for one that always
    runs. The processes of one pool are equal but for their ports. minimum: the number of them that always run.
    needs: the pool whose processes this one calls itself, so that the gateway does not see that demand; "" for none.
    spare: a command that becomes the same unit at the first byte on its input; empty for none.
    """

    name: str
    argv: Sequence[str]
    addresses: Mapping[str, Address]
    ready: tuple[str, str]
    scheme: str = "http"
    models: tuple[str, str] | None = None
    prepare: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""
    minimum: int = 0
    needs: str = ""
    spare: Sequence[str] = ()


def refuse_busy_ports(addresses: Iterable[Address]) -> None:
    """Raise StartFailed naming every port that is taken, in one line with the flags that move them."""
    busy = [address for address in addresses if not _is_free(address)]
    if not busy:
        return
    named = ", ".join(f"{address.port} ({address.what})" for address in busy)
    if len(busy) > 3:
        raise StartFailed(
            f"ports {named} are in use, probably by another `oriel up`: stop it, or pass --free-ports "
            "(make run ARGS=--free-ports)"
        )
    flags = " ".join(f"{address.flag} N" for address in busy)
    many, them = ("ports", "them") if len(busy) > 1 else ("port", "it")
    verb = "are" if len(busy) > 1 else "is"
    raise StartFailed(f"{many} {named} {verb} in use: free {them}, or pass {flags}, or --free-ports")


def _is_free(address: Address) -> bool:
    try:
        listen(address.host, address.port, address.what, address.flag).close()
    except StartFailed as refused:
        if isinstance(refused.__cause__, OSError) and refused.__cause__.errno == errno.EADDRINUSE:
            return False
        raise
    return True


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports that are free now, outside the range the kernel hands to outgoing connections.

    A unit that is started again later must find its port still free: an ephemeral one could be taken meanwhile. On
    Linux this process also holds them until it ends, by sockets that do not listen: a search like this one passes
    over them, and a unit may listen there, since it sets SO_REUSEADDR.
    """
    ceiling = _first_ephemeral_port()
    held: list[socket.socket] = []
    try:
        while len(held) < count:
            sock = _bound(host, random.randrange(10240, ceiling))
            if sock is not None:
                held.append(sock)
        ports = [sock.getsockname()[1] for sock in held]
        if sys.platform == "linux":
            for sock in held:
                sock.detach()
        return ports
    finally:
        for sock in held:
            sock.close()


def _bound(host: str, port: int) -> socket.socket | None:
    """Return a socket bound to this address; None if the address is taken.

    Others may listen on the address, but a search for a free port passes over it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    try:
        # While SO_REUSEADDR is not set, binding fails if any other socket is bound there.
        sock.bind(address)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as refused:
        sock.close()
        if refused.errno != errno.EADDRINUSE:
            raise
        return None
    return sock


def _first_ephemeral_port() -> int:
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        first = 32768
    return first if first > 12288 else 32768
