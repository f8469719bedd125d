"""The settings of one gateway process, with the flags of `oriel gateway` in their metadata."""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oriel_gateway.documents.source import store_location
from oriel_wire.objects.client import Location
from oriel_wire.objects.errors import BadStoreUrl
from oriel_wire.process.flags import Flag, flag, number, setting, split_url
from oriel_wire.process.shared_settings import log_format_flag, usage_flag, usage_store_flag
from oriel_wire.process.worker import Worker

Addresses = Mapping[str, tuple[tuple[str, int], ...]]

_OVERRIDE = re.compile(r"([A-Za-z0-9._-]+)=(\[[0-9a-fA-F:]+\]|[A-Za-z0-9.-]+):([0-9]{1,5})\Z")


def _override(text: str) -> tuple[str, tuple[str, int]]:
    match = _OVERRIDE.match(text)
    if match is None or not 0 < int(match[3]) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not POOL=HOST:PORT")
    return match[1], (match[2].strip("[]"), int(match[3]))


def _limiter(text: str) -> str:
    parts = split_url(text)
    if text != "embedded" and (parts.scheme not in ("redis", "rediss") or not parts.hostname):
        raise argparse.ArgumentTypeError("a limiter must be 'embedded', redis://HOST:PORT/DB or rediss://HOST:PORT/DB")
    if parts.password:
        raise argparse.ArgumentTypeError(
            "others can read this process's arguments: put the password into ORIEL_LIMITER_PASSWORD"
        )
    return text


def key_prefix(text: str) -> str:
    """Return the prefix of all keys in Redis that a flag names. Raises ArgumentTypeError."""
    if not re.fullmatch(r"[A-Za-z0-9:._-]{1,64}", text):
        raise argparse.ArgumentTypeError("a prefix must be 1 to 64 letters, digits, colons, dots, dashes, underscores")
    return text


