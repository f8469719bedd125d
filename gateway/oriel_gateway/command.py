"""`oriel gateway`: flags to settings."""

import argparse
import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from oriel_gateway.sources import StoreUrl, store_url

__all__ = ["add_arguments", "run"]

_OVERRIDE = re.compile(r"([A-Za-z0-9._-]+)=(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})\Z")


def _override(text: str) -> tuple[str, tuple[str, int]]:
    match = _OVERRIDE.match(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not POOL=HOST:PORT")
    return match[1], (match[2].strip("[]"), int(match[3]))


def _limiter(text: str) -> str:
    parts = urlsplit(text)
    if text != "embedded" and (parts.scheme not in ("redis", "rediss") or not parts.hostname):
        raise argparse.ArgumentTypeError("a limiter is 'embedded', redis://HOST:PORT/DB or rediss://HOST:PORT/DB")
    if parts.password:
        raise argparse.ArgumentTypeError(
            "others can read this process's arguments: put the password into ORIEL_LIMITER_PASSWORD"
        )
    return text


def _policies(text: str) -> Path | StoreUrl:
    if "://" not in text:
        return Path(text)
    try:
        return store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _state() -> Path:
    """The folder for what outlives this process."""
    state = os.environ.get("ORIEL_STATE")
    if state:
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "oriel"


def _quota_file(chosen: Path | None) -> Path | None:
    if chosen is not None:
        return None if str(chosen) == "none" else chosen
    return _state() / "quotas.db"


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The gateway's flags."""
    parser.add_argument(
        "--policies",
        type=_policies,
        required=True,
        metavar="DIR|URL",
        help="folder of policy documents (TOML), or s3://bucket/prefix, gs://bucket/prefix, "
        "az://account/container/prefix; credentials come from the environment",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address of the public ports (default %(default)s)")
    parser.add_argument("--http-port", type=int, default=8080, help="public HTTP (default %(default)s)")
    parser.add_argument("--grpc-port", type=int, default=8081, help="public gRPC (default %(default)s)")
    parser.add_argument("--admin-host", default="127.0.0.1", help="address of the admin port (default %(default)s)")
    parser.add_argument("--admin-port", type=int, default=8082, help="health, metrics, queues (default %(default)s)")
    parser.add_argument(
        "--admin-pages",
        choices=("token", "loopback"),
        default="token",
        help="where --admin-host is wider than loopback and there is no token: do not start, or show queues, decisions "
        "and policies to this machine only (default %(default)s)",
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate chain of both public ports, PEM")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key, PEM; both are reloaded when they change")
    parser.add_argument(
        "--cache-bytes",
        type=_count,
        default=64 << 20,
        metavar="N",
        help="memory for kept answers of deterministic routes, 0: keep none (default %(default)s)",
    )
    for flag, what in (("--endpoint", "HTTP"), ("--grpc-endpoint", "gRPC")):
        parser.add_argument(
            flag,
            type=_override,
            action="append",
            default=[],
            metavar="POOL=HOST:PORT",
            help=f"{what} address of a pool, instead of the document's; may be repeated",
        )

    parser.add_argument(
        "--limiter",
        type=_limiter,
        default=None,
        metavar="URL",
        help="who counts: 'embedded' (this process), or redis://HOST:PORT/DB or rediss://... for several gateways "
        "together; its password comes from ORIEL_LIMITER_PASSWORD (default: ORIEL_LIMITER, else embedded)",
    )
    parser.add_argument(
        "--limiter-replicas",
        type=int,
        default=1,
        metavar="N",
        help="gateways that share the limiter, until it says how many there are (default %(default)s)",
    )
    parser.add_argument(
        "--limiter-ca",
        type=Path,
        metavar="FILE",
        help="who signs for a rediss:// limiter, PEM; if there is no such file: whom this machine trusts",
    )
    parser.add_argument(
        "--access-log",
        default="",
        metavar="PATH|-",
        help="a JSON line per request; - is standard output (default none)",
    )
    parser.add_argument(
        "--quota-file",
        type=Path,
        default=None,
        metavar="FILE",
        help="where the embedded limiter keeps its quotas over a restart (default: quotas.db in ORIEL_STATE or "
        "~/.local/state/oriel); 'none' keeps nothing",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the exit code."""
    from oriel_wire.engine.large_messages import share_memory

    share_memory()  # before imports begin threads
    from oriel_gateway.app import serve
    from oriel_gateway.settings import Settings
    from oriel_wire.engine.process import configure_logging, run_unit

    configure_logging("gateway")
    settings = Settings(
        policies=args.policies,
        state=_state(),
        host=args.host,
        http_port=args.http_port,
        grpc_port=args.grpc_port,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        admin_pages=args.admin_pages,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        endpoints=_grouped(args.endpoint),
        grpc_endpoints=_grouped(args.grpc_endpoint),
        cache_bytes=args.cache_bytes,
        trace_sample_ratio=_ratio(os.environ.get("OTEL_TRACES_SAMPLER_ARG", "")),
        access_log=args.access_log,
        quota_file=_quota_file(args.quota_file),
        limiter=args.limiter or os.environ.get("ORIEL_LIMITER") or "embedded",
        limiter_password=os.environ.get("ORIEL_LIMITER_PASSWORD"),
        limiter_replicas=args.limiter_replicas,
        limiter_ca=args.limiter_ca,
    )
    return run_unit(lambda stop: serve(settings, stop), unit="gateway")


def _grouped(overrides: list[tuple[str, tuple[str, int]]]) -> dict[str, tuple[tuple[str, int], ...]]:
    out: dict[str, tuple[tuple[str, int], ...]] = {}
    for pool, address in overrides:
        out[pool] = (*out.get(pool, ()), address)
    return out


def _ratio(text: str) -> float:
    try:
        return min(1.0, max(0.0, float(text)))
    except ValueError:
        return 1.0
