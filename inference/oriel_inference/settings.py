"""What the unit is told from outside."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Literal

from oriel_inference.repository.defaults import LoadDefaults

__all__ = ["Settings", "available_cores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Port 0 takes any free one, None is not opened. Bounds of the queues are per model version.

    max_batch_bytes: inputs of one execution; a single request may have more.
    cores: what running batches may use together. default_timeout_s: the deadline of a request that brings none.
    control_mode: "none" loads everything at start, "poll" also follows the folders every `poll_s`, "explicit" loads
    `load_models` ("*": all) and what clients ask for. strict_readiness: ready only while every model of the start
    serves (True), once the first load has ended (False), or only while one model serves if the start had any ("any").
    check_timeout_s: for opening one model file in the process that tries it first.
    load_threads: how many models load at once, 0 lets the server choose. trusted_peers: addresses or networks whose
    `x-oriel-*` headers count. repositories: folders, and URLs of object stores as text; versions of these are kept
    below model_cache (None: where caches lie), at most max_cache_bytes. access_log: a file, "-" for standard output, ""
    for none.
    exit_on_error: do not serve at all if a model of the start cannot. server_id: the server's name in its metadata.
    log: what differs from the logging settings' defaults. grpc_options: gRPC's own (`grpc.*`), beside ours.
    """

    repositories: tuple[Path | str, ...]
    model_cache: Path | None = None
    max_cache_bytes: int = 32 << 30
    http_host: str = "127.0.0.1"
    http_port: int | None = 8000
    grpc_host: str = "127.0.0.1"
    grpc_port: int | None = 8001
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = 8002
    cores: int = 1
    default_timeout_s: float = 60.0
    max_body_bytes: int = 64 << 20
    max_queue_items: int = 10_000
    max_queue_bytes: int = 256 << 20
    max_batch_bytes: int = 64 << 20
    trusted_peers: tuple[str, ...] = ("127.0.0.0/8", "::1")
    drain_s: float = 25.0
    control_mode: str = "none"
    poll_s: float = 15.0
    load_models: tuple[str, ...] = ()
    strict_readiness: bool | Literal["any"] = True
    exit_on_error: bool = False
    server_id: str = "oriel"
    log: Mapping[str, bool | int | str] = field(default_factory=dict)
    log_file: str = ""
    grpc_options: tuple[tuple[str, int], ...] = ()
    load_threads: int = 0
    load_defaults: LoadDefaults = field(default_factory=LoadDefaults)
    check_timeout_s: float = 60.0
    access_log: str = ""


def available_cores() -> int:
    """Cores this process may use: its affinity and its control group's quota, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        pass  # no control group v2: the affinity is all there is to know
    return max(1, cores)
