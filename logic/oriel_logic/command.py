"""`oriel logic`: the flags of a logic server."""

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oriel_logic.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.process.flags import add_flags, values
from oriel_wire.process.shared_settings import usage_folder

if TYPE_CHECKING:
    from oriel_logic.dev.session import Session
    from oriel_logic.loading.listing import Listing
    from oriel_logic.loading.sources import HandlerFile

GRPC = "127.0.0.1:8001"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a logic server."""
    add_flags(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Run a logic server; return 0 if it was stopped, 1 if it crashed, 2 if it could not start (the reason is on
    stderr).
    """
    from oriel_wire.engine.peers import TrustedPeers

    try:
        if args.gateway and (args.inference or args.inference_grpc):
            raise StartFailed("models are called at --inference or through --gateway: pass one of them")
        chosen = values(Settings, args) | {
            "services": tuple(folder(path) for path in args.services or ()),
            "watch": args.watch and bool(args.services),
            "inference": tuple(address(text) for text in args.inference or ["127.0.0.1:8000"]),
            "inference_grpc": tuple(address(text, "--inference-grpc") for text in args.inference_grpc or [GRPC]),
            "gateway": tuple(address(text, "--gateway") for text in args.gateway or ()),
            "workers": worker_count(args.workers),
            "usage_folder": usage_folder(args.usage),
        }
        settings = Settings(**chosen)
        TrustedPeers(settings.trusted_peers)
        pass_on(settings.worker_environment)
        return launch(settings)
    except StartFailed as error:
        from oriel_wire.process.logs import write_refusal

        write_refusal(f"oriel logic: {error}")
        return 2


def launch(settings: Settings, dev: "Session | None" = None) -> int:
    """Run a server until it is stopped; return the exit code. dev: the session of `oriel logic dev`. Raises
    StartFailed.
    """
    listing, files = at_start(settings)
    use_one_thread()
    from oriel_logic.workers.launch import ForkServer

    # Before anything starts threads, and early: they import the services while this process imports the rest.
    server = ForkServer.launch(files, max_frame_bytes=settings.max_frame_bytes)
    scratch = ForkServer.launch(files, sets_up_all=True, max_frame_bytes=settings.max_frame_bytes)
    from oriel_logic.app import serve_unit
    from oriel_wire.process.logs import configure_logging
    from oriel_wire.process.output import LimitedStream
    from oriel_wire.process.process import run_unit

    configure_logging("logic")
    if dev is not None:
        dev.configure_logging()
    else:  # `async def` services print here; the log has been configured and is not concerned
        sys.stdout = LimitedStream(sys.stdout)
        sys.stderr = LimitedStream(sys.stderr)

    async def main(stop: asyncio.Event) -> None:
        await serve_unit(settings, server, scratch, listing, stop, dev)

    return run_unit(main, unit="logic")


def pass_on(names: str) -> None:
    """Let services see further variables. names: the names of the flag, "" without it. Raises StartFailed."""
    from oriel_logic.workers.launch import ALSO
    from oriel_wire.process.environment import names_of

    names = names or os.environ.get(ALSO, "")
    if names and names_of(names) is None:
        # The text is not repeated: it may be a value that should not be shown.
        raise StartFailed("--worker-environment takes names of environment variables, NAME or BEGIN*, split by commas")
    os.environ[ALSO] = names


def use_one_thread() -> None:
    """Keep numpy from starting a thread per core in every process: array work belongs to the workers."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def import_ahead() -> None:
    """Import the modules that a server needs, ahead of its start."""
    use_one_thread()
    import oriel_logic.app
    import oriel_logic.workers.launch

    del oriel_logic


def at_start(settings: Settings) -> "tuple[Listing, list[HandlerFile]]":
    """List the folders, and the handlers that share the first worker processes. Raises StartFailed."""
    from oriel_logic.loading.listing import read_listing, together
    from oriel_logic.loading.sources import installed_files, named_file

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
    """Return the host and port of HOST:PORT or kubernetes:SERVICE[.NAMESPACE]:PORT. Raises StartFailed."""
    from oriel_wire.discovery.endpoint_slices import KUBERNETES, is_service

    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    kubernetes = host.startswith(KUBERNETES)
    known = is_service(host.removeprefix(KUBERNETES)) if kubernetes else bool(host)
    if not colon or not known or not port.isdecimal() or not 0 < int(port) < 65536:
        form = f"{KUBERNETES}SERVICE[.NAMESPACE]:PORT" if kubernetes else "HOST:PORT"
        raise StartFailed(f"'{text}' is no address: pass {flag} {form}")
    return host, int(port)


def worker_count(count: int) -> int:
    if not 1 <= count <= 256:
        raise StartFailed(f"{count} workers are not possible: pass --workers N with N from 1 to 256")
    return count