def _policies(text: str) -> Path | Location:
    if "://" not in text:
        return Path(text)
    try:
        return store_location(text)
    except BadStoreUrl as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _addresses(name: str, protocol: str) -> dict[str, tuple[Flag, ...]]:
    return flag(
        name,
        dest=name.removeprefix("--").replace("-", "_"),
        type=_override,
        action="append",
        default=[],
        metavar="POOL=HOST:PORT",
        help=f"{protocol} address of a pool, instead of the document's; may be repeated",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The help of each flag describes its field; this is the rest.

    endpoints, grpc_endpoints: pool name -> addresses that replace those of the documents.
    limiter: "embedded" or the URL of a Redis. limiter_replicas: used until the limiter has counted the gateways itself.
    limiter_ca: file of certificate authorities; the machine's own count if None or not there at start.
    tls_cert, tls_key: both or neither; they are checked for changes each second.
    access_log: a path or "-"; "" writes none. quota_file: file of the quotas; None keeps them in memory only.
    state: a folder for files that outlive this process; None if nothing does.
    worker: the place of this process among workers; None if it is a gateway by itself, or their parent.
    trace_url: the address at which the console shows a trace, with `{trace_id}` in it; "" for nowhere.
    """

    policies: Path | Location = field(
        metadata=flag(
            "--policies",
            type=_policies,
            required=True,
            metavar="DIR|URL",
            help="folder of policy documents (TOML), or s3://bucket/prefix, gs://bucket/prefix, "
            "az://account/container/prefix; credentials come from the environment",
        )
    )
    host: str = setting("127.0.0.1", "--host", help="address of the public ports (default %(default)s)")
    http_port: int = setting(8080, "--http-port", help="public HTTP (default %(default)s)")
    grpc_port: int = setting(8081, "--grpc-port", help="public gRPC (default %(default)s)")
    admin_host: str = setting("127.0.0.1", "--admin-host", help="address of the admin port (default %(default)s)")
    workers: int = setting(
        1,
        "--workers",
        type=number(int, 1, 64),
        help="processes that serve the public ports together, with one set of limits and one admin port: as many as "
        "there are cores for the gateway (default %(default)s)",
    )
    admin_port: int = setting(8082, "--admin-port", help="health, metrics, queues (default %(default)s)")
    internal_host: str = setting(
        "127.0.0.1", "--internal-host", help="address of the internal port, never a public one (default %(default)s)"
    )
    internal_port: int = setting(
        8084,
        "--internal-port",
        help="model calls of logic servers, by ticket; open if there are ticket keys (default %(default)s)",
    )
    ticket_keys: tuple[bytes, ...] = field(
        default=(),
        repr=False,
        metadata=flag(
            "--ticket-keys",
            dest="ticket_keys_file",
            type=Path,
            metavar="FILE",
            help="keys that sign the tickets of requests to logic servers: the first one signs, all are accepted "
            "(default: those in ORIEL_TICKET_KEYS; without keys there are no tickets)",
        ),
    )
    scaler_port: int = setting(
        0, "--scaler-port", help="KEDA's external scaler on --host, usually 8083; 0: none (default)"
    )
    scaler_client_ca: Path | None = setting(
        None,
        "--scaler-client-ca",
        metavar="FILE",
        help="serve the scaler over TLS with --tls-cert, to clients with a certificate of this authority, PEM",
    )
    admin_pages: str = setting(
        "token",
        "--admin-pages",
        choices=("token", "loopback"),
        help="where --admin-host is wider than loopback and there is no token: do not start, or show queues, "
        "decisions and policies to this machine only (default %(default)s)",
    )
    tls_cert: Path | None = setting(
        None, "--tls-cert", metavar="FILE", help="certificate chain of both public ports, PEM"
    )
    tls_key: Path | None = setting(
        None, "--tls-key", metavar="FILE", help="its key, PEM; both are reloaded when they change"
    )
    keep_alive_s: float = setting(
        75.0,
        "--keep-alive-s",
        type=number(float, 1, 86_400),
        help="seconds for which a public connection stays open without a request: more than a load balancer "
        "keeps its own (default %(default)g)",
    )
    cache_bytes: int = setting(
        64 << 20,
        "--cache-bytes",
        type=number(int, 0, 10**15 - 1),
        help="memory for kept answers of deterministic routes, 0: keep none (default %(default)s)",
    )
    endpoints: Addresses = field(default_factory=dict, metadata=_addresses("--endpoint", "HTTP"))
    grpc_endpoints: Addresses = field(default_factory=dict, metadata=_addresses("--grpc-endpoint", "gRPC"))
    limiter: str = field(
        default="embedded",
        repr=False,
        metadata=flag(
            "--limiter",
            type=_limiter,
            default=None,
            metavar="URL",
            help="who counts: 'embedded' (this process), or redis://HOST:PORT/DB or rediss://... for several "
            "gateways together; its password comes from ORIEL_LIMITER_PASSWORD (default: ORIEL_LIMITER, else "
            "embedded)",
        ),
    )
    limiter_prefix: str = setting(
        "oriel:",
        "--limiter-prefix",
        type=key_prefix,
        metavar="TEXT",
        help="of all keys in Redis: environments on one database need one each (default %(default)s)",
    )
    limiter_replicas: int = setting(
        1,
        "--limiter-replicas",
        help="gateways that share the limiter, until it says how many there are (default %(default)s)",
    )
    limiter_ca: Path | None = setting(
        None,
        "--limiter-ca",
        metavar="FILE",
        help="who signs for a rediss:// limiter, PEM; if there is no such file: whom this machine trusts",
    )
    access_log: str = setting(
        "", "--access-log", metavar="PATH|-", help="a JSON line per request; - is standard output (default none)"
    )
    log_format: str = field(default="", metadata=log_format_flag())
    quota_file: Path | None = setting(
        None,
        "--quota-file",
        metavar="FILE",
        help="where the embedded limiter keeps its quotas over a restart (default: quotas.db in ORIEL_STATE or "
        "~/.local/state/oriel); 'none' keeps nothing",
    )
    usage_folder: Path | None = field(default=None, metadata=usage_flag())
    usage_store: Location | None = field(default=None, metadata=usage_store_flag())
    trace_tail: str = setting(
        "gateway",
        "--trace-tail",
        choices=("gateway", "collector"),
        help="who keeps the traces of late and failed requests: the gateway asks the servers for their spans, or a "
        "collector of your own gets the spans of all requests and chooses (default %(default)s)",
    )
    limiter_password: str | None = field(default=None, repr=False)
    worker: Worker | None = None
    state: Path | None = None
    trace_url: str = ""
