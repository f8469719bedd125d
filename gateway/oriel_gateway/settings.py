"""What one gateway process is told at start."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oriel_gateway.routing_state import CACHE_BYTES

__all__ = ["Settings"]

Addresses = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """endpoints, grpc_endpoints: pool name -> addresses that replace those of the documents.

    cache_bytes: for kept answers of deterministic routes, 0 = keep none.
    """

    policies: Path
    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    admin_host: str = "127.0.0.1"
    admin_port: int = 8082
    endpoints: Addresses = field(default_factory=dict)
    grpc_endpoints: Addresses = field(default_factory=dict)
    trace_sample_ratio: float = 1.0
    cache_bytes: int = CACHE_BYTES
