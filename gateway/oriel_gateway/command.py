"""The `oriel gateway` command: flags to settings."""

import argparse
import os
from pathlib import Path

from oriel_gateway.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.process.environment import take_secret
from oriel_wire.process.flags import add_flags, values
from oriel_wire.process.shared_settings import state_folder, usage_folder


def _quota_file(chosen: Path | None) -> Path | None:
    if chosen is not None:
        return None if str(chosen) == "none" else chosen
    return state_folder() / "quotas.db"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the gateway's flags."""
    add_flags(parser, Settings)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal stops the gateway; return the exit code."""
    from oriel_wire.engine.large_messages import share_memory

    share_memory()  # this has to happen before imports start threads
    from oriel_gateway.app import check, serve
    from oriel_gateway.identity.tickets import ticket_keys
    from oriel_wire.process.logs import configure_logging
    from oriel_wire.process.process import run_unit
    from oriel_wire.process.worker import inherited

    worker = inherited()
    configure_logging("gateway", "" if worker is None else f"/{worker.index}")
    environment = dict(os.environ)  # for workers, before secrets are taken out of it
    chosen = values(Settings, args) | {
        "state": state_folder(),
        "endpoints": _grouped(args.endpoint),
        "grpc_endpoints": _grouped(args.grpc_endpoint),
        "quota_file": _quota_file(args.quota_file),
        "usage_folder": usage_folder(args.usage),
        "limiter": args.limiter or take_secret("ORIEL_LIMITER") or "embedded",
        "limiter_password": take_secret("ORIEL_LIMITER_PASSWORD") or None,
        "ticket_keys": ticket_keys(args.ticket_keys_file),
        "worker": worker,
        "trace_url": trace_link(os.environ.get("ORIEL_TRACE_URL", "")),
    }
    settings = Settings(**chosen)
    if settings.workers > 1 and worker is None:
        from oriel_gateway.workers import serve_with_workers

        return run_unit(lambda stop: serve_with_workers(settings, check, environment, stop), unit="gateway")
    return run_unit(lambda stop: serve(settings, stop), unit="gateway")


def _grouped(overrides: list[tuple[str, tuple[str, int]]]) -> dict[str, tuple[tuple[str, int], ...]]:
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for pool, address in overrides:
        out[pool] = (*out.get(pool, ()), address)
    return out


def trace_link(text: str) -> str:
    """Return the link to a trace that the console shows; "" for none. Raises StartFailed."""
    if text and (not text.startswith(("https://", "http://")) or "{trace_id}" not in text or len(text) > 2048):
        raise StartFailed("ORIEL_TRACE_URL must be a link like https://traces.example.com/trace/{trace_id}")
    return text
