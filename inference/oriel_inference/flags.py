"""Flags of tritonserver that this server accepts without effect, or refuses. docs/tritonserver-flags.md lists all.

A flag that only tunes Triton's own engine, or has no counterpart that could change an answer, is accepted with one
warning. A flag that would change answers or security if it were ignored stops the start. A value that asks for what
holds here anyway is silent in both cases.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oriel_wire.errors import StartFailed


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag of tritonserver.

    why: the end of a sentence.
    refused: stops the start.
    silent: values in lower case that ask for what holds anyway.
    """

    name: str
    why: str
    refused: bool = False
    silent: frozenset[str] = frozenset()


_THREADS = "requests are read by one event loop, models compute in --cores threads"
_POOL = "memory is taken as it is needed, there are no pools"
_GPU = "GPU memory is managed by the runtime of each model"
_PLUGIN = "backends are Python packages, no shared libraries are loaded"
_PINGS = "a client with calls that is silent for 60 s is pinged, and cut if nothing comes from it in 20 s"
_COST = "a client may send pings as long as they are few beside its calls"


def _ignored(why: str, *names: str, silent: frozenset[str] = frozenset()) -> list[ForeignFlag]:
    return [ForeignFlag(name, why, silent=silent) for name in names]


def _refused(why: str, *names: str) -> list[ForeignFlag]:
    return [ForeignFlag(name, why, refused=True) for name in names]


_ROWS = [
    *_ignored(_THREADS, "--http-thread-count", "--grpc-infer-thread-count", "--buffer-manager-thread-count"),
    *_ignored(_POOL, "--grpc-infer-allocation-pool-size", "--grpc-max-response-pool-size"),
    *_ignored(_POOL, "--pinned-memory-pool-byte-size"),
    *_ignored(_GPU, "--cuda-memory-pool-byte-size", "--cuda-virtual-address-size", "--enable-peer-access"),
    *_ignored("the runtime says itself which GPUs it can use", "--min-supported-compute-capability"),
    *_ignored(
        "answers are not compressed over gRPC", "--grpc-infer-response-compression-level", silent=frozenset({"none"})
    ),
    *_ignored(_PINGS, "--grpc-keepalive-time", "--grpc-keepalive-timeout", "--grpc-keepalive-permit-without-calls"),
    *_ignored(_COST, "--grpc-http2-max-pings-without-data", "--grpc-http2-max-ping-strikes"),
    *_ignored(_COST, "--grpc-http2-min-recv-ping-interval-without-data"),
    *_ignored(
        "calls on a connection that has reached its age end in their own time", "--grpc-max-connection-age-grace"
    ),
    *_ignored("metrics are read on request", "--metrics-interval-ms"),
    *_ignored("the processor's metrics are always there", "--allow-cpu-metrics", silent=frozenset({"true", "1", "on"})),
    *_ignored("the response cache is part of the server", "--cache-directory"),
    *_ignored(_PLUGIN, "--backend-directory", "--repoagent-directory"),
    *_ignored("a load is tried once; poll mode tries again when files change", "--model-load-retry-count"),
    *_ignored("threads are not pinned", "--host-policy"),
    *_ignored(_THREADS, "--sagemaker-thread-count", "--vertex-ai-thread-count"),
    *_ignored("the port is opened wherever it is free", "--sagemaker-safe-port-range"),
    *_refused("free GPU memory is not checked before a model is loaded", "--model-load-gpu-limit"),
]
FOREIGN = {flag.name: flag for flag in _ROWS}


class _Remember(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.foreign = [*namespace.foreign, (self.option_strings[0], values)]


def add_foreign(parser: argparse.ArgumentParser) -> None:
    """Add the flags to the parser, hidden from --help. Their values are stored as `foreign`: (name, value) in their
    order.
    """
    parser.set_defaults(foreign=[])
    for name in FOREIGN:
        parser.add_argument(name, action=_Remember, dest="foreign", help=argparse.SUPPRESS)


def settle(given: Iterable[tuple[str, str]]) -> Sequence[str]:
    """Return one warning for each flag without effect. Raises StartFailed for the first one that is refused."""
    warnings: dict[str, str] = {}
    for name, value in given:
        flag = FOREIGN[name]
        if value.strip().lower() in flag.silent:
            continue
        if flag.refused:
            raise StartFailed(f"{name} is refused, ignoring it would not be safe: {flag.why}")
        warnings[name] = f"{name} has no effect: {flag.why}"
    return list(warnings.values())
