"""What a logic server is told at start, with every limit and its default."""

from dataclasses import dataclass
from pathlib import Path

__all__ = ["LOOPBACK", "Settings"]

LOOPBACK = ("127.0.0.0/8", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """services: folders of services, or a service's own file or folder. named: `module:attribute` of services that
    are installed. watch: whether the folders are looked at again, every poll_s. release_drain_s: for what a replaced
    release still has to do. sample_timeout_s: for the answer to a new version's sample.
    inference, inference_grpc: (host, port) of each inference server, for calls and streams. Sizes in bytes, times
    in seconds.

    default_timeout_s: the deadline of a request that brings none (it did not come through a gateway).
    max_in_flight: requests at a time, further ones are refused. max_waiting: jobs that wait for a worker.
    max_held_bytes: of request bodies, all together. stream_idle_s: the longest silence in a streamed answer.
    trusted_peers: addresses and networks whose `x-oriel-*` headers count.
    overrun_s: how long after its deadline a job may keep its worker busy before the worker is killed.
    """

    services: tuple[Path, ...]
    inference: tuple[tuple[str, int], ...]
    inference_grpc: tuple[tuple[str, int], ...] = ()
    named: tuple[str, ...] = ()
    watch: bool = True
    poll_s: float = 0.5
    release_drain_s: float = 60.0
    sample_timeout_s: float = 30.0
    host: str = "127.0.0.1"
    http_port: int = 8090
    admin_port: int = 8092
    workers: int = 2
    default_timeout_s: float = 30.0
    max_in_flight: int = 1024
    max_body_bytes: int = 16 << 20
    max_held_bytes: int = 512 << 20
    stream_idle_s: float = 60.0
    trusted_peers: tuple[str, ...] = LOOPBACK
    max_frame_bytes: int = 64 << 20
    max_waiting: int = 256
    max_waiting_bytes: int = 256 << 20
    overrun_s: float = 10.0
    drain_s: float = 20.0
