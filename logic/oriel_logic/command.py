"""`oriel logic`: the flags of a logic server."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oriel_wire.errors import StartFailed

if TYPE_CHECKING:
    from oriel_logic.dev.session import Session
    from oriel_logic.listing import Listing
    from oriel_logic.settings import Settings
    from oriel_logic.sources import HandlerFile

__all__ = ["add_arguments", "address", "launch", "run", "worker_count"]

GRPC = "127.0.0.1:8001"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--services",
        action="append",
        type=Path,
        metavar="DIR",
        help="folder of services; repeatable",
    )
    parser.add_argument(
        "--service",
        action="append",
        metavar="MODULE:NAME",
        help="a service that is installed; repeatable, beside those of the entry points 'oriel.services'",
    )
    parser.add_argument(
        "--watch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="set up what changes in the folders; default yes",
    )
    parser.add_argument(
        "--inference",
        action="append",
        metavar="HOST:PORT",
        help="v2 inference server (HTTP); a name stands for all its addresses; repeatable; default 127.0.0.1:8000",
    )
    parser.add_argument(
        "--inference-grpc",
        action="append",
        metavar="HOST:PORT",
        help="the same servers' gRPC, for models.stream; repeatable; default " + GRPC,
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=8090)
    parser.add_argument("--admin-port", type=int, default=8092, help="health and metrics")
    parser.add_argument(
        "--trusted-peer",
        action="append",
        metavar="ADDRESS",
        help="address or network whose x-oriel headers count; repeatable; default loopback",
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes for CPU work")


def run(args: argparse.Namespace) -> int:
    """The exit code: 0 stopped as asked, 1 crashed, 2 could not start (one line on stderr says why)."""
    from oriel_logic.settings import LOOPBACK, Settings
    from oriel_wire.engine.peers import TrustedPeers

    try:
        settings = Settings(
            services=tuple(folder(path) for path in args.services or ()),
            named=tuple(args.service or ()),
            watch=args.watch and bool(args.services),
            inference=tuple(address(text) for text in args.inference or ["127.0.0.1:8000"]),
            inference_grpc=tuple(address(text, "--inference-grpc") for text in args.inference_grpc or [GRPC]),
            host=args.host,
            http_port=args.http_port,
            admin_port=args.admin_port,
            workers=worker_count(args.workers),
            trusted_peers=tuple(args.trusted_peer or LOOPBACK),
        )
        TrustedPeers(settings.trusted_peers)
        return launch(settings)
    except StartFailed as error:
        sys.stderr.write(f"oriel logic: {error}\n")
        return 2


def launch(settings: "Settings", dev: "Session | None" = None) -> int:
    """Run a server until it is asked to stop; the exit code. dev: for `oriel logic dev`. Raises StartFailed."""
    listing, files = at_start(settings)
    # Array work belongs to the workers; without this numpy starts a thread per core in every process.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    from oriel_logic.workers.launch import ForkServer

    # Before anything starts threads, and early: they import the services while this process imports the rest.
    server = ForkServer.launch(files, max_frame_bytes=settings.max_frame_bytes)
    rehearsal = ForkServer.launch(files, sets_up_all=True, max_frame_bytes=settings.max_frame_bytes)
    from oriel_logic.app import serve_unit
    from oriel_wire.engine.process import configure_logging, run_unit

    configure_logging("logic")
    if dev is not None:
        dev.configure_logging()

    async def main(stop: asyncio.Event) -> None:
        await serve_unit(settings, server, rehearsal, listing, stop, dev)

    return run_unit(main, unit="logic")


def at_start(settings: "Settings") -> "tuple[Listing, list[HandlerFile]]":
    """What lies in the folders, and the handlers that share the first worker processes. Raises StartFailed."""
    from oriel_logic.listing import read_listing, together
    from oriel_logic.sources import installed_files, named_file

    try:
        named = [named_file(text) for text in settings.named]
        listing = read_listing(settings.services)
        files = [*together(listing), *named, *installed_files()]
    except ValueError as error:
        raise StartFailed(f"--service: {error}") from error
    except OSError as error:
        raise StartFailed(f"a folder of services cannot be read: {error.strerror}") from error
    if not files and not settings.services:
        raise StartFailed("there is nothing to serve: pass --services DIR with a folder of handler files")
    return listing, files


def folder(path: Path) -> Path:
    if not path.is_dir():
        raise StartFailed(f"there is no folder {path}: pass --services DIR with a folder of handler files")
    return path.resolve()


def address(text: str, flag: str = "--inference") -> tuple[str, int]:
    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise StartFailed(f"'{text}' is no address: pass {flag} HOST:PORT")
    return host, int(port)


def worker_count(count: int) -> int:
    if not 1 <= count <= 256:
        raise StartFailed(f"{count} workers are not possible: pass --workers N with N from 1 to 256")
    return count
