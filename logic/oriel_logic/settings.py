"""The settings of a logic server: every limit and its default, with the flags of `oriel logic` in their metadata."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

from oriel_wire.objects.client import Location
from oriel_wire.process.flags import flag, setting
from oriel_wire.process.shared_settings import (
    LOOPBACK,
    log_format_flag,
    trusted_peer_flag,
    usage_flag,
    usage_store_flag,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes are in bytes, times in seconds.

    services: folders of services, or the file or folder of one service. named: `module:attribute` of installed ones.
    watch: True if the folders are polled for changes, every poll_s.
    inference, inference_grpc: (host, port) of each inference server, for calls and for streams.
    gateway: internal ports of gateways through which models are called instead.
    usage_folder: None records no usage. usage_store: None for none.
    trusted_peers: addresses and networks whose `x-oriel-*` headers are honoured.
    release_drain_s: time for a replaced release to finish its requests.
    sample_timeout_s: time for a new version to answer its sample.
    default_timeout_s: the deadline of a request that brings none, because it did not come through a gateway.
    max_in_flight: requests at a time; further ones are refused. max_waiting: jobs that wait for a worker.
    max_held_bytes: request bodies held in memory, all together. stream_idle_s: longest silence in a streamed answer.
    overrun_s: seconds after its deadline for which a job may keep its worker busy before the worker is killed.
    max_body_bytes: one request body; a larger one is answered 413. max_waiting_bytes: bytes of the jobs that wait.
    max_frame_bytes: one job or result between server and worker; a larger one fails with 500.
    poll_s: seconds between two polls of the folders. drain_s: time at a stop to finish the requests under way.
    """

    services: tuple[Path, ...] = field(
        metadata=flag("--services", action="append", type=Path, metavar="DIR", help="folder of services; repeatable")
    )
    named: tuple[str, ...] = setting(
        (),
        "--service",
        metavar="MODULE:NAME",
        help="a service that is installed; repeatable, beside those of the entry points 'oriel.services'",
    )
    watch: bool = setting(
        True, "--watch", action=argparse.BooleanOptionalAction, help="set up what changes in the folders; default yes"
    )
    inference: tuple[tuple[str, int], ...] = field(
        metadata=flag(
            "--inference",
            action="append",
            metavar="HOST:PORT",
            help="v2 inference server (HTTP); a name stands for all its addresses, kubernetes:SERVICE[.NAMESPACE]:PORT "
            "for the pods of a service; repeatable; default 127.0.0.1:8000",
        )
    )
    inference_grpc: tuple[tuple[str, int], ...] = setting(
        (),
        "--inference-grpc",
        metavar="HOST:PORT",
        help="the same servers' gRPC, for models.stream; repeatable; default 127.0.0.1:8001",
    )
    gateway: tuple[tuple[str, int], ...] = setting(
        (),
        "--gateway",
        metavar="HOST:PORT",
        help="internal port of a gateway: call models through it and not at --inference, so that they may be "
        "scaled to zero; repeatable",
    )
    usage_folder: Path | None = field(default=None, metadata=usage_flag())
    usage_store: Location | None = field(default=None, metadata=usage_store_flag())
    log_format: str = field(default="", metadata=log_format_flag())
    host: str = setting("127.0.0.1", "--host", help="address to listen on")
    http_port: int = setting(8090, "--http-port")
    admin_port: int = setting(8092, "--admin-port", help="health and metrics")
    trusted_peers: tuple[str, ...] = field(default=LOOPBACK, metadata=trusted_peer_flag())
    workers: int = setting(2, "--workers", help="worker processes for CPU work")
    worker_environment: str = setting(
        "",
        "--worker-environment",
        metavar="NAME,...",
        help="environment variables that services see beside those that interpreters need; NAME* for all that "
        "begin so (default: ORIEL_WORKER_ENVIRONMENT)",
    )
    poll_s: float = 0.5
    release_drain_s: float = 60.0
    sample_timeout_s: float = 30.0
    default_timeout_s: float = 30.0
    max_in_flight: int = 1024
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 512 << 20
    stream_idle_s: float = 60.0
    max_frame_bytes: int = 64 << 20
    max_waiting: int = 256
    max_waiting_bytes: int = 256 << 20
    overrun_s: float = 10.0
    drain_s: float = 20.0
