"""What one gateway process is told at start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oriel_gateway.routing_state import CACHE_BYTES
from oriel_gateway.sources import StoreUrl

__all__ = ["Settings"]

Addresses = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """policies: a folder, or where it is kept in an object store. state: a folder for what outlives this process, None:
    nothing does.
    endpoints, grpc_endpoints: pool name -> addresses that replace those of the documents.

    quota_file: where the embedded limiter keeps its quotas, None: nowhere. limiter: "embedded" or the URL of a Redis;
    limiter_replicas: gateways that share it, as long as it has not said how many there are. limiter_ca: PEM file of who
    signs for a rediss:// one; None, or not there at start: whom this machine trusts.
    tls_cert, tls_key: PEM files of both public ports, or neither; they are looked at each second.
    cache_bytes: for kept answers of deterministic routes, 0 = keep none.
    admin_pages: "token", or "loopback": without a token only whoever asks from this machine reads them.
    """

    policies: Path | StoreUrl
    state: Path | None = None
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    admin_pages: str = "token"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    endpoints: Addresses = field(default_factory=dict)
    grpc_endpoints: Addresses = field(default_factory=dict)
    trace_sample_ratio: float = 1.0
    access_log: str = ""  # a path or "-", "" is none
    quota_file: Path | None = None
    limiter: str = field(default="embedded", repr=False)
    limiter_password: str | None = field(default=None, repr=False)
    limiter_replicas: int = 1
    limiter_ca: Path | None = None
    cache_bytes: int = CACHE_BYTES
